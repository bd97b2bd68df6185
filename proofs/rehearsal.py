"""Whole rehearsals, one after the other: `python -m proofs.rehearsal [NAME ...]` prints a JSON list of rows.

The hero on one rack and on eleven, with other exchanges and with the inputs of layers kept on the device; the hero on
TPUs; MoE V1 and Snowball; and three mistakes planted in a small program, which the report must name. Needs the extras
rehearse-gpu and rehearse-tpu; a minute each for GPUs, five for TPUs. Nothing here judges.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
RUNS: dict[str, tuple[str, str, dict[str, str]]] = {  # name -> (experiment, target, change)
    "hero-rack": ("hero", "gb200:1x16x4", {}),
    "hero": ("hero", "gb200:11x16x4", {}),
    "hero-block": ("hero", "gb200:1x16x4", {"remat": "block"}),
    "hero-pooled": ("hero", "gb200:1x16x4", {"exchange": "pooled"}),
    "hero-v5p": ("hero", "v5p:8x8x16", {}),
    "hero-7x": ("hero", "tpu7x:8x8x8", {}),
    "moe-v1": ("moe_v1", "v4:8x8x16", {}),
    "snowball": ("snowball", "h100:8x32x8", {}),
}
DEVICES = 8


def rehearsal(name: str) -> dict[str, Any]:
    """One of RUNS: the JSON of its report, `failed` where there is none, and the seconds it took."""
    from noonsight.plan.runner import load_experiment
    from noonsight.recipe.rehearsing import job_of
    from noonsight.train.rehearse import report, what_if

    experiment, target, change = RUNS[name]
    start = time.perf_counter()
    try:
        job = what_if.apply(job_of(load_experiment(EXPERIMENTS / f"{experiment}.py"), target), change)
        found = report.told(report.rehearse(job))
    except ValueError as error:
        found = {"failed": str(error)}
    return {"name": name, "seconds": round(time.perf_counter() - start, 1), **found}


def planted() -> Iterator[dict[str, Any]]:
    """What the report says of a sound program, and of it with each mistake. Needs eight devices."""
    from noonsight.train.rehearse.compile import compile_here
    from noonsight.train.rehearse.mistakes import mistakes

    job = small_job()
    for name, plant in {"none": _nothing, **PLANTS}.items():
        with plant():
            found = mistakes(job, compile_here(job))
        yield {"name": f"planted: {name}", "told": [{"kind": each.kind, "text": each.text} for each in found]}


def small_job() -> Any:
    """A step of 2,048 tokens on each of eight devices."""
    from noonsight.model.families import miniature
    from noonsight.train.config import OptimizerConfig, PretrainConfig
    from noonsight.train.rehearse.job import make_job

    rates = OptimizerConfig(adam_lr=1e-3, matrix_lr=1e-2, beta2=0.95, epsilon=1e-12)
    model = replace(miniature(32, 3, 512), exchange="sorted", capacity_factor=None, remat="block")
    sizes = {"num_steps": 10, "batch_size": 64, "sequence_length": model.sequence_length, "checkpoint_every": 0}
    return make_job(PretrainConfig(model=model, optimizer=rates, seed=0, **sizes), f"cpu:{DEVICES}")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def replicated_experts() -> Iterator[None]:
    """Every device has all experts."""
    from jax.sharding import PartitionSpec

    from noonsight.model import layout

    banks = ("expert_gate", "expert_up", "expert_down")
    with mock.patch.dict(layout.SPECS, dict.fromkeys(banks, PartitionSpec())):
        yield


@contextmanager
def lost_remat() -> Iterator[None]:
    """The scan over layers keeps everything, whatever the config says."""
    from noonsight.model import ready

    with mock.patch.object(ready, "_rematerialised", lambda step, remat: step):
        yield


@contextmanager
def whole_logits() -> Iterator[None]:
    """The loss makes the logits of all its tokens at once."""
    from noonsight.model import loss

    with mock.patch.object(loss, "CHUNK_TOKENS", 2_048):
        yield


PLANTS: dict[str, Callable[[], Any]] = {
    "replicated experts": replicated_experts,
    "lost remat": lost_remat,
    "whole logits": whole_logits,
}


def main(names: list[str]) -> None:
    """Those named, or all."""
    chosen = names or [*RUNS, "planted"]
    if unknown := set(chosen) - {*RUNS, "planted"}:
        raise SystemExit(f"no rehearsal {sorted(unknown)}; there are {', '.join(RUNS)}, planted")
    rows = [row for name in chosen for row in (planted() if name == "planted" else [rehearsal(name)])]
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")
    os.environ.setdefault("NOONSIGHT_KERNELS", "xla")
    main(sys.argv[1:])
