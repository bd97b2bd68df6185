"""Exchanges that gather all experts and drop nothing: `sorted_blocks` to compute with, `einsum` to check against.

`sorted_blocks` orders the assignments by expert and gives each expert whole blocks of rows, so that every block is
one plain matrix product; the work is that of the chosen experts plus at most one partly filled block per expert.
`einsum` runs every expert on every row and weighs the unchosen with 0: E / A times the work, no index arithmetic,
hence the oracle. Where the experts are split over devices, each device first gathers the banks of all.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from noonsight.model import native
from noonsight.model.exchange.gather import combined, dispatched
from noonsight.model.exchange.grouped import block_products
from noonsight.model.exchange.way import Drops, Way

BLOCK = 128  # rows of one block; measured best for 1,024 to 4,096 assignments on two cores

_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def sorted_blocks(
    x: Float[Array, "T Z"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    gate: Float[Array, "e Z F"],
    up: Float[Array, "e Z F"],
    down: Float[Array, "e F Z"],
    way: Way = Way(),
) -> tuple[Float[Array, "T Z"], Drops]:
    """The contract of the package, dropless, with work in proportion to the assignments."""
    gate, up, down = (_all_experts(bank, way) for bank in (gate, up, down))
    if native.serves(way.dtype, x):
        return native.experts(x, chosen, weights, valid, gate, up, down), _no_drops()
    per_token = chosen.shape[1]
    plan = _plan(chosen, valid, gate.shape[0])
    rows = dispatched(x, plan.source // per_token, plan.slot).reshape(len(plan.expert), BLOCK, -1)
    gated = jax.nn.silu(block_products(rows, gate[plan.expert], way.dtype).astype(x.dtype))
    hidden = gated * block_products(rows, up[plan.expert], way.dtype).astype(x.dtype)
    out = block_products(hidden, down[plan.expert], way.dtype).reshape(-1, x.shape[1])
    return combined(out, weights, plan.source, plan.slot).astype(x.dtype), _no_drops()


def einsum(
    x: Float[Array, "T Z"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    gate: Float[Array, "e Z F"],
    up: Float[Array, "e Z F"],
    down: Float[Array, "e F Z"],
    way: Way = Way(),
) -> tuple[Float[Array, "T Z"], Drops]:
    """The contract of the package by running all experts on all rows: O(T E) work, for tests and tiny models."""
    gate, up, down = (_all_experts(bank, way) for bank in (gate, up, down))
    x, gate, up, down = (leaf.astype(way.dtype).astype(x.dtype) for leaf in (x, gate, up, down))
    sent = weights.astype(jnp.float32) * valid[:, None]
    share = jnp.sum(jax.nn.one_hot(chosen, gate.shape[0]) * sent[..., None], axis=1)
    hidden = jax.nn.silu(_dot("tz,ezf->tef", x, gate).astype(x.dtype)) * _dot("tz,ezf->tef", x, up).astype(x.dtype)
    return _dot("tef,efz,te->tz", hidden, down, share).astype(x.dtype), _no_drops()


def _all_experts(bank: Float[Array, "e p q"], way: Way) -> Float[Array, "E p q"]:
    return bank if way.axis is None else jax.lax.all_gather(bank, way.axis, axis=0, tiled=True)


def _no_drops() -> Drops:
    return Drops(jnp.int32(0), jnp.int32(0))


class _Plan(NamedTuple):
    """Where each assignment (token * A + choice) sits in the blocks, and what each slot of the blocks holds."""

    expert: Int[Array, " n"]  # expert of each block
    source: Int[Array, " s"]  # assignment in each slot; T * A where the slot is empty
    slot: Int[Array, "T A"]  # slot of each assignment; n * BLOCK where it is not sent


def _plan(chosen: Int[Array, "T A"], valid: Bool[Array, " T"], num_experts: int) -> _Plan:
    """Stable order by expert; assignments of invalid rows sort behind all experts and get no slot."""
    num_assignments = chosen.size
    num_blocks = -(-num_assignments // BLOCK) + num_experts
    expert = jnp.where(valid[:, None], chosen, num_experts).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=num_experts + 1)
    padded = -(-sizes // BLOCK) * BLOCK
    block_start = jnp.cumsum(padded) - padded
    rank = jnp.arange(num_assignments) - (jnp.cumsum(sizes) - sizes)[expert[order]]
    place = jnp.where(expert[order] < num_experts, block_start[expert[order]] + rank, num_blocks * BLOCK)
    source = jnp.full(num_blocks * BLOCK, num_assignments).at[place].set(order, mode="drop", unique_indices=True)
    slot = jnp.zeros(num_assignments, place.dtype).at[order].set(place, unique_indices=True)
    ends = jnp.cumsum(padded[:num_experts])
    block_expert = jnp.searchsorted(ends, jnp.arange(num_blocks) * BLOCK, side="right")
    return _Plan(jnp.minimum(block_expert, num_experts - 1), source, slot.reshape(chosen.shape))
