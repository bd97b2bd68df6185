"""Ragged all-to-all: each device sends every expert the rows that chose it, no row more, and gets them back.

    order the assignments by expert -> n[E]; N[S, E] = n of all devices
    for each chunk of this device's experts (two, so that half the buffers are alive):
        admitted[s, e] = clip(capacity - exclusive sum of N in the order (expert, sender), 0, N)      (prefix rule)
        send the admitted rows; they land grouped by expert, no permutation is needed
        SwiGLU of each group; send the results back to the rows they came from
    y[t] = sum over k of weights[t, k] * back[t, k]                                                   (float32)

The capacity is that of the receiver: ceil(factor * mean load) rows over all chunks. Backward, the rows are sent again and
with them the cotangents; nothing of the forward pass is kept but its arguments. The weight's gradient <cotangent, y_row>
is made where the expert is, as <cotangent W_down^T, hidden>, and comes back as a column: no result needs to be kept
or sent twice (Marin, #8549, #8753).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from noonsight.model.exchange.grouped import grouped_product
from noonsight.model.exchange.transfer import Move, blank, everyones, exclusive, here, moved, take
from noonsight.model.exchange.way import Drops, Way

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
    """The contract of the package. Refuses at the receiver only, the last senders of a full buffer first."""
    plan = _plan(chosen, valid, len(gate), way)
    weights = jnp.where(valid[:, None], weights, 0)
    y = _routed(x, weights, (gate, up, down), plan, way)
    refused = jnp.sum(plan.wanted) - sum(jnp.sum(chunk.out.arriving) for chunk in plan.chunks)
    return y, Drops(jnp.int32(0), refused.astype(jnp.int32))


def capacity(num_assignments: int, num_chunks: int, shards: int, most: int, factor: float | None) -> int:
    """Rows of the receive buffer of one chunk. `most`: what one device could send it at most."""
    if factor is None:
        return shards * most
    return min(shards * most, math.ceil(math.ceil(factor * num_assignments) / num_chunks))


def num_chunks(experts_here: int) -> int:
    """How many chunks a device's experts are run in."""
    return CHUNKS if experts_here % CHUNKS == 0 else 1


class _Chunk(NamedTuple):
    """One chunk's transfers: there, and back."""

    out: Move
    back: Move
    sizes: Int[Array, " g"]  # rows of each of its experts


class _Plan(NamedTuple):
    """Where each assignment goes."""

    token: Int[Array, " n"]  # of each row in sorted order
    place: Int[Array, "T A"]  # of each assignment in that order; n where it is not sent
    sent: Bool[Array, " n"]  # whether the row there is
    wanted: Int[Array, "S e"]  # rows that the experts of this device were chosen for, admitted or not
    chunks: tuple[_Chunk, ...]


