"""Every device gets all tokens and answers for its own experts; the answers are summed on the way home.

    all_gather tokens, choices and weights -> order this device's assignments by (expert, position), no more than
    ceil(factor * mean load) -> SwiGLU of each group -> weighted sum per token -> psum_scatter

The baseline: no index arithmetic crosses devices, but a device holds the tokens of all (Marin, #7279).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from noonsight.model.count.devices import ceiled
from noonsight.model.exchange.gather import combined, dispatched, inverted
from noonsight.model.exchange.grouped import grouped_swiglu
from noonsight.model.exchange.transfer import everyones, exclusive, here
from noonsight.model.exchange.way import Drops, Way


def ring(
    x: Float[Array, "T Z"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    gate: Float[Array, "e Z F"],
    up: Float[Array, "e Z F"],
    down: Float[Array, "e F Z"],
    way: Way = Way(),
) -> tuple[Float[Array, "T Z"], Drops]:
    """The contract of the package. Refuses at the receiver only: what comes after its rows are full, in the order
    (expert, sender).
    """
    experts, per_token = len(gate), chosen.shape[1]
    x_all, chosen, weights, valid = (_of_all(each, way) for each in (x, chosen, weights, valid))
    room = len(x_all) * min(per_token, experts)
    if way.capacity_factor is not None:
        room = min(room, ceiled(way.capacity_factor, chosen.size, way.shards))

    local = chosen - here(way) * experts
    expert = jnp.where(valid[:, None] & (local >= 0) & (local < experts), local, experts).reshape(-1)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)[:room]
    wanted = jnp.bincount(expert, length=experts + 1)[:-1].astype(jnp.int32)
    sizes = jnp.clip(room - exclusive(wanted), 0, wanted)
    assignment = jnp.where(jnp.arange(room) < jnp.sum(sizes), order, chosen.size)
    place = inverted(assignment, chosen.size).reshape(chosen.shape)

    rows = dispatched(x_all, assignment // per_token, place)
    results = grouped_swiglu(rows, gate, up, down, sizes, way.dtype)
    y = combined(results, weights, assignment, place)
    if way.axis is not None:
        y = jax.lax.psum_scatter(y, way.axis, tiled=True)
    return y.astype(x.dtype), Drops(jnp.int32(0), jnp.sum(wanted) - jnp.sum(sizes))


def _of_all(x: Array, way: Way) -> Array:
    """The tokens of all devices of the axis, one device after the other."""
    return everyones(x, way).reshape(-1, *x.shape[1:])
