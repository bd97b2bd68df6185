"""The failure register, where it concerns the optimiser: a check passes as we are, and fails with the guard taken out.

Every test hands one and the same check first our code, then a broken variant of it, so that no check can be blind.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from noonsight.logbook.claim import claim
from noonsight.model.families import FAMILIES
from noonsight.model.layout import SPECS, make_mesh
from noonsight.model.params import leaf_name, shapes
from noonsight.train import checkpoint, optim, step
from noonsight.train.config import LEAST_EPSILON
from noonsight.train.groups import HERO_TABLE, Rule, by_path, rules_of
from noonsight.train.muon import hyperball
from tests.train.toy import make_batch, make_program, optimizer_config, table

POOLED = (-3, -2, -1)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def fails(check, *arguments) -> bool:
    with pytest.raises(AssertionError):
        check(*arguments)
    return True


def turned(weight, direction, lr, axes):
    """The hyperball in float64 NumPy, from the specification: the update and the norms before it."""
    w, u = np.asarray(weight, np.float64), np.asarray(direction, np.float64)

    def size(x):
        return np.sqrt(np.sum(x * x, axis=axes, keepdims=True))

    moved = w - lr * u * size(w) / np.maximum(size(u), 1e-10)
    return moved * size(w) / np.maximum(size(moved), 1e-10) - w


# F1: the norm of a sharded array


def test_f1_a_sharded_matrix_turns_as_a_whole_one():
    mesh = make_mesh({"data": 2, "expert": 4}, jax.devices()[:8])
    spec = SPECS["expert_up"]
    weight, direction = normal(1, 2, 8, 4, 6), normal(2, 2, 8, 4, 6) * jnp.arange(1.0, 9.0)[None, :, None, None]

    def ours(weight, direction):
        return hyperball(weight, direction, 0.1, axes=POOLED)

    def check(turn):
        placed = jax.device_put((weight, direction), NamedSharding(mesh, spec))
        np.testing.assert_allclose(jax.jit(turn)(*placed), turned(weight, direction, 0.1, POOLED), rtol=1e-4, atol=1e-6)

    check(ours)
    assert fails(check, jax.shard_map(ours, mesh=mesh, in_specs=spec, out_specs=spec))  # each device its own norm

    def counted_again(weight, direction):  # what lies on several devices is added once per device: Marin, issue #8073
        whole = PartitionSpec()
        moved = weight + ours(weight, direction)
        copies = jax.shard_map(lambda: jax.lax.psum(1.0, ("data", "expert")), mesh=mesh, in_specs=(), out_specs=whole)
        return moved / jnp.sqrt(copies()) - weight

    assert fails(check, counted_again)


# F2: the hyperball pooled over experts, or one per expert


def test_f2_pooled_and_per_matrix_are_what_they_say():
    weight, grad = normal(1, 2, 4, 3, 5), normal(2, 2, 4, 3, 5)
    rules = {"experts": Rule(group="adamh", experts=True)}

    def check(told, meant):
        config = optimizer_config(warmup_fraction=0.0, expert_hyperball=told, epsilon=1e-2)
        optimizer = optim.make_optimizer(config, {"experts": weight}, num_steps=10, table=rules)
        grads, params = {"experts": grad}, {"experts": weight}
        got = optimizer.update(grads, optimizer.init(params), params, step=jnp.int32(0))[0]["experts"]
        direction = grad / (jnp.abs(grad) + 1e-2)
        axes = POOLED if meant == "pooled" else (-2, -1)
        np.testing.assert_allclose(got, turned(weight, direction, config.matrix_lr, axes), rtol=1e-4, atol=1e-6)

    for kind, other in (("pooled", "per_matrix"), ("per_matrix", "pooled")):
        check(kind, kind)
        assert fails(check, other, kind)


# F10: the kind of memory is kept


def test_f10_optimiser_state_on_the_host_stays_there(monkeypatch):
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def run(on_host):
        program = make_program()
        shape = jax.eval_shape(program.init, jax.random.key(0))[0]
        optimizer = optim.make_optimizer(optimizer_config(), shape, num_steps=10, table=table())
        state = step.init_state(program, optimizer, jax.random.key(0))
        if on_host:
            state = state._replace(opt=jax.device_put(state.opt, host))
        one_step = step.compile_step(step.make_train_step(program, optimizer), state, make_batch(0))
        for number in range(2):
            state, _ = one_step(state, make_batch(number))
        return state

    def check():
        state = run(on_host=True)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt)} == {"pinned_host"}
        assert step.params_hash(state) == step.params_hash(run(on_host=False))

    check()
    monkeypatch.setattr(optim, "_put_back", lambda after, before: after)
    with pytest.raises(TypeError, match="kind of memory"):
        check()


def test_f10_restored_state_lies_where_the_target_says(tmp_path):
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = {"opt": jax.device_put(normal(1, 3, 4), host)}
    with claim(tmp_path, "worker") as mine:
        arrays = checkpoint.to_host(state)
        path = checkpoint.write(
            checkpoint.root_of(tmp_path), arrays, step=1, kind="final", tokens=0, claim=mine, attempt=1
        )

    def check(target):
        assert checkpoint.restore(path, target)["opt"].sharding.memory_kind == "pinned_host"

    check(state)
    assert fails(check, jax.eval_shape(lambda: {"opt": normal(1, 3, 4)}))  # a target that does not say where


# F14: groups by exact path


ADAM = "embed embed_norm final_norm attn_norm moe_norm latent_norm q_norm k_norm head_gate router router_bias".split()
ADAM += "sconv_k sconv_attn sconv_moe".split()


def test_f14_every_leaf_of_every_family_is_in_the_group_of_the_specification():
    seen = set()

    def check(rules_of):
        for family in FAMILIES.values():
            is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
            flat = jax.tree.flatten_with_path(shapes(family.config()), is_leaf=is_shape)[0]
            leaves = {leaf_name(path): jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in flat}
            for path, rule in rules_of(leaves).items():
                seen.add(path)
                name = path.removeprefix("layers.")
                assert rule.group == ("adam" if name in ADAM else "adamh" if name == "head" else "muonh"), path
                assert rule.experts == name.startswith("expert_") and rule.decays == (name in ("head_gate", "router"))

    def by_substring(leaves):
        rough = {"embed": HERO_TABLE["embed"], "norm": HERO_TABLE["final_norm"], "gate": HERO_TABLE["layers.head_gate"]}
        found = {path: [rule for word, rule in rough.items() if word in path] for path in leaves}
        return {path: rules[0] if rules else HERO_TABLE[path] for path, rules in found.items()}

    check(rules_of)
    assert seen == set(HERO_TABLE), "a line of the table that no family uses"
    assert fails(check, by_substring)


# F22: small batches, small numbers, no number


def test_f22_a_gradient_too_small_to_square_moves_nothing_far():
    def check(epsilon):
        adam = optax.scale_by_adam(0.9, 0.95, epsilon)
        grads = {"x": jnp.array([0.0, 1e-20, 1e-18, 1e-3])}
        direction = np.asarray(adam.update(grads, adam.init(grads))[0]["x"])
        assert np.isfinite(direction).all() and np.abs(direction).max() <= 1.0 + 1e-5 and direction[0] == 0

    check(LEAST_EPSILON)
    for epsilon in (0.0, 1e-30):
        assert fails(check, epsilon)
        with pytest.raises(ValueError, match="has a square of 0"):
            optimizer_config(epsilon=epsilon)


def test_f22_what_is_not_finite_is_not_hidden():
    weight, direction = normal(1, 2, 4, 4), normal(2, 2, 4, 4).at[1, 0, 0].set(jnp.nan)

    def hiding(weight, direction, lr, axes):  # "skip it where the direction is zero", and NaN > 0 is false
        length = jnp.sqrt(jnp.sum(direction**2, axis=axes, keepdims=True))
        return jnp.where(length > 0, hyperball(weight, direction, lr, axes=axes), 0.0)

    def check(turn):
        update = np.asarray(turn(weight, direction, 0.1, axes=(-2, -1)))
        assert np.isfinite(update[0]).all() and np.isnan(update[1]).all()

    check(hyperball)
    assert fails(check, hiding)


# F23: gates that saturate shut


@pytest.mark.parametrize("start", [0, 6])
def test_f23_decay_shrinks_head_gate_and_router_alone_from_its_step_on(start):
    shapes = {
        "embed": (5, 4),
        "head": (4, 5),
        "layers": {"attn_norm": (2, 4), "head_gate": (2, 4, 2), "router": (2, 4, 3)},
    }
    shapes["layers"] |= {"attn_gate": {"down": (2, 4, 2)}, "sconv_k": (2, 4, 4), "expert_up": (2, 3, 4, 2)}
    params = jax.tree.map(
        lambda shape: normal(sum(shape), *shape), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    nothing = jax.tree.map(jnp.zeros_like, params)
    config = optimizer_config(
        adam_lr=0.5, weight_decay=0.02, weight_decay_from=start, warmup_fraction=0.0, min_lr_fraction=1.0
    )

    def check(rules):
        optimizer = optim.make_optimizer(config, params, num_steps=10, table=rules)

        def one(carry, number):
            now, state = carry
            updates, state = optimizer.update(nothing, state, now, step=number)
            return (optax.apply_updates(now, updates), state), None

        run = jax.jit(lambda: jax.lax.scan(one, (params, optimizer.init(params)), jnp.arange(10))[0][0])
        expected = np.prod([1 - 0.5 * 0.02 * (1 - count / 10) for count in range(start, 10)])
        for path, leaf in by_path(run()).items():
            factor = expected if path in ("layers.head_gate", "layers.router") else 1.0
            np.testing.assert_allclose(leaf, factor * np.asarray(by_path(params)[path]), rtol=1e-5, err_msg=path)

    check(HERO_TABLE)
    if start == 0:
        assert fails(check, {**HERO_TABLE, "layers.head_gate": Rule(group="adam")})
        assert fails(check, {**HERO_TABLE, "embed": replace(HERO_TABLE["embed"], decays=True)})


# What must hold besides the register


@pytest.mark.parametrize(("number_format", "expert_hyperball"), [("float32", "pooled"), ("bfloat16", "per_matrix")])
def test_matrices_keep_their_norm_over_a_thousand_steps(number_format, expert_hyperball):
    shapes = {"head": (6, 10), "layers": {"wq": (2, 8, 8), "expert_up": (2, 3, 4, 6)}}
    params = jax.tree.map(
        lambda shape: normal(sum(shape), *shape), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    config = optimizer_config(matrix_lr=0.02, newton_schulz=number_format, expert_hyperball=expert_hyperball)
    optimizer = optim.make_optimizer(config, params, num_steps=1000)

    def one(carry, number):
        now, state = carry
        key = jax.random.fold_in(jax.random.key(0), number)
        grads = jax.tree.map(lambda leaf: jax.random.normal(jax.random.fold_in(key, leaf.size), leaf.shape), now)
        updates, state = optimizer.update(grads, state, now, step=number)
        return (optax.apply_updates(now, updates), state), None

    run = jax.jit(lambda: jax.lax.scan(one, (params, optimizer.init(params)), jnp.arange(1000))[0][0])
    after = run()
    for path, leaf in by_path(after).items():
        axes = (-3, -2, -1) if path == "layers.expert_up" and expert_hyperball == "pooled" else (-2, -1)
        before, now = (
            np.sqrt(np.sum(np.square(np.asarray(x, np.float64)), axis=axes)) for x in (by_path(params)[path], leaf)
        )
        np.testing.assert_allclose(now, before, rtol=1e-5, err_msg=path)
        assert np.abs(np.asarray(leaf - by_path(params)[path])).max() > 0.1
    assert step.params_hash(after) == step.params_hash(run()), "two runs differ"
