"""The processes that train one run together, seen from inside one of them.

All ranks do the same steps, so whatever changes the course of the run must come to all of them at the same step. What
follows from the numbers does by itself, since every rank sees the same numbers. What comes from outside (a signal, a
clock) comes to one of them first, at any time: it becomes a *wish*, published with the turn at which all act on it.

    wish at turn t of rank a  ->  all act before turn t + 2

Why two: a rank dispatches turn t + 1 before it waits for the result of turn t, and that result needs rank a, which has
published before it takes part. So no rank looks for wishes before turn t + 2 without finding this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from noonsight.train.recover.worker import COORDINATOR, RANK, RANKS

CONNECT_S = 300
HEARTBEAT_S = 10
SHARE_S = 3600  # how long a rank waits for what rank 0 decides: a restore may come before it
TURNS_AHEAD = 2
_PREFIX = "noonsight/wish/"


class Ranks:
    """This process's place among those that train the run. Alone: rank 0 of 1, and a wish is heard at once."""

    def __init__(self, rank: int = 0, count: int = 1, client: Any = None) -> None:
        self.rank, self.count, self._client = rank, count, client
        self._turn = 0
        self._wishes: set[tuple[str, int]] = set()  # (wish, the turn at which all act on it)

    @property
    def first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return self.count == 1

    def next_turn(self, wishes: dict[str, bool]) -> set[str]:
        """Begin the next turn with the wishes of this rank; those of any rank that all act on now.

        To be called once before each dispatched step, in every rank.
        """
        self._turn += 1
        for name, wanted in wishes.items():
            if wanted:
                self._wish(name)
        if self._client is not None:
            self._listen()
        return {name for name, turn in self._wishes if turn == self._turn}

    def share(self, name: str, value: str) -> str:
        """Rank 0's `value`, in every rank. `name` is used once in the life of a gang."""
        if self._client is None:
            return value
        if self.first:
            self._client.key_value_set(f"noonsight/shared/{name}", value)
            return value
        return self._client.blocking_key_value_get(f"noonsight/shared/{name}", SHARE_S * 1000)

    def _wish(self, name: str) -> None:
        if self._client is None:
            self._wishes.add((name, self._turn))
        elif not any(name == known and turn >= self._turn for known, turn in self._wishes):
            key = f"{_PREFIX}{name}/{self._turn + TURNS_AHEAD}"
            self._client.key_value_set(key, "", allow_overwrite=True)

    def _listen(self) -> None:
        for key, _ in self._client.key_value_dir_get(_PREFIX):
            name, turn = key.removeprefix(_PREFIX).split("/")
            self._wishes.add((name, int(turn)))


def connect() -> Ranks:
    """Join the other ranks of this process's gang, as the supervisor's environment says; before JAX looks for devices.

    The coordinator is a process beside the ranks, which `jax.distributed.initialize` cannot be told (it would start one
    in rank 0), so its client is made here as that function makes it.
    """
    count = int(os.environ.get(RANKS, "1"))
    if count == 1:
        return Ranks()
    from jax._src import distributed
    from jaxlib import _jax

    rank, address = int(os.environ[RANK]), os.environ[COORDINATOR]
    jax.config.update("jax_enable_recoverability", True)
    state = distributed.global_state
    state.process_id, state.num_processes, state.coordinator_address = rank, count, address
    state.client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=CONNECT_S, use_compression=True, heartbeat_timeout=HEARTBEAT_S
    )
    state.client.connect()
    return Ranks(rank, count, state.client)


def place_batch(
    batch: Callable[..., Any], num_rows: int, sharding: jax.sharding.Sharding | None, ranks: Ranks
) -> Callable[[int], Any]:
    """`batch(step, rows)` as a function of the step alone. With several ranks each makes the rows of its own devices only
    and the arrays are spread over all of them as `sharding` (of [B, S]) says.
    """
    if ranks.alone or sharding is None:
        return batch

    def placed(step: int) -> Any:
        indices = sharding.addressable_devices_indices_map((num_rows, 1 << 30))
        parts = {index[0].indices(num_rows): batch(step, index[0]) for index in indices.values()}
        leaves = {key: jax.tree.leaves(part) for key, part in parts.items()}
        arrays = []
        for number, leaf in enumerate(next(iter(leaves.values()))):
            shape = (num_rows, *leaf.shape[1:])
            places = sharding.addressable_devices_indices_map(shape)
            here = [
                jax.device_put(leaves[index[0].indices(num_rows)][number][(slice(None), *index[1:])], device)
                for device, index in places.items()
            ]
            arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, here))
        return jax.tree.unflatten(jax.tree.structure(next(iter(parts.values()))), arrays)

    return placed


def whole(array: Any) -> np.ndarray:
    """An array spread over the processes, as one on this host; every rank must ask."""
    if getattr(array, "is_fully_addressable", True):
        return np.asarray(jax.device_get(array))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
