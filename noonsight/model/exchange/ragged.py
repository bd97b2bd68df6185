"""Ragged all-to-all: each device sends every expert the rows that chose it, no row more, and gets them back.

    order the assignments by expert -> n[E]; N[S, E] = n of all devices
    for each chunk of this device's experts (two, so that half the buffers are alive):
        admitted[s, e] = clip(capacity - exclusive sum of N in the order (expert, sender), 0, N)      (prefix rule)
        send the admitted rows; they land grouped by expert, no permutation is needed
        SwiGLU of each group; send the results back to the rows they came from
    y[t] = sum over k of weights[t, k] * back[t, k]                                                   (float32)

A row's weight acts on the token's device, or travels with it and acts where the expert is (`Way.weigh`): then the
gradient of a weight is made there too, and comes back as a column. The capacity is that of the receiver: ceil(factor *
mean load) rows over all chunks. Another rule of admission makes another exchange of the same transfers
(`waterfill.py`). Backward, cotangents travel the same ways (Marin, #8549, #8753).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from noonsight.model.count.devices import ragged_rows
from noonsight.model.exchange.gather import combined, dispatched, inverted, summed_back
from noonsight.model.exchange.grouped import grouped_swiglu
from noonsight.model.exchange.transfer import Move, blank, everyones, exclusive, here, moved
from noonsight.model.exchange.way import Drops, Way

Banks = tuple[Float[Array, "e Z F"], Float[Array, "e Z F"], Float[Array, "e F Z"]]

CHUNKS = 2  # of a device's experts, one after the other, where the number of experts is even


def ragged(
    x: Float[Array, "T Z"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    gate: Float[Array, "e Z F"],
    up: Float[Array, "e Z F"],
    down: Float[Array, "e F Z"],
    way: Way = Way(),
) -> tuple[Float[Array, "T Z"], Drops]:
    """The contract of the package. Refuses at the receiver only: what comes after the buffer is full, in the order
    (expert, sender).
    """
    chunks = CHUNKS if len(gate) % CHUNKS == 0 else 1
    room = _all_there_can_be(chosen, len(gate) // chunks, way)
    if way.capacity_factor is not None:
        room = min(
            room, ragged_rows(chosen.size, num_chunks=chunks, capacity_factor=way.capacity_factor).rows_per_chunk
        )

    def prefix(wanted: Int[Array, "S e s"]) -> Int[Array, "S e s"]:
        flat = wanted.reshape(len(wanted), -1)
        return jnp.clip(room - exclusive(flat), 0, flat).reshape(wanted.shape)

    return admitting(prefix, room, chunks, x, chosen, weights, valid, (gate, up, down), way)


Rule = Callable[[Int[Array, "S e s"]], Int[Array, "S e s"]]
"""What is admitted of the rows wanted[receiver, expert, sender] of one chunk."""


def admitting(
    rule: Rule,
    room: int,
    chunks: int,
    x: Float[Array, "T Z"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    banks: Banks,
    way: Way,
) -> tuple[Float[Array, "T Z"], Drops]:
    """The exchange that sends what `rule` admits to buffers of `room` rows for each of `chunks` of a device's experts."""
    plan, refused = _plan(rule, chunks, chosen, valid, len(banks[0]), way)
    y = _routed(x, jnp.where(valid[:, None], weights, 0), banks, plan, room, way)
    return y, Drops(jnp.int32(0), refused)


def _all_there_can_be(chosen: Int[Array, "T A"], experts: int, way: Way) -> int:
    """Rows for so many experts when every token of every device chooses as many of them as it can."""
    return way.shards * chosen.shape[0] * min(chosen.shape[1], experts)


class _Chunk(NamedTuple):
    """One chunk's transfers: there, and back."""

    out: Move
    back: Move
    sizes: Int[Array, " g"]  # rows of each of its experts


