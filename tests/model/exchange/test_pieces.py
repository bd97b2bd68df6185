"""What the transports are made of: products of groups, sums over a token's experts, and pieces of rows that move.

No CPU has a ragged all-to-all. Its stand-in is held against the operation's published meaning, written out in loops, and
so are the offsets that only it reads.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from noonsight.model import native
from noonsight.model.count.devices import pooled_wave
from noonsight.model.count.devices import ragged as ragged_sizes
from noonsight.model.exchange import EXCHANGES, Way, grouped, transfer
from noonsight.model.exchange.gather import combined, summed
from noonsight.model.exchange.ragged import _plan
from noonsight.model.families import hero
from tests.model.exchange.running import EXPERTS, arrays
from tests.model.nearness import close
from tests.model.setting import compiled
from tests.model.test_layout import equations

SIZES, USED = [70, 0, 131], 201  # one group is empty, none ends with a tile

# Products of groups

PLATFORMS = {
    "gpu": (partial(grouped._products, interpret=True), partial(grouped._outer_products, interpret=True)),
    "cpu": (grouped._blocked_products, grouped._blocked_outer_products),
    "others": (grouped._ragged_products, grouped._ragged_outer_products),
}


def rows_and_slopes(num_rows):
    """Rows of 32, slopes of 48, matrices between; NaN behind the last group."""
    rng = np.random.default_rng(0)
    rows, slope = (rng.standard_normal((num_rows, width)).astype(np.float32) for width in (32, 48))
    rows[USED:], slope[USED:] = np.nan, np.nan
    return rows, slope, rng.standard_normal((3, 32, 48)).astype(np.float32)


@pytest.mark.parametrize("num_rows", (256, 300))
@pytest.mark.parametrize("platform", PLATFORMS)
def test_groups_of_any_size_are_multiplied_and_no_padding_is_read(platform, num_rows):
    """F4, F5; the GPU's kernels interpreted."""
    rows, slope, bank = rows_and_slopes(num_rows)
    ends = np.cumsum(SIZES)
    groups = [slice(end - size, end) for end, size in zip(ends, SIZES)]
    products, transposed = np.zeros((num_rows, 48)), np.zeros((num_rows, 32))
    for group, matrix in zip(groups, bank):
        products[group], transposed[group] = rows[group] @ matrix, slope[group] @ matrix.T
    outer = [rows[group].T @ slope[group] for group in groups]
    told, near = jnp.asarray(SIZES, jnp.int32), {"rtol": 1e-4, "atol": 1e-4}
    rows, slope, bank = (jnp.asarray(each) for each in (rows, slope, bank))
    multiply, multiply_outer = PLATFORMS[platform]
    np.testing.assert_allclose(multiply(rows, bank, told), products, **near)
    np.testing.assert_allclose(multiply(slope, bank, told, transposed=True), transposed, **near)
    np.testing.assert_allclose(multiply_outer(rows, slope, told), outer, **near)


@pytest.mark.parametrize("kernels", ("xla", "auto"))
def test_kernels_in_c_read_no_padding_either(kernels, monkeypatch):
    """Where there are any; float32 arrays, products of bfloat16."""
    monkeypatch.setenv("NOONSIGHT_KERNELS", kernels)
    rows, _, gate = rows_and_slopes(256)
    up, down = gate[::-1], np.swapaxes(gate, 1, 2) / 8
    told, here = jnp.asarray(SIZES, jnp.int32), np.arange(256)[:, None] < USED
    slope = np.where(here, np.random.default_rng(1).standard_normal(rows.shape), np.nan).astype(np.float32)

    def both(dtype, rows, slope):
        y, pull = jax.vjp(lambda *given: grouped.grouped_swiglu(*given, told, dtype), rows, gate, up, down)
        d_rows, *d_banks = pull(slope)
        return y[:USED], d_rows[:USED], *d_banks

    found = compiled(partial(both, "bfloat16"))(rows, slope)
    wanted = compiled(partial(both, "float32"))(*(np.where(here, each, 0) for each in (rows, slope)))
    assert native.serves("bfloat16", jnp.asarray(rows)) <= (kernels == "auto")
    for name, one, other in zip(("y", "rows", "gate", "up", "down"), found, wanted):
        close(one, other, "bfloat16", name)


