"""What must hold of the whole model: isolation, balance, honest gradients, determinism, one treatment of the pending
bias.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.logbook.vocabulary import METRICS
from noonsight.model import layout
from noonsight.model.decode import decode_step, init_cache, prefill
from noonsight.model.families import delphi, marin_8b
from noonsight.model.loss import CHUNK_TOKENS, weighted_loss
from noonsight.model.moe import effective_bias, histogram_beta, route, topk_beta
from noonsight.model.transformer import init_extra, make_program
from tests.model.setting import (
    compiled,
    dense_config,
    logits_of,
    packed_batch,
    shaken_extra,
    shaken_params,
    step_of,
    tiny_config,
    token_losses_of,
)

CONFIG = tiny_config()
PARAMS, EXTRA, BATCH = shaken_params(CONFIG), shaken_extra(CONFIG), packed_batch(CONFIG)
STEP = step_of(CONFIG)


def all_logits(batch, extra=EXTRA):
    return np.asarray(logits_of(CONFIG)(PARAMS, extra, batch.tokens, batch.segments))


def test_documents_do_not_see_each_other():
    before = all_logits(BATCH)
    tokens = BATCH.tokens.at[:, 7:23].set((BATCH.tokens[:, 7:23] + 1) % CONFIG.vocab_size)
    after = all_logits(BATCH._replace(tokens=tokens))
    assert (before[:, :7] == after[:, :7]).all()
    assert (before[:, 23:] == after[:, 23:]).all()
    assert np.abs(before[:, 7:23] - after[:, 7:23]).max() > 0.1


def test_without_the_boundary_they_do():
    """The same change is seen by later tokens when all is one document, through attention and through convolution."""
    whole = BATCH._replace(segments=jnp.zeros_like(BATCH.segments))
    tokens = BATCH.tokens.at[:, 22].set((BATCH.tokens[:, 22] + 1) % CONFIG.vocab_size)
    changed = np.abs(all_logits(whole) - all_logits(whole._replace(tokens=tokens))).max(axis=(0, 2))
    assert (changed[:22] == 0).all()
    assert (changed[22:] > 0).all()


def test_balance_after_200_steps():
    """Pending quantiles alone, on fresh random rows each step, bring every expert to its share."""
    config = replace(CONFIG, num_experts=8)
    router = jax.random.normal(jax.random.key(1), (config.width, 8)) / 8
    offset = jnp.linspace(-1.5, 1.5, 8)

    def one_step(pending, key):
        m = jnp.concatenate([jax.random.normal(key, (4096, config.width)), jnp.ones((4096, 1))], axis=1)
        routing = route(m, jnp.concatenate([router, offset[None]]), effective_bias(pending), config)
        margins = routing.scores - routing.threshold[:, None]
        load = jnp.bincount(routing.chosen.reshape(-1), length=8)
        return histogram_beta(margins, jnp.ones(4096, bool), jnp.float32(4096 * 2 / 8), 10_000), load

    _, loads = jax.lax.scan(one_step, jnp.zeros(8), jax.random.split(jax.random.key(0), 200))
    assert float(loads[0].max() / loads[0].mean()) > 1.5
    average = np.asarray(loads[-20:]).mean(axis=0)
    assert average.max() / average.mean() < 1.05


def test_histogram_is_within_one_bin_of_the_exact_quantile():
    rng = np.random.default_rng(0)
    margins, valid = rng.standard_normal((777, 5)).astype(np.float32), rng.random(777) < 0.7
    rank = float(valid.sum() * 2 / 5)
    live = margins[valid]
    exact = np.sort(live, axis=0)[::-1][int(np.ceil(rank)) - 1]
    for bins in (16, 10_000):
        found = np.asarray(histogram_beta(jnp.asarray(margins), jnp.asarray(valid), jnp.float32(rank), bins))
        assert np.abs(found - exact).max() <= (live.max() - live.min()) / bins + 1e-6
        counts = np.stack([np.histogram(live[:, e], bins, (live.min(), live.max()))[0] for e in range(5)])
        suffix = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
        star = np.array([np.flatnonzero(row >= rank).max() for row in suffix])
        width = (live.max() - live.min()) / bins
        each = np.arange(5)
        np.testing.assert_allclose(
            found,
            live.min() + star * width + width * (suffix[each, star] - rank) / counts[each, star],
            atol=2e-4 * width + 1e-6,
        )
    top = np.asarray(topk_beta(jnp.asarray(margins), jnp.asarray(valid), jnp.float32(rank)))
    np.testing.assert_array_equal(top, np.sort(live, axis=0)[::-1][int(rank) - 1])


def test_no_expert_sees_padding():
    """What stands in padding changes neither statistics nor losses."""
    other = BATCH._replace(tokens=jnp.where(BATCH.segments < 0, (BATCH.tokens + 5) % CONFIG.vocab_size, BATCH.tokens))
    one, two = (STEP(PARAMS, EXTRA, batch)[0] for batch in (BATCH, other))
    np.testing.assert_array_equal(one[1]["next"]["pending_beta"], two[1]["next"]["pending_beta"])
    assert one[1]["metrics"]["router/entropy"] == two[1]["metrics"]["router/entropy"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_gradient_is_that_of_its_own_logits(dtype):
    """F3: the gradient equals autodiff of the formula on logits of the same precision, over several chunks and a
    partial one.
    """
    rng = np.random.default_rng(0)
    rows = CHUNK_TOKENS + 37
    h, head = jnp.asarray(rng.standard_normal((rows, 16)), dtype), jnp.asarray(rng.standard_normal((16, 50)), dtype)
    targets, weights = (
        jnp.asarray(rng.integers(0, 50, rows), jnp.int32),
        jnp.asarray(rng.random(rows) < 0.9, jnp.float32),
    )

    def plain(h, head):
        logits = jnp.dot(h, head, preferred_element_type=jnp.float32)
        lse = jax.nn.logsumexp(logits, axis=-1)
        ce = lse - logits[jnp.arange(rows), targets]
        return jnp.sum(weights * (ce + 0.01 * lse**2)) / weights.sum()

    total = jax.jit(lambda h, head: weighted_loss(h, head, targets, weights, 0.01).total)
    value, slopes = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(h, head)
    expected, expected_slopes = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(h, head)
    bound = 1e-5 if dtype == "float32" else 2e-2
    assert abs(value - expected) < 1e-5 * abs(expected)
    for found, wanted in zip(slopes, expected_slopes):
        scale = np.abs(np.asarray(wanted, np.float32)).max()
        assert np.abs(np.asarray(found, np.float32) - np.asarray(wanted, np.float32)).max() < bound * scale
    if dtype == "float32":
        direction = jnp.asarray(rng.standard_normal(head.shape), jnp.float32)
        up, down = (total(h, head + sign * 1e-2 * direction) for sign in (1, -1))
        assert abs((up - down) / 2e-2 - jnp.sum(slopes[1] * direction)) < 1e-3 * abs(up - down) / 2e-2 + 1e-4


def test_shapes_are_checked_in_tests():
    """The annotations are alive: a batch whose segments are too short is refused before any arithmetic."""
    with pytest.raises(TypeError, match="segments"):
        logits_of(CONFIG)(PARAMS, EXTRA, BATCH.tokens, BATCH.segments[:, :-1])


def test_weights_of_zero_give_zero_loss():
    value, slopes = jax.value_and_grad(
        lambda h: weighted_loss(h, jnp.ones((4, 5)), jnp.zeros(3, jnp.int32), jnp.zeros(3), 1e-4).total
    )(jnp.ones((3, 4)))
    assert value == 0
    assert (slopes == 0).all()


def test_two_runs_are_bit_identical_and_the_bias_gets_no_gradient():
    first, second = STEP(PARAMS, EXTRA, BATCH), STEP(PARAMS, EXTRA, BATCH)
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
        np.testing.assert_array_equal(one, two)
    gradient = first[1].layers
    assert (gradient.router_bias == 0).all()
    heads = gradient.wk[1].reshape(CONFIG.width, CONFIG.num_kv_heads_local, CONFIG.head_width)
    assert (
        heads[:, CONFIG.num_kv_heads_global :] == 0
    ).all()  # the last layer is global: its spare kv heads are not read
    assert (heads[:, : CONFIG.num_kv_heads_global] != 0).any()
    others = [leaf for path, leaf in jax.tree.leaves_with_path(first[1]) if path[-1].name != "router_bias"]
    assert all(bool((leaf != 0).any()) for leaf in others)


def test_metrics():
    (value, aux), _ = STEP(PARAMS, EXTRA, BATCH)
    metrics = aux["metrics"]
    assert abs(value - metrics["cross_entropy"] - metrics["z_loss"]) < 1e-5
    assert 0 < metrics["router/entropy"] <= np.log(8)
    assert 1 <= metrics["router/load_max_over_mean"] <= 4
    assert metrics["router/bias_min"] < 0 < metrics["router/bias_max"]
    assert metrics["router/drop_rate"] == 0
    assert 0 < metrics["attention/gate_mean"] < 2
    assert [name for name in metrics if name not in METRICS] == []


def test_evaluation_routes_with_the_pending_bias():
    """F17: losses of evaluation equal the training loss under the same pending quantiles, and move with them."""
    (_, aux), _ = STEP(PARAMS, EXTRA, BATCH)
    following = make_program(CONFIG).after_step(EXTRA, aux)
    assert not np.array_equal(following["pending_beta"], EXTRA["pending_beta"])
    for extra in (EXTRA, following):
        losses = token_losses_of(CONFIG)(PARAMS, extra, BATCH)
        trained = STEP(PARAMS, extra, BATCH)[0][1]["metrics"]["cross_entropy"]
        assert abs(jnp.sum(losses * BATCH.weights) / BATCH.weights.sum() - trained) < 1e-5
    assert not np.array_equal(all_logits(BATCH), all_logits(BATCH, following))


def test_cached_equals_uncached():
    """Rows of different lengths, in two stretches and then token by token, across the window."""
    tokens = BATCH.tokens
    full = all_logits(BATCH._replace(segments=jnp.zeros_like(BATCH.segments)))
    extend = compiled(lambda cache, tokens, lengths: prefill(PARAMS, EXTRA, cache, tokens, lengths, CONFIG))
    _, cache = extend(init_cache(CONFIG, 2, 40), tokens[:, :18], jnp.array([2, 10]))
    found, cache = extend(cache, jnp.stack([tokens[0, 2:20], tokens[1, 10:28]]), jnp.array([18, 14]))
    decode = compiled(lambda cache, tokens: decode_step(PARAMS, EXTRA, cache, tokens, CONFIG))
    at = np.array([19, 23])
    for _ in range(12):
        assert np.abs(np.asarray(found) - full[[0, 1], at]).max() < 1e-5 * np.abs(full).max()
        at = at + 1
        found, cache = decode(cache, tokens[jnp.array([0, 1]), at])
    assert cache.lengths.tolist() == (at + 1).tolist()


def test_a_llama_runs():
    config = dense_config(marin_8b())
    found = logits_of(config)(shaken_params(config), {}, BATCH.tokens, BATCH.segments)
    assert found.shape == (2, 40, 61)
    assert np.isfinite(found).all()
    assert init_extra(config) == {}


def test_a_dense_model_trains_every_array():
    config = dense_config(delphi(512))
    (_, aux), gradient = step_of(config)(shaken_params(config), {}, BATCH)
    assert aux["next"] == {}
    assert "router/entropy" not in aux["metrics"]
    assert all(bool((leaf != 0).any()) for leaf in jax.tree.leaves(gradient))


def test_remat_changes_nothing():
    config = dense_config(delphi(512))
    params = shaken_params(config)
    recomputed, stored = (step_of(replace(config, remat=remat))(params, {}, BATCH) for remat in ("block", "none"))
    for one, two in zip(jax.tree.leaves(recomputed), jax.tree.leaves(stored)):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_every_array_has_a_place_and_splitting_changes_nothing():
    mesh = layout.make_mesh({"expert": 2}, jax.devices()[:2])
    shardings = layout.param_shardings(CONFIG, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(PARAMS)
    placed = jax.device_put(PARAMS, shardings)
    assert placed.layers.expert_gate.addressable_shards[0].data.shape == (2, 4, 40, 24)
    tokens, segments, _ = jax.device_put(BATCH, jax.sharding.NamedSharding(mesh, layout.BATCH))
    np.testing.assert_allclose(logits_of(CONFIG)(placed, EXTRA, tokens, segments), all_logits(BATCH), atol=1e-4)
    with pytest.raises(ValueError, match="needs 4 devices"):
        layout.make_mesh({"expert": 4}, jax.devices()[:1])
    with pytest.raises(ValueError, match="no mesh axis"):
        layout.make_mesh({"pipeline": 1}, jax.devices()[:1])