def _plan(chosen: Int[Array, "T A"], valid: Bool[Array, " T"], experts_here: int, way: Way) -> _Plan:
    num_tokens, per_token = chosen.shape
    shards, me, num_rows = way.shards, here(way), chosen.size
    expert = jnp.where(valid[:, None], chosen, shards * experts_here).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    position = jnp.zeros(num_rows, jnp.int32).at[order].set(jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True)
    counts = jnp.bincount(expert, length=shards * experts_here).astype(jnp.int32)
    of_all = everyones(counts, way)  # [S, E]
    source = exclusive(of_all).reshape(shards, shards, experts_here)  # [sender, receiver, expert]
    wanted = of_all.reshape(shards, shards, experts_here)

    admitted, chunks = [], []
    group = experts_here // num_chunks(experts_here)
    room = capacity(num_rows, experts_here // group, shards, num_tokens * min(per_token, group), way.capacity_factor)
    for first in range(0, experts_here, group):
        mine = slice(first, first + group)
        in_order = jnp.moveaxis(wanted[..., mine], 0, -1).reshape(shards, -1)  # [receiver, expert * S + sender]
        before = exclusive(in_order)
        size, target = (
            jnp.moveaxis(each.reshape(shards, group, shards), -1, 0)
            for each in (jnp.clip(room - before, 0, in_order), jnp.minimum(before, room))
        )
        out = Move(source[me, :, mine], target[me], size[me], size[:, me])
        back = Move(target[:, me], source[:, me, mine], size[:, me], size[me])
        chunks.append(_Chunk(out, back, jnp.sum(size[:, me], axis=0)))
        admitted.append(size[me])
    ends = (source[me] + jnp.concatenate(admitted, axis=-1)).reshape(-1)
    sent = jnp.arange(num_rows) < jnp.append(ends, 0)[expert[order]]
    place = jnp.where(sent[position], position, num_rows).reshape(chosen.shape)
    return _Plan(order // per_token, place, sent, wanted[:, me], tuple(chunks))


Banks = tuple[Float[Array, "e Z F"], Float[Array, "e Z F"], Float[Array, "e F Z"]]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _routed(
    x: Float[Array, "T Z"], weights: Float[Array, "T A"], banks: Banks, plan: _Plan, way: Way
) -> Float[Array, "T Z"]:
    rows, num_tokens = take(x, plan.token), len(x)
    back = blank(len(rows), rows)
    for chunk, (gate, up, down) in _chunks(banks, plan):
        rows, back = jax.lax.optimization_barrier((rows, back))  # one chunk after the other
        received = _received(rows, chunk, num_tokens, weights.shape[1], len(plan.chunks), way)
        hidden = _hidden(received, gate, up, chunk.sizes, way.dtype)
        results = grouped_product(hidden, down, chunk.sizes, way.dtype)
        back = moved(results, back, chunk.back, num_tokens, way)
    y = jnp.sum(take(back, plan.place).astype(jnp.float32) * weights.astype(jnp.float32)[..., None], axis=1)
    return y.astype(x.dtype)


def _forward(x, weights, banks, plan, way):
    return _routed(x, weights, banks, plan, way), (x, weights, banks, plan)


def _backward(way, saved, cotangent):
    x, weights, banks, plan = saved
    num_tokens, per_token, every = len(x), weights.shape[1], len(plan.chunks)
    rows, slopes = take(x, plan.token), take(cotangent, plan.token)
    weight = (
        jnp.zeros(len(rows), weights.dtype).at[plan.place.reshape(-1)].set(weights.reshape(-1), mode="drop")[:, None]
    )
    d_rows, d_weight = blank(len(rows), rows), blank(len(rows), weight.astype(jnp.float32))
    d_banks = []
    for chunk, (gate, up, down) in _chunks(banks, plan):
        rows, slopes, d_rows = jax.lax.optimization_barrier((rows, slopes, d_rows))
        received, slope, scale = (
            _received(each, chunk, num_tokens, per_token, every, way) for each in (rows, slopes, weight)
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
    dx = jnp.sum(take(d_rows, plan.place).astype(jnp.float32), axis=1).astype(x.dtype)
    d_weights = take(d_weight, plan.place)[..., 0].astype(weights.dtype)
    d_banks = tuple(jnp.concatenate(each) for each in zip(*d_banks))
    return dx, d_weights, d_banks, None


_routed.defvjp(_forward, _backward)


def _chunks(banks: Banks, plan: _Plan):
    """Each chunk with its part of the banks."""
    group = len(banks[0]) // len(plan.chunks)
    for number, chunk in enumerate(plan.chunks):
        yield chunk, tuple(bank[number * group : (number + 1) * group] for bank in banks)


def _received(rows: Float[Array, "n Z"], chunk: _Chunk, num_tokens: int, per_token: int, chunks: int, way: Way):
    """The rows that come to this device for the experts of a chunk, grouped by expert."""
    most = num_tokens * min(per_token, len(chunk.sizes))
    room = capacity(num_tokens * per_token, chunks, way.shards, most, way.capacity_factor)
    return moved(rows, blank(room, rows), chunk.out, num_tokens, way)


def _hidden(rows, gate, up, sizes, dtype):
    return jax.nn.silu(grouped_product(rows, gate, sizes, dtype)) * grouped_product(rows, up, sizes, dtype)
