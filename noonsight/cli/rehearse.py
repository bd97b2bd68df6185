"""The verb of the dress rehearsal: rehearse."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import cyclopts


def rehearse(
    file: Path,
    *,
    target: str,
    stage: str | None = None,
    rows: int | None = None,
    context: int = 1,
    what_if: Annotated[list[str], cyclopts.Parameter(consume_multiple=True)] = [],  # noqa: B006 (read only)
    price: float | None = None,
    json: bool = False,
) -> int:
    """Compile the train step of an experiment for accelerators one does not have, and say what would happen there.

    Nothing is executed and no data is read. Exit code 1 when the step does not fit or a mistake was found.

    Parameters
    ----------
    file
        A Python file that defines `experiment()`, such as experiments/hero.py.
    target
        The machine: gb200:11x16x4 (slices x hosts x devices), h100:2x8x8, v5p:8x8x16 (the torus), cpu:8 and so on.
    stage
        The training stage; without it, the one with most FLOPs.
    rows
        Sequences per device; without it, what a device has in the run, or on this target where that has more devices.
    context
        Devices that share one sequence.
    what_if
        Changes to compare in a table, FIELD=VALUE,VALUE: exchange, capacity, remat, rows (per device), layers.
    price
        Dollars for an hour of one device, instead of a list price.
    json
        Print JSON for scripts.
    """
    from noonsight.plan.runner import load_experiment
    from noonsight.recipe.rehearsing import job_of
    from noonsight.train.rehearse import report
    from noonsight.train.rehearse import what_if as sweeps

    changes = sweeps.combinations(what_if)
    job = job_of(load_experiment(file), target, stage=stage, rows_per_device=rows, context=context)
    if what_if:
        found = sweeps.sweep(job, changes, price=price)
        rows_told = [
            {"change": change} | (report.told(each) if not isinstance(each, str) else {"failed": each})
            for change, each in found
        ]
        print(json_format.dumps(rows_told, indent=1) if json else sweeps.table(found))
        return 0
    answer = report.rehearse(job, price=price)
    print(json_format.dumps(report.told(answer), indent=1) if json else report.page(answer))
    return 0 if answer.fits and not answer.mistakes else 1