# Sums


def test_a_token_s_experts_are_added_in_float32():
    """In bfloat16 256 + 1 + 1 is 256."""
    rows, place = jnp.asarray([[256.0], [1.0], [1.0]], jnp.bfloat16), jnp.asarray([[0, 1, 2]])
    weights = jnp.ones((1, 3), jnp.bfloat16)
    assert float(summed(rows, place)[0, 0]) == 258
    assert float(combined(rows, weights, jnp.arange(3), place)[0, 0]) == 258


# Pieces of rows that move

SHARDS, TOKENS, ROOM = 4, 24, 30
HERE = EXPERTS // SHARDS
AXIS = "expert"


def planned(given):
    """Plans of all devices, [device, ...] in each array, with room for ROOM rows in each of two chunks."""

    def prefix(wanted):
        flat = wanted.reshape(len(wanted), -1)
        return jnp.clip(ROOM - transfer.exclusive(flat), 0, flat).reshape(wanted.shape)

    way = Way(axis=AXIS, shards=SHARDS)
    split = (each.reshape(SHARDS, TOKENS, *each.shape[1:]) for each in (given.chosen, given.valid))
    return jax.vmap(lambda chosen, valid: _plan(prefix, 2, chosen, valid, HERE, way)[0], axis_name=AXIS)(*split)


def by_the_book(rows, into, move):
    """`jax.lax.ragged_all_to_all` of all devices, as its documentation tells it."""
    source, target, size, arriving = (np.asarray(each) for each in move)
    found = np.array(into)
    for sender, receiver, piece in np.ndindex(size.shape):
        first, count = source[sender, receiver, piece], size[sender, receiver, piece]
        assert count == arriving[receiver, sender, piece]
        there = slice(target[sender, receiver, piece], target[sender, receiver, piece] + count)
        assert first + count <= len(rows[sender]) and there.stop <= len(found[receiver])
        assert np.isnan(found[receiver, there]).all(), "two pieces meet"
        found[receiver, there] = rows[sender][first : first + count]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_stand_in_moves_what_a_ragged_all_to_all_is_said_to_move(seed):
    given = arrays(SHARDS, TOKENS, seed, lean=2.0)
    plan, num_rows = planned(given), TOKENS * given.chosen.shape[1]
    rows = np.arange(SHARDS * num_rows, dtype=np.float32).reshape(SHARDS, num_rows, 1)
    stand_in = jax.vmap(partial(transfer._padded, most=TOKENS, way=Way(axis=AXIS, shards=SHARDS)), axis_name=AXIS)
    home = np.full_like(rows, np.nan)
    for number, chunk in enumerate(plan.chunks):
        empty = np.full((SHARDS, ROOM, 1), np.nan, np.float32)
        arrived = by_the_book(rows, empty, chunk.out)
        np.testing.assert_array_equal(stand_in(rows, empty, chunk.out), arrived)
        check_grouped(given, plan, arrived, np.asarray(chunk.sizes), number)
        returned = by_the_book(arrived, home, chunk.back)
        np.testing.assert_array_equal(stand_in(arrived, home, chunk.back), returned)
        home = returned
    sent = np.take_along_axis(home, np.minimum(plan.place.reshape(SHARDS, -1, 1), num_rows - 1), axis=1)
    kept = (np.asarray(plan.place).reshape(SHARDS, -1) < num_rows)[..., None]
    np.testing.assert_array_equal(np.isnan(home).sum(), (~kept).sum())
    positions = np.asarray(plan.place).reshape(SHARDS, -1, 1) + num_rows * np.arange(SHARDS)[:, None, None]
    np.testing.assert_array_equal(sent[kept], positions[kept])  # every row came home to where it had been


