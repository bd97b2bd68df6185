"""Rows from device to device along one mesh axis, and the bookkeeping that every exchange needs for it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from noonsight.model.exchange.way import Way

FILL = 0.0  # what a receive buffer holds where nothing arrives; nothing reads it, which tests prove with NaN


class Move(NamedTuple):
    """Pieces of consecutive rows that this device sends, [device, piece]: a ragged all-to-all.

    `source`: first row here; `target`: first row there; `size`: rows; `arriving`: rows of the pieces that come here.
    """

    source: Int[Array, "S u"]
    target: Int[Array, "S u"]
    size: Int[Array, "S u"]
    arriving: Int[Array, "S u"]


def everyones(x: Shaped[Array, "..."], way: Way) -> Shaped[Array, "S ..."]:
    """`x` of each device of the axis."""
    return x[None] if way.axis is None else jax.lax.all_gather(x, way.axis)


def exchanged(x: Shaped[Array, "S ..."], way: Way) -> Shaped[Array, "S ..."]:
    """x[s] goes to device s, and what comes from device s is found at s."""
    return x if way.axis is None else jax.lax.all_to_all(x, way.axis, 0, 0)


def here(way: Way) -> Int[Array, ""]:
    """The place of this device on the axis."""
    return jnp.int32(0) if way.axis is None else jax.lax.axis_index(way.axis)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def moved(
    rows: Float[Array, "N Z"],
    into: Float[Array, "R Z"],
    move: Move,
    back: Move,
    last: bool,
    most: int,
    way: Way,
) -> tuple[Float[Array, "R Z"], Float[Array, "N Z"]]:
    """`into` with the rows that arrive, and `rows` once more, for whatever else sends of them; `last` where nothing does.
    No piece is longer than `most`; `back` is the way of all pieces home, which cotangents take: they all come to one
    buffer, as the rows left one.

    GPUs and TPUs have a ragged all-to-all. Elsewhere the pieces are padded to `most`, so that all around it is the same
    program, and tested. (As in `grouped.py` the platform is that of the program, not of the process.)
    """
    return _moved(rows, into, move, most, way), rows


def _moved_forward(rows, into, move, back, last, most, way):
    return (_moved(rows, into, move, most, way), rows), (back, jnp.empty((len(rows), 0)))


def _moved_backward(last, most, way, saved, cotangents):
    """What was not sent keeps what its buffer held, and so does what of `into` was written over: exchanges read neither."""
    back, like_rows = saved
    arrived, others = cotangents
    home = blank(len(like_rows), arrived) if last else others
    return _moved(arrived, home, back, most, way), arrived, None, None


moved.defvjp(_moved_forward, _moved_backward)


def _moved(rows, into, move, most, way):
    padded = partial(_padded, most=most, way=way)
    if way.axis is None:
        return padded(rows, into, move)
    ragged = partial(_ragged, axis=way.axis)
    return jax.lax.platform_dependent(rows, into, move, cuda=ragged, tpu=ragged, default=padded)


def blank(num_rows: int, tie: Float[Array, "N Z"]) -> Float[Array, "R Z"]:
    """A buffer of rows like those of `tie`, made no earlier than they are: without that tie the compiler takes the buffer
    for a constant of the scan over layers and holds all of them at once (F24: 172 GiB instead of 138).
    """
    empty = jnp.full((num_rows, tie.shape[1]), FILL, tie.dtype)
    return jax.lax.optimization_barrier((empty, tie))[0]


def exclusive(counts: Int[Array, "*b n"]) -> Int[Array, "*b n"]:
    """Sums of all entries before each along the last axis."""
    return jnp.cumsum(counts, axis=-1) - counts


def _ragged(rows, into, move, axis):
    source, target, size, arriving = (each.reshape(-1) for each in move)
    return jax.lax.ragged_all_to_all(rows, into, source, size, target, arriving, axis_name=axis)


def _padded(rows, into, move, most, way):
    step = jnp.arange(most)
    sent = step < move.size[..., None]
    pieces = jnp.where(sent[..., None], rows[move.source[..., None] + step], 0)  # an index past the end is not sent
    place = exchanged(move.target, way)[..., None] + step
    place = jnp.where(step < move.arriving[..., None], place, len(into))
    return into.at[place].set(exchanged(pieces, way), mode="drop", unique_indices=True)
