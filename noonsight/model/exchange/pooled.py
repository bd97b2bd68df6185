"""Pooled waves: an all-to-all of one pool of rows per pair of devices, three times, experts' numbers in the rows.

    q = stable rank of each assignment among those to the same device; wave = q mod 3; slot = q div 3     (striping)
    a sender keeps slot < P; for each wave:
        header[S, M, Z]: expert there + 1 in slot order, 0 = empty      (whole numbers up to 256 are exact in bfloat16)
        recv = all_to_all(header ++ rows)                               [S, M + P, Z]
        rank of each row within its expert in the order (slot, sender)  (round-robin: no sender is always the last)
        a receiver keeps rank < R; SwiGLU of [e, R, Z]; results go back to their slots
    y[t] = sum over k of weights[t, k] * back[t, k]                                                        (float32)

P = ceil(1.15 A / (3 S)) lets the experts of a device share what crosses the wire, R = ceil(factor A / (3 e)) is what each
may multiply; both shrink with the tokens that are valid. The sizes of one wave are a third of the whole, and only one
wave is alive. Products and results are computed again in the backward pass; of the transport only the way back, whose
rows the gradient of the weights needs (Marin, #7279, #8347).
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from noonsight.model.count.devices import PooledWave, pooled_rows
from noonsight.model.exchange.fixed import rank_within
from noonsight.model.exchange.gather import combined, inverted, permuted, summed, take
from noonsight.model.exchange.grouped import block_products
from noonsight.model.exchange.transfer import exchanged
from noonsight.model.exchange.way import Drops, Way

WAVES = 3
TRANSPORT = 1.15  # room on the wire over the mean


def pooled(
    x: Float[Array, "T Z"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    gate: Float[Array, "e Z F"],
    up: Float[Array, "e Z F"],
    down: Float[Array, "e F Z"],
    way: Way = Way(),
) -> tuple[Float[Array, "T Z"], Drops]:
    """The contract of the package. A sender refuses its last tokens first, a receiver the last slots of all senders.

    Raises ValueError for more experts on a device than a header can number.
    """
    if len(gate) > 255:
        raise ValueError(
            f"exchange 'pooled' numbers the experts of a device from 1 to 255, and there are {len(gate)}: split them over "
            "more devices, or use exchange 'ragged'"
        )
    sizes = _sizes(chosen, len(gate), x.shape[1], way)
    slots = _slots(chosen, valid, len(gate), sizes, way)
    most = _most_per_expert(valid, chosen.shape[1], len(gate), sizes, way)
    y, kept, received = jnp.zeros(x.shape, jnp.float32), 0, 0
    for wave in range(WAVES):
        place = jnp.where(slots.wave == wave, slots.place, way.shards * sizes.rows_per_pair)
        assignment = inverted(place.reshape(-1), way.shards * sizes.rows_per_pair)
        rows, expert = _dispatch(x, chosen % len(gate), place, assignment, sizes, way)
        part, accepted = _answer(rows, expert, weights, place, assignment, most, (gate, up, down), sizes, way)
        y += part
        kept += jnp.sum(place < len(assignment))
        received += jnp.sum(expert >= 0) - accepted
    sender = jnp.sum(valid) * chosen.shape[1] - kept
    return y.astype(x.dtype), Drops(sender.astype(jnp.int32), received.astype(jnp.int32))


class _Slots(NamedTuple):
    """Where a sender puts each assignment."""

    wave: Int[Array, "T A"]
    place: Int[Array, "T A"]  # receiver * P + slot; S * P where it stays at home


def _sizes(chosen: Int[Array, "T A"], experts_here: int, width: int, way: Way) -> PooledWave:
    tokens, per_token = chosen.shape
    if way.capacity_factor is not None:
        return pooled_rows(
            chosen.size,
            shards=way.shards,
            experts_here=experts_here,
            row_width=width,
            num_waves=WAVES,
            transport_factor=TRANSPORT,
            capacity_factor=way.capacity_factor,
        )
    rows = -(-tokens * min(per_token, experts_here) // WAVES)
    return PooledWave(rows_per_pair=rows, rows_per_expert=way.shards * rows, header_rows=-(-rows // width))


def _slots(
    chosen: Int[Array, "T A"], valid: Bool[Array, " T"], experts_here: int, sizes: PooledWave, way: Way
) -> _Slots:
    device = jnp.where(valid[:, None], chosen // experts_here, way.shards)
    rank = rank_within(device.reshape(-1), way.shards).reshape(chosen.shape)
    wave, slot, room = rank % WAVES, rank // WAVES, sizes.rows_per_pair
    if way.capacity_factor is not None:
        mine = jnp.sum(valid) * chosen.shape[1]
        room = jnp.minimum(room, scaled(TRANSPORT, mine, way.shards * WAVES))
    keep = (device < way.shards) & (slot < room)
    return _Slots(wave, jnp.where(keep, device * sizes.rows_per_pair + slot, way.shards * sizes.rows_per_pair))


def _most_per_expert(
    valid: Bool[Array, " T"], per_token: int, experts_here: int, sizes: PooledWave, way: Way
) -> Int[Array, ""]:
    """What a receiver takes for one of its experts in one wave, by the valid tokens of all."""
    if way.capacity_factor is None:
        return jnp.int32(sizes.rows_per_expert)
    all_valid = jnp.sum(valid) if way.axis is None else jax.lax.psum(jnp.sum(valid), way.axis)
    room = scaled(way.capacity_factor, all_valid * per_token, way.shards * experts_here * WAVES)
    return jnp.minimum(sizes.rows_per_expert, room)


def scaled(factor: float, number: Int[Array, ""], parts: int) -> Int[Array, ""]:
    """ceil(factor * number / parts) of a number that is not known before, exact for a factor of decimals; no product in
    it passes the number times the factor.
    """
    exact = Fraction(str(factor))
    divisor = exact.denominator * parts
    whole, rest = number // divisor, number % divisor
    return exact.numerator * whole + -(-exact.numerator * rest // divisor)


def _dispatch(
    x: Float[Array, "T Z"],
    expert: Int[Array, "T A"],
    place: Int[Array, "T A"],
    assignment: Int[Array, " n"],
    sizes: PooledWave,
    way: Way,
) -> tuple[Float[Array, "n Z"], Int[Array, " n"]]:
    """The rows of one wave that come to this device in the order (sender, slot), and which of its experts each is for:
    -1 where a slot is empty.
    """
    width, headers, experts_plus = x.shape[1], sizes.header_rows, jnp.append(expert.reshape(-1) + 1, 0)
    numbers = experts_plus[assignment].reshape(way.shards, -1)
    numbers = jnp.pad(numbers, ((0, 0), (0, headers * width - numbers.shape[1]))).astype(x.dtype)
    return _sent(x, numbers.reshape(way.shards * headers, width), place, assignment, sizes, way)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sent(x, header, place, assignment, sizes, way):
    """One gather from (rows, header, nothing) makes the payload; headers carry no gradient."""
    shards, headers = way.shards, sizes.header_rows
    tokens = assignment.reshape(shards, -1) // place.shape[1]
    source = jnp.where(tokens < len(x), tokens, len(x) + len(header))
    in_header = len(x) + jnp.arange(len(header), dtype=source.dtype).reshape(shards, headers)
    payload = take(jnp.concatenate([x, header]), jnp.concatenate([in_header, source], axis=1))
    arrived = exchanged(payload, way)
    numbers = arrived[:, :headers].reshape(shards, -1)[:, : source.shape[1]].astype(jnp.int32).reshape(-1)
    return arrived[:, headers:].reshape(-1, x.shape[1]), numbers - 1


def _sent_forward(x, header, place, assignment, sizes, way):
    return _sent(x, header, place, assignment, sizes, way), (header, place)


def _sent_backward(sizes, way, saved, cotangents):
    header, place = saved
    slopes = cotangents[0].reshape(way.shards, sizes.rows_per_pair, -1)
    back = exchanged(slopes, way).reshape(-1, slopes.shape[-1])
    return summed(back, place), jnp.zeros_like(header), None, None


_sent.defvjp(_sent_forward, _sent_backward)


@partial(jax.checkpoint, static_argnums=(7, 8))
def _answer(
    rows: Float[Array, "n Z"],
    expert: Int[Array, " n"],
    weights: Float[Array, "T A"],
    place: Int[Array, "T A"],
    assignment: Int[Array, " n"],
    most: Int[Array, ""],
    banks: tuple[Float[Array, "e Z F"], Float[Array, "e Z F"], Float[Array, "e F Z"]],
    sizes: PooledWave,
    way: Way,
) -> tuple[Float[Array, "T Z"], Int[Array, ""]]:
    """What the experts of this wave add to this device's tokens, and how many rows they took."""
    gate, up, down = banks
    experts, room = len(gate), sizes.rows_per_expert
    in_turn = expert.reshape(way.shards, -1).T.reshape(-1)  # slot by slot, so that every sender loses alike (F13)
    rank = rank_within(jnp.where(in_turn < 0, experts, in_turn), experts).reshape(-1, way.shards).T.reshape(-1)
    target = jnp.where((expert >= 0) & (rank < most), expert * room + rank, experts * room)
    source = inverted(target, experts * room)

    compact = permuted(rows, source, target).reshape(experts, room, -1)
    gated = jax.nn.silu(block_products(compact, gate, way.dtype).astype(rows.dtype))
    hidden = gated * block_products(compact, up, way.dtype).astype(rows.dtype)
    results = block_products(hidden, down, way.dtype).astype(rows.dtype).reshape(experts * room, -1)
    answers = permuted(results, target, source).reshape(way.shards, sizes.rows_per_pair, -1)
    back = exchanged(answers, way).reshape(-1, rows.shape[1])
    return combined(back, weights, assignment, place), jnp.sum(target < experts * room)
