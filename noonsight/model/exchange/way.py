"""How an exchange is run, and what it refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtyping import Array, Int


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an exchange is run; static."""

    axis: str | None = None  # mesh axis over which the experts are split; None: this device has them all
    shards: int = 1
    capacity_factor: float | None = None  # None: room for the worst case, nothing is ever dropped
    dtype: str = "float32"  # what products round their inputs to
    weigh: Literal["token", "expert"] = "token"  # the device that multiplies by the weights (ragged transfers only)


class Drops(NamedTuple):
    """Assignments of this device that were refused: when sending, when receiving."""

    sender: Int[Array, ""]
    receiver: Int[Array, ""]