class _Plan(NamedTuple):
    """Where each assignment goes."""

    assignment: Int[Array, " n"]  # of each row in sorted order; T * A where it is not sent
    place: Int[Array, "T A"]  # of each assignment in that order; n where it is not sent
    chunks: tuple[_Chunk, ...]


def _plan(
    rule: Rule, num_chunks: int, chosen: Int[Array, "T A"], valid: Bool[Array, " T"], experts_here: int, way: Way
) -> tuple[_Plan, Int[Array, ""]]:
    """The plan, and how many rows this device refuses."""
    shards, me, num_rows = way.shards, here(way), chosen.size
    expert = jnp.where(valid[:, None], chosen, shards * experts_here).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    counts = jnp.bincount(expert, length=shards * experts_here).astype(jnp.int32)
    of_all = everyones(counts, way)  # [S, E]
    wanted, source = (each.reshape(shards, shards, experts_here) for each in (of_all, exclusive(of_all)))

    chunks, ends, arriving = [], [], 0
    group = experts_here // num_chunks
    for first in range(0, experts_here, group):
        mine = slice(first, first + group)
        admitted = rule(jnp.moveaxis(wanted[..., mine], 0, -1))  # [receiver, expert, sender]
        target = exclusive(admitted.reshape(shards, -1)).reshape(admitted.shape)
        size, target = (jnp.moveaxis(each, -1, 0) for each in (admitted, target))  # [sender, receiver, expert]
        out = Move(source[me, :, mine], target[me], size[me], size[:, me])
        back = Move(target[:, me], source[:, me, mine], size[:, me], size[me])
        chunks.append(_Chunk(out, back, jnp.sum(size[:, me], axis=0)))
        ends.append(source[me, :, mine] + size[me])
        arriving += jnp.sum(size[:, me])
    sent = jnp.arange(num_rows) < jnp.append(jnp.concatenate(ends, axis=-1), 0)[expert[order]]
    position = inverted(order, num_rows)
    place = jnp.where(sent[position], position, num_rows).reshape(chosen.shape)
    assignment = jnp.where(sent, order, num_rows)
    return _Plan(assignment, place, tuple(chunks)), jnp.sum(wanted[:, me]) - arriving


def _routed(
    x: Float[Array, "T Z"], weights: Float[Array, "T A"], banks: Banks, plan: _Plan, room: int, way: Way
) -> Float[Array, "T Z"]:
    num_tokens = len(x)
    rows = dispatched(x, plan.assignment // weights.shape[1], plan.place)
    scales = jnp.append(weights.reshape(-1), 0)[plan.assignment][:, None]
    back = blank(weights.size, rows)
    group = len(banks[0]) // len(plan.chunks)
    for number, chunk in enumerate(plan.chunks):
        gate, up, down = (bank[number * group : (number + 1) * group] for bank in banks)
        last, out, home = number + 1 == len(plan.chunks), (chunk.out, chunk.back), (chunk.back, chunk.out)
        rows, back = jax.lax.optimization_barrier((rows, back))  # one chunk after the other
        received, rows = moved(rows, blank(room, rows), *out, last, num_tokens, way)
        results = grouped_swiglu(received, gate, up, down, chunk.sizes, way.dtype)
        if way.weigh == "expert":
            scale, scales = moved(scales, blank(room, scales), *out, last, num_tokens, way)
            results = _scaled(results, scale, jnp.sum(chunk.sizes))
        back, _ = moved(results, back, *home, True, num_tokens, way)
    if way.weigh == "expert":
        return summed_back(back, plan.assignment, plan.place)
    return combined(back, weights, plan.assignment, plan.place).astype(x.dtype)


def _scaled(rows: Float[Array, "R Z"], scale: Float[Array, "R 1"], arrived: Int[Array, ""]) -> Float[Array, "R Z"]:
    """Rows times their weights, those that arrived."""
    here = jnp.arange(len(rows))[:, None] < arrived
    wide = jnp.where(here, rows, 0).astype(jnp.float32) * jnp.where(here, scale, 0).astype(jnp.float32)
    return wide.astype(rows.dtype)
