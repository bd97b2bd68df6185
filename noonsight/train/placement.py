"""How a run lies on the devices it was given. None of it is identity: the numbers are the same wherever it runs.

A transport that drops nothing may be put in the place of another one, as long as it is seen to drop nothing: the loop
stops at the first refused assignment (`Dropped`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax

from noonsight.logbook.record import Placement
from noonsight.model.config import ModelConfig
from noonsight.model.layout import ALONE, Layout, make_mesh


class Dropped(RuntimeError):
    """A substituted exchange refused an assignment, so this is no longer the run that the config describes."""

    symptom = "dropped"


def layout_of(placement: Placement, config: ModelConfig) -> Layout:
    """The mesh of a placement: its own, or as many devices as divide the experts on `expert` and the rest on `data`.

    Raises ValueError when there are fewer devices than it names, or its mesh is of another number of them.
    """
    if placement.num_devices == 1:
        return ALONE
    expert = math.gcd(placement.num_devices, config.num_experts) if config.is_moe else 1
    sizes = placement.mesh or {"data": placement.num_devices // expert, "expert": expert}
    devices = jax.devices()
    if len(devices) < placement.num_devices:
        raise ValueError(
            f"the placement asks for {placement.num_devices} devices and this process has {len(devices)} "
            f"({devices[0].platform}); ask for fewer, or run where there are more"
        )
    return Layout(make_mesh(sizes, devices[: placement.num_devices]))


def model_of(placement: Placement, config: ModelConfig) -> ModelConfig:
    """The model with the exchange that the placement puts in the place of its own.

    Raises ValueError where nothing could prove that the run stays the same: the config's own exchange may drop.
    """
    if placement.exchange is None:
        return config
    if config.capacity_factor is not None:
        raise ValueError(
            f"the placement puts exchange {placement.exchange!r} in the place of {config.exchange!r} with capacity "
            f"{config.capacity_factor}, which drops what finds no room: no other exchange drops the same. Take the "
            "placement's exchange out, or give the model capacity_factor None"
        )
    return replace(config, exchange=placement.exchange, capacity_factor=placement.capacity_factor)


def require_no_drops(placement: Placement, step: int, values: dict[str, float]) -> None:
    """Raises Dropped when a substituted exchange dropped anything in this step."""
    rate = values.get("router/drop_rate", 0.0)
    if placement.exchange is not None and rate != 0.0:
        raise Dropped(
            f"Step {step}: exchange {placement.exchange!r} with capacity {placement.capacity_factor}, which the placement "
            f"put in the place of the config's, dropped {rate:.3%} of the assignments; the config's drops none. No "
            "checkpoint holds this step. Give the placement more capacity (None: room for all), or take its exchange out."
        )
