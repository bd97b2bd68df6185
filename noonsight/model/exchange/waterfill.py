"""Waterfilling: the experts of one device share one buffer, and what some do not fill the others may take.

    C = ceil(factor * mean load of an expert);  n_e = rows wanted of expert e by all devices
    floor_e = min(n_e, C);  slack = sum of max(C - n_e, 0);  over_e = n_e - floor_e
    grant_e = clip(slack - exclusive sum of over, 0, over_e);  kept_e = floor_e + grant_e
    accepted[e, s] = clip(kept_e - exclusive sum over senders of wanted[e, :], 0, wanted[e, s])

An assignment is refused only where the whole group of experts overflows, and what is refused does not depend on how
many devices share the experts as long as the groups are the same. The rows travel as in `ragged.py` (Marin, #8311, #8320).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from noonsight.model.count.devices import ceiled
from noonsight.model.exchange.ragged import admitting
from noonsight.model.exchange.transfer import exclusive
from noonsight.model.exchange.way import Drops, Way


def waterfill(
    x: Float[Array, "T Z"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    gate: Float[Array, "e Z F"],
    up: Float[Array, "e Z F"],
    down: Float[Array, "e F Z"],
    way: Way = Way(),
) -> tuple[Float[Array, "T Z"], Drops]:
    """The contract of the package. Refuses at the receiver only."""
    experts, room = len(gate), way.shards * len(chosen)
    if way.capacity_factor is not None:
        room = min(room, ceiled(way.capacity_factor, way.shards * chosen.size, way.shards * experts))

    def granted(wanted: Int[Array, "S e s"]) -> Int[Array, "S e s"]:
        of_expert = jnp.sum(wanted, axis=-1)
        floor = jnp.minimum(of_expert, room)
        over, slack = of_expert - floor, jnp.sum(room - floor, axis=-1, keepdims=True)
        kept = floor + jnp.clip(slack - exclusive(over), 0, over)
        return jnp.clip(kept[..., None] - exclusive(wanted), 0, wanted)

    return admitting(granted, experts * room, 1, x, chosen, weights, valid, (gate, up, down), way)
