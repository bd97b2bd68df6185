"""Acceptance checks 3, 6 and 7 of the hero run's specification (Marin, #8435): balance, document masks, pending bias."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model import moe as moe_module
from noonsight.model.moe import effective_bias, histogram_beta, moe, topk_beta
from noonsight.model.transformer import make_program, token_losses
from tests.model.reference import layer_of
from tests.model.setting import compiled, logits_of, packed_batch, shaken_extra, shaken_params, tiny_config

CONFIG = tiny_config()
PARAMS, EXTRA, BATCH = shaken_params(CONFIG), shaken_extra(CONFIG), packed_batch(CONFIG)


def test_load_is_even_after_200_steps():
    """Check 3: pending quantiles alone, on fresh random rows each step, bring the busiest expert within 5 % of the
    mean, though the router prefers some experts strongly.
    """
    config = tiny_config(width=8, expert_width=1, latent_width=0, num_shared_experts=0, exchange="einsum")
    layer = layer_of(shaken_params(config).layers, 0)
    layer = replace(layer, router=layer.router.at[0].set(jnp.linspace(-1.5, 1.5, config.num_experts)))

    def one_step(pending, key):
        rows = jax.random.normal(key, (1, 16_000, config.width)).at[..., 0].set(1.0)
        balanced = replace(layer, router_bias=effective_bias(pending))
        _, found = moe(rows, jnp.ones(rows.shape[:2], bool), balanced, config)
        return found.beta, found.load_max_over_mean

    scan = jax.jit(lambda keys: jax.lax.scan(one_step, jnp.zeros(config.num_experts), keys)[1])
    busiest = np.asarray(scan(jax.random.split(jax.random.key(0), 200)))
    assert busiest[0] > 1.5
    assert busiest[-1] < 1.05
    assert busiest[-50:].mean() < 1.04


def test_histogram_is_within_one_bin_of_the_exact_quantile():
    """Check 3: and it is the estimator of the equations, interpolation included."""
    rng = np.random.default_rng(0)
    margins, valid = rng.standard_normal((777, 5)).astype(np.float32), rng.random(777) < 0.7
    rank = float(valid.sum() * 2 / 5)
    live = margins[valid]
    exact = np.sort(live, axis=0)[::-1][int(np.ceil(rank)) - 1]
    for bins in (16, 10_000):
        estimate = compiled(lambda margins, valid, bins=bins: histogram_beta(margins, valid, jnp.float32(rank), bins))
        found = np.asarray(estimate(margins, valid))
        width = (live.max() - live.min()) / bins
        assert np.abs(found - exact).max() <= width + 1e-6
        counts = np.stack([np.histogram(live[:, e], bins, (live.min(), live.max()))[0] for e in range(5)])
        suffix = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
        star = np.array([np.flatnonzero(row >= rank).max() for row in suffix])
        each = np.arange(5)
        inside = width * (suffix[each, star] - rank) / counts[each, star]
        np.testing.assert_allclose(found, live.min() + star * width + inside, atol=2e-4 * width + 1e-6)
    top = np.asarray(compiled(lambda margins, valid: topk_beta(margins, valid, jnp.float32(rank)))(margins, valid))
    np.testing.assert_array_equal(top, np.sort(live, axis=0)[::-1][int(rank) - 1])


# What carries something from one position to another: both, only attention, only the convolutions.
PATHS = {
    "both": CONFIG,
    "attention": replace(CONFIG, sconv_kernel=0),
    "convolutions": replace(CONFIG, window=1, global_window=1),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_document_sees_no_other(path):
    """Check 6: other tokens in the second document change not one bit of the others' logits. In one document they
    do change what follows, and only that.
    """
    config = PATHS[path]
    params = shaken_params(config)

    def changed(segments, where):
        tokens = BATCH.tokens.at[:, where].set((BATCH.tokens[:, where] + 1) % config.vocab_size)
        one, two = (logits_of(config)(params, EXTRA, each, segments) for each in (BATCH.tokens, tokens))
        return np.abs(np.asarray(one) - np.asarray(two)).max(axis=(0, 2))

    apart = changed(BATCH.segments, slice(7, 23))
    assert (apart[:7] == 0).all() and (apart[23:] == 0).all()
    assert (apart[7:23] > 0).all()
    together = changed(jnp.zeros_like(BATCH.segments), slice(22, 23))
    assert (together[:22] == 0).all()
    assert (together[22:26] > 0).all()


def test_evaluation_routes_as_the_next_step_does(monkeypatch):
    """Check 7: with the pending quantiles of a step, evaluation sends every token to the experts that the training
    forward of the next step sends it to; with those of the step before it does not.
    """
    seen = []
    route = moe_module.route

    def watched(*arguments):
        routing = route(*arguments)
        jax.debug.callback(lambda chosen: seen.append(np.array(chosen)), routing.chosen, ordered=True)
        return routing

    monkeypatch.setattr(moe_module, "route", watched)
    program, batch = make_program(CONFIG), packed_batch(CONFIG, seed=1)
    train = compiled(lambda extra, batch: program.after_step(extra, program.loss(PARAMS, extra, batch)[1]))
    evaluate = compiled(lambda extra, batch: token_losses(PARAMS, extra, batch, CONFIG))

    def choices(forward, *arguments):
        seen.clear()
        jax.block_until_ready(forward(*arguments))
        jax.effects_barrier()
        assert len(seen) == CONFIG.num_layers
        return np.stack(seen)

    pending = train(EXTRA, BATCH)
    next_step = choices(train, pending, batch)
    np.testing.assert_array_equal(choices(evaluate, pending, batch), next_step)
    assert (choices(evaluate, EXTRA, batch) != next_step).any()