def check_grouped(given, plan, arrived, sizes, number):
    """Rows arrive grouped by expert, as `sizes` says, with nothing behind."""
    num_rows = TOKENS * given.chosen.shape[1]
    for device in range(SHARDS):
        of_rows = arrived[device, : sizes[device].sum(), 0].astype(int)
        assert np.isnan(arrived[device, len(of_rows) :]).all()
        sender, row = of_rows // num_rows, of_rows % num_rows
        assignment = np.asarray(plan.assignment)[sender, row]
        chosen = given.chosen.reshape(SHARDS, -1)[sender, assignment]
        first = device * HERE + number * len(sizes[device])
        np.testing.assert_array_equal(chosen, np.repeat(first + np.arange(len(sizes[device])), sizes[device]))


def local_gradient(name, way):
    """One device's exchange and its gradients."""

    def local(x, chosen, weights, valid, *banks):
        y, pull = jax.vjp(lambda *floats: EXCHANGES[name](floats[0], chosen, floats[1], valid, *floats[2:], way)[0], x, weights, *banks)  # fmt: skip
        return pull(y)

    return local


def test_the_platform_of_the_program_decides_and_not_that_of_the_process():
    """Lowered for a GPU where there is none."""
    mesh, split = Mesh(np.array(jax.devices()[:2]), (AXIS,)), PartitionSpec(AXIS)
    local = local_gradient("ragged", Way(axis=AXIS, shards=2, capacity_factor=1.15))
    over = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (64, 2), (4, 32, 32), (4, 32, 32), (4, 32, 32))]  # fmt: skip
    ints = jax.ShapeDtypeStruct((64, 2), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.bool_)
    traced = over.trace(floats[0], ints[0], floats[1], ints[1], *floats[2:])
    names = ("ragged_all_to_all", "triton")
    for platform, there in (("cuda", True), ("cpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert [name in text for name in names] == [there, there], platform


def test_the_hero_s_buffers_have_the_published_sizes():
    """P, R and M of pooled waves and the rows of a ragged chunk, as they come out of the closed forms (Marin, #8549)."""
    config, tokens, shards = hero(), 65_536, 64
    width, per_token, experts = config.expert_input_width, config.num_experts_per_token, config.num_experts // 64
    struct = jax.ShapeDtypeStruct
    banks = [struct((experts * shards, width, width), jnp.bfloat16)] * 3
    rows = (struct((shards * tokens, width), jnp.bfloat16), struct((shards * tokens, per_token), jnp.int32))
    rows += (struct((shards * tokens, per_token), jnp.bfloat16), struct((shards * tokens,), jnp.bool_))
    mesh, split = AbstractMesh((shards,), (AXIS,)), PartitionSpec(AXIS)

    def moved_by(name, primitive):
        way = Way(axis=AXIS, shards=shards, capacity_factor=config.capacity_factor, dtype="bfloat16")
        local = jax.shard_map(local_gradient(name, way), mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        every = equations(jax.make_jaxpr(local)(*rows, *banks).jaxpr)
        return {each.outvars[0].aval.shape for each in every if each.primitive.name == primitive}

    wave = pooled_wave(config, tokens, expert_shards=shards)
    chunk = ragged_sizes(config, tokens).rows_per_chunk
    assert (wave.rows_per_pair, wave.rows_per_expert, wave.header_rows, chunk) == (3_141, 33_497, 2, 301_466)
    assert moved_by("pooled", "all_to_all") == {(shards, 3_143, width), (shards, 3_141, width)}
    assert (experts, 33_497, width) in moved_by("pooled", "reshape")
    assert moved_by("ragged", "ragged_all_to_all") == {(301_466, width), (tokens * per_token, width)}


# F24


def test_f24_receive_buffers_are_tied_to_the_rows_they_receive():
    """A constant of the scan would be hoisted out of it, one for every layer."""
    rows = jnp.ones((4, 3))
    traced = jax.make_jaxpr(lambda rows: transfer.blank(8, rows))(rows)
    barrier = [equation for equation in traced.jaxpr.eqns if equation.primitive.name == "optimization_barrier"]
    assert barrier and traced.jaxpr.invars[0] in barrier[0].invars
