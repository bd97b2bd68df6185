"""The verb of the fire drill: drill."""

from __future__ import annotations

import io
import json as json_format
from pathlib import Path
from typing import Annotated

import cyclopts

from noonsight.cli.plan import VOYAGES, render
from noonsight.logbook.record import FaultKind


def drill(
    file: Path,
    *,
    kills: int = 20,
    seed: int = 0,
    stage: str | None = None,
    only: Annotated[list[FaultKind], cyclopts.Parameter(consume_multiple=True)] = [],  # noqa: B006 (read only)
    root: Path = VOYAGES,
    json: bool = False,
) -> int:
    """Run the training of an experiment twice, undisturbed and with faults on purpose, and compare the two.

    Faults: killed workers, ranks and supervisors, a frozen worker, a request to end, a torn save, a damaged checkpoint,
    a full disk, a NaN, a clock that jumps. Exit code 1 when anything was lost, repeated or changed.

    Parameters
    ----------
    file
        A Python file that defines `experiment()`, such as experiments/drill.py.
    kills
        How many faults.
    seed
        Of the choice of faults and steps.
    stage
        The training stage; without it, the one with most FLOPs.
    only
        Kinds of faults, such as kill and freeze; without it, all that the run can meet.
    root
        Where results live.
    json
        Print JSON for scripts.
    """
    from noonsight.logbook import read
    from noonsight.plan.runner import load_experiment
    from noonsight.plan.screen import Screen
    from noonsight.recipe import drilling
    from noonsight.recipe.rehearsing import training_stage

    source = load_experiment(file)
    made = drilling.experiment(source, training_stage(source, stage), kills, seed, tuple(only))
    screen = Screen(io.StringIO()) if json else Screen()
    code = drilling.run_drill(file, root, made, screen=screen, after=None if json else render)
    out = root / made.name / made.ordered()[-1].address
    if not (out / "drill.json").is_file():
        if json:
            print(screen.stream.getvalue())
        return code or 1
    facts = json_format.loads((out / "drill.json").read_bytes())
    if json:
        print(json_format.dumps(facts, indent=1))
    else:
        for name, value in facts.items():
            print(f"  {name.replace('_', ' '):26} {value}")
        print(f"pages: {root / 'site' / 'index.html'}")
    record = read.run(out)
    return 0 if record is not None and record.status == "done" else 1
