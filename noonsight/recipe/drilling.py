"""A drill made from any training stage: the run undisturbed, the run under faults, and the judgement, as three stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from noonsight.logbook.record import FaultKind
from noonsight.plan.screen import Screen
from noonsight.plan.stage import Experiment, Stage
from noonsight.train.recover import drill


def stages(run: Stage, num_faults: int, seed: int, only: tuple[FaultKind, ...] = ()) -> tuple[Stage, Stage, Stage]:
    """(undisturbed, disturbed, judgement) of the training stage `run` with `num_faults` faults drawn from `seed`, of the
    kinds `only` where some are given.

    Raises ValueError when the run has too few steps or checkpoints.
    """
    config = run.config
    if not config.checkpoint_every:
        raise ValueError(f"{run.address} keeps no checkpoints, so nothing could be recovered: give it checkpoint_every")
    faults = drill.draw(
        num_faults,
        seed,
        num_steps=config.num_steps,
        checkpoint_every=config.checkpoint_every,
        num_processes=run.placement.num_processes,
        kinds=only or drill.KINDS,
    )
    bad = tuple(fault.at_step for fault in faults if fault.kind == "nan")
    inputs = {name: given for name, given in run.inputs.items() if name != run.prediction}
    calm_place = msgspec.structs.replace(
        run.placement, faults=(), record_batches=True, hang_floor_s=drill.HANG_FLOOR_S, grace_s=10.0
    )
    made = {"inputs": inputs, "prediction": None}
    calm = replace(
        run,
        name="undisturbed",
        config=replace(config, skip_steps=(*config.skip_steps, *bad)),
        sentence="The run as it is when nothing happens.",
        placement=calm_place,
        **made,
    )
    storm = replace(
        run,
        name="disturbed",
        sentence=f"The same run with {len(faults)} faults on purpose.",
        placement=msgspec.structs.replace(calm_place, faults=faults),
        **made,
    )
    verdict = Stage(
        name="drill",
        version=run.version,
        function=drill.judge,
        config=drill.DrillConfig(batch_size=config.batch_size),
        inputs={"undisturbed": calm, "disturbed": storm},
        sentence="Nothing may be lost, repeated or changed.",
    )
    return calm, storm, verdict


def experiment(
    source: Experiment, run: Stage, num_faults: int, seed: int, only: tuple[FaultKind, ...] = ()
) -> Experiment:
    """The drill of one training stage of `source`, with what that stage needs, as an experiment of its own."""
    return Experiment(
        name="-".join((source.name, run.name, "drill", str(num_faults), str(seed), *only)),
        question=f"Does {run.name} come through {num_faults} faults as if nothing had happened?",
        expected="Nothing lost, nothing repeated, the same weights bit for bit.",
        stages=stages(run, num_faults, seed, only),
    )


def run_drill(
    path: Path, root: Path, made: Experiment, *, screen: Screen, after: Callable[[Path], None] | None = None
) -> int:
    """Run the drill to its end; a supervisor that a fault has killed is started again, as whoever runs a fleet would.

    Returns the exit code of the last invocation.
    """
    from noonsight.logbook import read
    from noonsight.plan.runner import FAILED, run_experiment
    from noonsight.train.recover.faults import num_struck

    out = Path(root).absolute() / made.name / made.ordered()[-2].address
    while True:
        struck = num_struck(out)
        code = run_experiment(path, root, experiment=made, after=after, screen=screen)
        record = read.run(out)
        lost = record is not None and record.status == "interrupted"
        if code != FAILED or not lost or num_struck(out) == struck:
            return code
