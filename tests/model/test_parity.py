"""The model against the float64 NumPy reference: pieces, whole forward, loss, and gradients by central differences."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model import attention, elementary
from noonsight.model.exchange import EXCHANGES
from noonsight.model.moe import effective_bias, moe
from tests.model import reference
from tests.model.setting import (
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


def wide(tree):
    """The tree in float64 NumPy, as namespaces."""
    if tree is None:
        return None
    if hasattr(tree, "shape"):
        return np.asarray(tree, np.float64)
    return SimpleNamespace(**{name: wide(value) for name, value in vars(tree).items()})


def layer_arrays(params, index):
    return wide(jax.tree.map(lambda leaf: leaf[index], params.layers))


def reference_logits(params, extra, batch, config):
    layers = [layer_arrays(params, index) for index in range(config.num_layers)]
    return reference.forward(
        wide(params),
        layers,
        np.asarray(extra["pending_beta"], np.float64),
        np.asarray(batch.tokens),
        np.asarray(batch.segments),
        config,
    )


@pytest.fixture(scope="module")
def expected():
    return reference_logits(PARAMS, EXTRA, BATCH, CONFIG)


def close(found, expected, bound=1e-5):
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= bound * max(1.0, np.abs(expected).max())


def test_logits_and_pending_quantiles(expected):
    close(logits_of(CONFIG)(PARAMS, EXTRA, BATCH.tokens, BATCH.segments), expected[0])
    (_, aux), _ = step_of(CONFIG)(PARAMS, EXTRA, BATCH)
    valid = np.asarray(BATCH.segments).reshape(-1) >= 0
    rank = valid.sum() * CONFIG.num_experts_per_token / CONFIG.num_experts
    for layer, margins in enumerate(expected[1]):
        live = margins[valid]
        beta = np.asarray(aux["next"]["pending_beta"][layer])
        one_bin = (live.max() - live.min()) / CONFIG.balance_bins
        exact = np.sort(live, axis=0)[::-1][int(np.ceil(rank)) - 1]
        assert np.abs(beta - exact).max() <= one_bin + 1e-5


def test_loss_and_token_losses(expected):
    (value, aux), _ = step_of(CONFIG)(PARAMS, EXTRA, BATCH)
    tokens, weights = np.asarray(BATCH.tokens), np.asarray(BATCH.weights, np.float64)
    close(value, reference.loss(expected[0], tokens, weights, CONFIG.z_loss_weight))
    close(aux["metrics"]["cross_entropy"], reference.loss(expected[0], tokens, weights, 0.0))
    losses = np.asarray(token_losses_of(CONFIG)(PARAMS, EXTRA, BATCH), np.float64)
    assert (losses[:, -1] == 0).all()
    close((losses * weights).sum() / weights.sum(), reference.loss(expected[0], tokens, weights, 0.0))


@pytest.mark.parametrize("exchange", ["sorted", "einsum"])
def test_moe(exchange):
    config = replace(CONFIG, exchange=exchange)
    layer = jax.tree.map(lambda leaf: leaf[0], PARAMS.layers)
    bias = effective_bias(EXTRA["pending_beta"][0])
    m = jnp.asarray(np.random.default_rng(3).standard_normal((2, 40, config.width)), jnp.float32)
    found, statistics = jax.jit(lambda m, layer: moe(m, jnp.ones((2, 40), bool), layer, config))(
        m, replace(layer, router_bias=bias)
    )
    expected, _ = reference.moe(
        np.asarray(m, np.float64).reshape(-1, config.width),
        layer_arrays(PARAMS, 0),
        np.asarray(bias, np.float64),
        np.ones(80, bool),
        config,
    )
    close(found.reshape(expected.shape), expected)
    assert statistics.drop_rate == 0


@pytest.mark.parametrize("length", [5, 130])
def test_attend_at_any_length(length):
    """Blocks of keys are skipped, partly visible or whole; the gradient is that of plain softmax."""
    rng = np.random.default_rng(length)
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, n, 8)), jnp.float32) for n in (6, 2, 2))
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1), jnp.int32)
    lower = attention.lower_bounds(segments, 70)

    def plain(q, k, v):
        at = jnp.arange(length)
        visible = (at <= at[:, None]) & (segments[:, None] == segments[..., None]) & (at[:, None] - at < 70)
        scores = jnp.einsum("bqkgh,bskh->bkgqs", q.reshape(2, length, 2, 3, 8), k)
        p = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bkgqs,bskh->bqkgh", p, v).reshape(q.shape)

    def slope(function):
        return jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sum(jnp.sin(function(q, k, v))), argnums=(0, 1, 2)))(
            q, k, v
        )

    found, expected = slope(lambda q, k, v: attention.attend(q, k, v, lower)), slope(plain)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        close(one, np.asarray(other, np.float64))


def test_exchanges_agree_with_invalid_rows_and_an_idle_expert():
    rng = np.random.default_rng(0)
    x, gate, up, down = (
        jnp.asarray(0.5 * rng.standard_normal(s), jnp.float32) for s in ((300, 12), (5, 12, 7), (5, 12, 7), (5, 7, 12))
    )
    chosen = jnp.asarray(np.stack([rng.permutation(4)[:2] for _ in range(300)]), jnp.int32)  # expert 4 is never chosen
    weights, valid = jnp.asarray(rng.random((300, 2)), jnp.float32), jnp.asarray(rng.random(300) < 0.8)

    def run(name):
        def total(x, weights, gate, up, down):
            y, drops = EXCHANGES[name](x, chosen, weights, valid, gate, up, down)
            return jnp.sum(jnp.sin(y)), (y, drops)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4), has_aux=True))(x, weights, gate, up, down)

    (one, (y, drops)), one_slopes = run("sorted")
    (other, (y_other, _)), other_slopes = run("einsum")
    assert drops == 0
    assert (np.asarray(y)[~np.asarray(valid)] == 0).all()
    close(one, np.asarray(other, np.float64))
    for found, expected in zip((y, *one_slopes), (y_other, *other_slopes)):
        close(found, np.asarray(expected, np.float64))


def test_gradient_is_the_slope_of_the_reference():
    """<gradient, direction> equals the central difference of the float64 reference loss along three random
    directions.
    """
    _, gradient = step_of(CONFIG)(PARAMS, EXTRA, BATCH)
    tokens, weights = np.asarray(BATCH.tokens), np.asarray(BATCH.weights, np.float64)
    leaves, treedef = jax.tree.flatten(PARAMS)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        direction = [rng.standard_normal(leaf.shape) for leaf in leaves]
        step = 1e-6

        def value(sign, direction=direction, step=step):
            moved = [np.asarray(leaf, np.float64) + sign * step * d for leaf, d in zip(leaves, direction)]
            found, _ = reference_logits(jax.tree.unflatten(treedef, moved), EXTRA, BATCH, CONFIG)
            return reference.loss(found, tokens, weights, CONFIG.z_loss_weight)

        expected = (value(1) - value(-1)) / (2 * step)
        found = sum(float(np.sum(np.asarray(g, np.float64) * d)) for g, d in zip(jax.tree.leaves(gradient), direction))
        size = np.sqrt(sum(float(np.sum(np.square(np.asarray(g, np.float64)))) for g in jax.tree.leaves(gradient)))
        assert abs(found - expected) <= 2e-5 * size


def test_bfloat16_is_near():
    config = replace(CONFIG, compute_dtype="bfloat16", matmul_dtype="bfloat16")
    wanted = np.asarray(logits_of(CONFIG)(PARAMS, EXTRA, BATCH.tokens, BATCH.segments))
    found = np.asarray(logits_of(config)(PARAMS, EXTRA, BATCH.tokens, BATCH.segments))
    # A near tie sends a token to another expert in bfloat16; all but those rows agree.
    error = np.abs(found - wanted).max(axis=-1) / np.abs(wanted).max()
    assert np.median(error) < 2e-2


def test_rotation_is_interleaved():
    """Golden: position 1 turns the pair (1, 0) by one radian, the pair (0, 1) of the slowest frequency by
    theta^(-1/2).
    """
    angles = elementary.rotation(jnp.array([1]), 4, 10_000.0)
    turned = np.asarray(elementary.rotate(jnp.array([[[1.0, 0.0, 0.0, 1.0, 5.0, 6.0]]]), angles))[0, 0]
    np.testing.assert_allclose(turned, [0.540302, 0.841471, -0.0099998, 0.99995, 5.0, 6.0], rtol=1e-5)
