"""Families as data, and the two changes of a config in the middle of a run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model.count import count
from noonsight.model.families import (
    FAMILIES,
    HERO_LADDER,
    delphi,
    delphi_layers,
    hero,
    hero_reach,
    lengthened,
    marin_8b,
    marin_32b,
    miniature,
    moe_v1,
    nucleotide,
    snowball,
    switch_qk_norm_on,
)
from noonsight.model.params import init_params
from noonsight.tokens.tokenizer import SPECIALS
from noonsight.train.optim import by_path, make_optimizer
from tests.model.setting import dense_config, logits_of, packed_batch, shaken_params
from tests.train.toy import optimizer_config

LLAMA = replace(
    marin_32b(qk_norm=False),
    vocab_size=61,
    sequence_length=40,
    window=40,
    compute_dtype="float32",
    matmul_dtype="float32",
)
ONE_HEAD = replace(
    LLAMA,
    width=16,
    num_layers=2,
    num_heads=1,
    num_kv_heads_local=1,
    num_kv_heads_global=1,
    head_width=16,
    dense_width=24,
)


INIT = jax.jit(init_params, static_argnums=1)


def _logits(params, config):
    batch = packed_batch(config)
    return np.asarray(logits_of(config)(params, {}, batch.tokens, batch.segments))


def _rotations(params):
    """Query and key matrices that keep the norm of their input, whose rms is 1: so queries and keys have unit rms."""
    width = params.layers.wq.shape[-1]
    rng = np.random.default_rng(1)
    wq, wk = (jnp.asarray(np.linalg.qr(rng.standard_normal((2, width, width)))[0], jnp.float32) for _ in "qk")
    return replace(params, layers=replace(params.layers, wq=wq, wk=wk))


def test_qk_norm_leaves_queries_and_keys_of_unit_rms_as_they_were():
    before = _rotations(INIT(jax.random.key(0), ONE_HEAD))
    before = replace(before, embed=100 * before.embed)  # far above the epsilon of the norm, which rms 1 must outweigh
    after, config = switch_qk_norm_on(before, ONE_HEAD)
    old = _logits(before, ONE_HEAD)
    np.testing.assert_allclose(_logits(after, config), old, atol=1e-4)
    louder = replace(before, layers=replace(before.layers, wq=3 * before.layers.wq))
    assert np.abs(_logits(louder, ONE_HEAD) - old).max() > 1e-3  # a change of scale is seen without the norm
    np.testing.assert_allclose(_logits(switch_qk_norm_on(louder, ONE_HEAD)[0], config), old, atol=1e-4)


def test_qk_norm_adds_gains_of_one_and_touches_nothing_else():
    before = INIT(jax.random.key(0), ONE_HEAD)
    after, changed = switch_qk_norm_on(before, ONE_HEAD)
    old, new = by_path(before), by_path(after)
    assert new.keys() - old.keys() == {"layers.q_norm", "layers.k_norm"}
    assert all(np.asarray(leaf).tobytes() == np.asarray(new[path]).tobytes() for path, leaf in old.items())
    assert (new["layers.q_norm"] == 1).all() and new["layers.k_norm"].shape == (2, 16)
    fresh = jax.eval_shape(lambda key: init_params(key, changed), jax.random.key(0))
    assert jax.tree.structure(fresh) == jax.tree.structure(after)
    with pytest.raises(ValueError, match="nothing to switch on"):
        switch_qk_norm_on(after, changed)


@pytest.mark.parametrize("kind", ["muonh", "adamw"])
def test_the_optimiser_is_made_for_the_new_tree(kind):
    after, _ = switch_qk_norm_on(INIT(jax.random.key(0), ONE_HEAD), ONE_HEAD)
    optimizer = make_optimizer(optimizer_config(kind=kind), after, num_steps=10)
    assert optimizer.groups["layers.q_norm"] == "adam"

    @jax.jit
    def update(params):
        return optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params, step=5)[0]

    updates = update(after)
    assert (np.asarray(updates.layers.k_norm) < 0).all()


def test_marin_32b_before_and_after():
    before = marin_32b(qk_norm=False)
    shapes = jax.eval_shape(lambda key: init_params(key, before), jax.random.key(0))
    assert replace(before, qk_norm="gain") == marin_32b()
    assert shapes.layers.q_norm is None


def test_context_grows_with_its_multiplier():
    probe = lengthened(hero(), 262_144)
    assert (probe.sequence_length, f"{probe.qk_mult:.4f}") == (262_144, "1.8407")
    assert lengthened(hero(), 4096) == hero()
    assert f"{lengthened(snowball(), 65_536).qk_mult:.2f}" == "1.57"  # as in Snowball's extension
    with pytest.raises(ValueError, match="shorter"):
        lengthened(hero(), 2048)


def test_a_llama_sees_its_whole_sequence_whatever_its_length():
    for config in (marin_8b(), marin_32b(), delphi(512)):
        for length in (4096, 32_768):
            longer = lengthened(config, length)
            assert [longer.span(layer) for layer in range(config.num_layers)] == [length] * config.num_layers
    assert replace(marin_8b(), sequence_length=8192).span(0) == 8192


def test_scores_without_qk_norm_keep_their_multiplier():
    assert lengthened(marin_8b(), 32_768).qk_mult == 1.0
    assert lengthened(marin_32b(), 32_768).qk_mult == pytest.approx(1.2079, abs=1e-4)


def test_a_layer_that_sees_all_is_a_local_one_with_a_window_of_the_sequence():
    """To the bit, so that a Llama may be written as either."""
    config = dense_config(marin_8b())
    local = replace(config, global_every=None, rope_on_global=False, window=config.sequence_length)
    assert config.is_global(0) and not local.is_global(0)
    assert count(config) == count(local)
    params = shaken_params(config)
    np.testing.assert_array_equal(_logits(params, config), _logits(params, local))


def test_windows_of_the_siblings():
    for config, wide in ((snowball(), 4096), (moe_v1(), 4096)):
        spans = [config.span(layer) for layer in range(config.num_layers)]
        assert spans[:4] == [2048, 2048, 2048, wide] and spans[-1] == wide


def test_depths_of_the_older_rule():
    assert delphi_layers(2560) == snowball().num_layers == 26
    assert delphi_layers(5120) == 49 and moe_v1().num_layers == 48  # the one that left the rule
    assert delphi(1536).num_layers == 16


def test_the_head_reaches_as_far_as_the_heros_and_nothing_else_moves():
    assert hero_reach(hero()) == hero()
    config = miniature(96, 1, 64)
    near, far = (INIT(jax.random.key(0), each) for each in (config, hero_reach(config)))
    np.testing.assert_allclose(far.head, 8 * near.head, rtol=1e-6)  # 8 = sqrt(6144 / 96)
    assert np.linalg.norm(far.head, axis=0).mean() * 96**0.5 == pytest.approx(0.5 * 6144**0.5, rel=0.03)
    rest = (jax.tree.leaves(replace(each, head=None)) for each in (near, far))
    assert all(np.array_equal(one, other) for one, other in zip(*rest, strict=True))


def test_nucleotides_are_the_hero_with_thirteen_tokens():
    config = nucleotide()
    assert config.vocab_size == len(SPECIALS) + len("ACGTN")
    assert config.is_moe and config.sconv_kernel == hero().sconv_kernel and config.exclusive_attention
    assert FAMILIES["nucleotide"].config() == config


def test_every_family_is_complete():
    for name, family in FAMILIES.items():
        assert family.name == name and (family.num_steps or family.tokens)
    assert {"hero", "snowball", "moe-v1", "delphi-1e23", "marin-8b", "marin-32b", "miniature", "nucleotide"} <= set(
        FAMILIES
    )


def test_families_of_the_ladder_are_those_with_a_run():
    with_run = {f"ladder-{width}" for width, (_, batch_size, _) in HERO_LADDER.items() if batch_size and width < 6144}
    assert with_run == {name for name in FAMILIES if name.startswith("ladder-")}
    assert "ladder-1280" not in with_run and FAMILIES["hero"].config() == hero()
