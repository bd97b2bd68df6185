"""Ragged all-to-all: each device sends every expert the rows that chose it, no row more, and gets them back.

    order the assignments by expert -> n[E]; N[S, E] = n of all devices
    for each chunk of this device's experts (two, so that half the buffers are alive):
        admitted[s, e] = clip(capacity - exclusive sum of N in the order (expert, sender), 0, N)      (prefix rule)
        send the admitted rows; they land grouped by expert, no permutation is needed
        SwiGLU of each group; send the results back to the rows they came from
    y[t] = sum over k of weights[t, k] * back[t, k]                                                   (float32)

The capacity is that of the receiver: ceil(factor * mean load) rows over all chunks. Another rule of admission makes
another exchange of the same transfers (`waterfill.py`). Backward, the rows are sent again and
with them the cotangents; nothing of the forward pass is kept but its arguments. The weight's gradient <cotangent, y_row>
is made where the expert is, as <cotangent W_down^T, hidden>, and comes back as a column: no result needs to be kept
or sent twice (Marin, #8549, #8753).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from noonsight.model.count.devices import ragged_rows
from noonsight.model.exchange.gather import inverted, summed, take
from noonsight.model.exchange.grouped import grouped_product
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

    token: Int[Array, " n"]  # of each row in sorted order
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
    return _Plan(order // chosen.shape[1], place, tuple(chunks)), jnp.sum(wanted[:, me]) - arriving


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _routed(
    x: Float[Array, "T Z"], weights: Float[Array, "T A"], banks: Banks, plan: _Plan, room: int, way: Way
) -> Float[Array, "T Z"]:
    rows, num_tokens = take(x, plan.token), len(x)
    back = blank(len(rows), rows)
    for chunk, (gate, up, down) in _chunks(banks, plan):
        rows, back = jax.lax.optimization_barrier((rows, back))  # one chunk after the other
        received = moved(rows, blank(room, rows), chunk.out, num_tokens, way)
        hidden = _hidden(received, gate, up, chunk.sizes, way.dtype)
        results = grouped_product(hidden, down, chunk.sizes, way.dtype)
        back = moved(results, back, chunk.back, num_tokens, way)
    y = jnp.sum(take(back, plan.place).astype(jnp.float32) * weights.astype(jnp.float32)[..., None], axis=1)
    return y.astype(x.dtype)


def _forward(x, weights, banks, plan, room, way):
    return _routed(x, weights, banks, plan, room, way), (x, weights, banks, plan)


def _backward(room, way, saved, cotangent):
    x, weights, banks, plan = saved
    num_tokens = len(x)
    rows, slopes = take(x, plan.token), take(cotangent, plan.token)
    weight = (
        jnp.zeros(len(rows), weights.dtype).at[plan.place.reshape(-1)].set(weights.reshape(-1), mode="drop")[:, None]
    )
    d_rows, d_weight = blank(len(rows), rows), blank(len(rows), weight.astype(jnp.float32))
    d_banks = []
    for chunk, (gate, up, down) in _chunks(banks, plan):
        rows, slopes, d_rows = jax.lax.optimization_barrier((rows, slopes, d_rows))
        received, slope, scale = (
            moved(each, blank(room, each), chunk.out, num_tokens, way) for each in (rows, slopes, weight)
        )
        hidden, pull = jax.vjp(lambda *args, chunk=chunk: _hidden(*args, chunk.sizes, way.dtype), received, gate, up)
        arrived = jnp.arange(len(received))[:, None] < jnp.sum(chunk.sizes)
        scale = jnp.where(arrived, scale, 0)
        _, pull_down = jax.vjp(lambda *args, chunk=chunk: grouped_product(*args, chunk.sizes, way.dtype), hidden, down)
        d_down = pull_down((jnp.where(arrived, slope, 0) * scale).astype(hidden.dtype))[1]
        unscaled = grouped_product(slope.astype(hidden.dtype), jnp.swapaxes(down, 1, 2), chunk.sizes, way.dtype)
        d_scale = jnp.sum(hidden.astype(jnp.float32) * unscaled.astype(jnp.float32), axis=1, keepdims=True)
        d_received, d_gate, d_up = pull((unscaled * scale).astype(hidden.dtype))
        d_rows = moved(d_received, d_rows, chunk.back, num_tokens, way)
        d_weight = moved(d_scale, d_weight, chunk.back, num_tokens, way)
        d_banks.append((d_gate, d_up, d_down))
    dx = summed(d_rows, plan.place)
    d_weights = take(d_weight, plan.place)[..., 0].astype(weights.dtype)
    d_banks = tuple(jnp.concatenate(each) for each in zip(*d_banks))
    return dx, d_weights, d_banks, None


_routed.defvjp(_forward, _backward)


def _chunks(banks: Banks, plan: _Plan):
    """Each chunk with its part of the banks."""
    group = len(banks[0]) // len(plan.chunks)
    for number, chunk in enumerate(plan.chunks):
        yield chunk, tuple(bank[number * group : (number + 1) * group] for bank in banks)


def _hidden(rows, gate, up, sizes, dtype):
    return jax.nn.silu(grouped_product(rows, gate, sizes, dtype)) * grouped_product(rows, up, sizes, dtype)
