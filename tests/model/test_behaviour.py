"""What must hold of the whole model besides parity: padding, metrics, what gets no gradient, caches, splitting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.logbook.vocabulary import METRICS
from noonsight.model import layout
from noonsight.model.decode import decode_step, init_cache, prefill
from noonsight.model.loss import weighted_loss
from noonsight.model.params import init_params
from tests.model.setting import (
    compiled,
    logits_of,
    packed_batch,
    shaken_extra,
    shaken_params,
    step_of,
    tiny_config,
)

CONFIG = tiny_config()
PARAMS, EXTRA, BATCH = shaken_params(CONFIG), shaken_extra(CONFIG), packed_batch(CONFIG)
STEP = step_of(CONFIG)


def all_logits(batch, extra=EXTRA):
    return np.asarray(logits_of(CONFIG)(PARAMS, extra, batch.tokens, batch.segments))


def test_initial_parameters():
    """0.5 / sqrt(width) times a normal truncated to (-3, 3) whatever the fan-in; gains 1, gates 0, convolutions the
    identity.
    """
    params = compiled(lambda key: init_params(key, CONFIG))(jax.random.key(0))
    scale, firsts = 0.5 / CONFIG.width**0.5, []
    for path, leaf in jax.tree.leaves_with_path(params):
        name, leaf = path[-1].name, np.asarray(leaf)
        if name in ("head_gate", "router_bias"):
            assert (leaf == 0).all()
        elif name.endswith("norm"):
            assert (leaf == 1).all()
        elif name.startswith("sconv"):
            assert (leaf[:, 0] == 1).all() and (leaf[:, 1:] == 0).all()
        else:
            firsts.append(leaf.flat[0])
            assert np.abs(leaf).max() < 3 * scale
            assert abs(leaf.std() / scale - 0.9866) < 4 / leaf.size**0.5  # the deviation of a normal cut at 3
            assert abs(leaf.mean()) < 4 * scale / leaf.size**0.5
    assert len(set(firsts)) == len(firsts) > 20  # no two arrays share their numbers


def test_no_expert_sees_padding():
    """What stands in padding changes neither statistics nor losses."""
    other = BATCH._replace(tokens=jnp.where(BATCH.segments < 0, (BATCH.tokens + 5) % CONFIG.vocab_size, BATCH.tokens))
    one, two = (STEP(PARAMS, EXTRA, batch)[0] for batch in (BATCH, other))
    np.testing.assert_array_equal(one[1]["next"]["pending_beta"], two[1]["next"]["pending_beta"])
    assert one[1]["metrics"]["router/entropy"] == two[1]["metrics"]["router/entropy"]


def test_shapes_are_checked_in_tests():
    """The annotations are alive: a batch whose segments are too short is refused before any arithmetic."""
    with pytest.raises(TypeError, match="segments"):
        logits_of(CONFIG)(PARAMS, EXTRA, BATCH.tokens, BATCH.segments[:, :-1])


def test_weights_of_zero_give_zero_loss():
    def total(h):
        return weighted_loss(h, jnp.ones((4, 5)), jnp.zeros(3, jnp.int32), jnp.zeros(3), 1e-4).total

    value, slopes = compiled(jax.value_and_grad(total))(jnp.ones((3, 4)))
    assert value == 0
    assert (slopes == 0).all()


def test_every_array_is_trained_but_the_router_bias_and_spare_kv_heads():
    gradients = STEP(PARAMS, EXTRA, BATCH)[1]
    gradient = gradients.layers
    assert (gradient.router_bias == 0).all()
    heads = gradient.wk[1].reshape(CONFIG.width, CONFIG.num_kv_heads_local, CONFIG.head_width)
    assert (
        heads[:, CONFIG.num_kv_heads_global :] == 0
    ).all()  # the last layer is global: its spare kv heads are not read
    assert (heads[:, : CONFIG.num_kv_heads_global] != 0).any()
    others = [leaf for path, leaf in jax.tree.leaves_with_path(gradients) if path[-1].name != "router_bias"]
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
