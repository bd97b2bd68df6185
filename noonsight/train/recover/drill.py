"""The drill: the same run twice, once undisturbed and once with random faults, and what of them can be told apart.

Faults are drawn from a seed, strike through real means (SIGKILL, SIGSTOP, a file that may not grow, a flipped bit) and are
placement, so both runs are one and the same *what*. A batch with a NaN is passed over by the run that meets it, which
changes numbers rightly: the undisturbed run is told to pass over the same steps.

    lost      = samples of the undisturbed run that the surviving line of the disturbed one never took
    repeated  = samples that its surviving line took and the undisturbed run did not
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Artifact, Event, Fault, FaultKind, encode
from noonsight.logbook.write import write_atomic
from noonsight.train.recover.faults import FAULTS
from noonsight.train.recover.symptoms import REPEATS, SYMPTOMS

KINDS: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind != "slow")
HANG_FLOOR_S = 3.0


@dataclass(frozen=True, kw_only=True)
class DrillConfig:
    """How two runs are compared."""

    batch_size: int
    """Samples of one step."""


def draw(
    num_faults: int,
    seed: int,
    *,
    num_steps: int,
    checkpoint_every: int,
    num_processes: int = 1,
    kinds: Sequence[FaultKind] = KINDS,
) -> tuple[Fault, ...]:
    """`num_faults` faults at steps of their own, every kind about equally often, in the order of their steps.

    None comes before two checkpoints are there, so that one can be damaged, and steps with a NaN lie apart: REPEATS bad
    batches in a row stop a run, and should. Raises ValueError when the run has too few steps for them.
    """
    chance = random.Random(seed)
    wanted = [kinds[index % len(kinds)] for index in range(num_faults)]
    chance.shuffle(wanted)
    steps = list(range(2 * checkpoint_every + 1, num_steps - 2))
    if len(steps) < 2 * num_faults:
        raise ValueError(
            f"{num_faults} faults need a run with more steps than {num_steps}: they strike between step "
            f"{2 * checkpoint_every} (two checkpoints) and the end, every second step at most. Ask for fewer faults, or "
            f"drill a run with at least {2 * checkpoint_every + 2 * num_faults + 3} steps"
        )
    places = sorted(chance.sample(steps[:: 1 if num_faults * REPEATS > len(steps) else REPEATS], num_faults))
    return tuple(
        Fault(
            kind=kind,
            at_step=step,
            rank=chance.randrange(num_processes) if kind in ("kill", "freeze") else 0,
            seconds={"clock": chance.choice((-3600.0, 3600.0)), "torn-save": chance.random() * 0.03}.get(kind, 0.0),
        )
        for kind, step in zip(wanted, places)
    )


def judge(config: DrillConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: hold the run `disturbed` against the run `undisturbed`. Facts are those of `compare`; raises AssertionError
    with them when anything was lost, repeated or changed, or a fault was not recovered from.
    """
    with claim(out, "stage"):
        facts = compare(inputs["undisturbed"], inputs["disturbed"], config.batch_size)
        write_atomic(out / "drill.json", encode(facts))
        (out / "tables").mkdir(exist_ok=True)
        write_atomic(out / "tables" / "drill.json", encode(_table(facts)))
    if wrong := problems(facts):
        raise AssertionError(f"the drill failed: {'; '.join(wrong)}. Everything is in {out / 'drill.json'}")
    return Artifact(facts=facts)


def compare(undisturbed: Path, disturbed: Path, batch_size: int) -> dict[str, Any]:
    """What can be told apart: `faults`, `by_kind`, `recovered`, `lost_samples`, `repeated_samples`,
    `final_weights_identical`, `loss_sequence_identical`, `median_restart_s`, `median_regain_s`, `false_alarms`.
    """
    calm, storm = read.run(undisturbed), read.run(disturbed)
    struck = read.lines(disturbed / FAULTS)
    series = {name: read.metrics(out) for name, out in (("calm", undisturbed), ("storm", disturbed))}
    digests = {name: Counter(lines["batch_digest"].values) for name, lines in series.items()}
    losses = {name: (lines["loss"].steps, lines["loss"].values) for name, lines in series.items()}
    events = read.events(disturbed)
    finished = storm is not None and calm is not None and "params_hash" in storm.facts and "params_hash" in calm.facts
    restarts = [event for event in events if event.kind == "restart" and event.data.get("symptom") == "killed"]
    to_first = [event.data["to_first_step_s"] for event in restarts if event.data.get("to_first_step_s")]
    return {
        "faults": len(struck),
        "by_kind": dict(sorted(Counter(line["kind"] for line in struck).items())),
        "recovered": len(struck) if finished else sum(_is_behind(line, series["storm"]) for line in struck),
        "lost_samples": batch_size * (digests["calm"] - digests["storm"]).total(),
        "repeated_samples": batch_size * (digests["storm"] - digests["calm"]).total(),
        "final_weights_identical": finished and calm.facts["params_hash"] == storm.facts["params_hash"],
        "loss_sequence_identical": losses["calm"] == losses["storm"],
        "median_restart_s": round(statistics.median(to_first), 3) if to_first else None,
        "median_regain_s": round(statistics.median(event.seconds_lost or 0.0 for event in restarts), 3)
        if restarts
        else None,
        "num_restarts": sum(event.kind == "restart" for event in events),
        "skipped_steps": list(storm.facts.get("skipped_steps", [])) if storm else [],
        "seconds_lost": round(sum(event.seconds_lost or 0.0 for event in events), 3),
        "false_alarms": _false_alarms(read.events(undisturbed), events),
    }


def problems(facts: Mapping[str, Any]) -> list[str]:
    """What in the facts of a drill must not be, one sentence each."""
    found = []
    if facts["recovered"] != facts["faults"]:
        found.append(f"{facts['faults'] - facts['recovered']} of {facts['faults']} faults were not recovered from")
    for name in ("lost_samples", "repeated_samples", "false_alarms"):
        if facts[name]:
            found.append(f"{facts[name]} {name.replace('_', ' ')}")
    for name in ("final_weights_identical", "loss_sequence_identical"):
        if not facts[name]:
            found.append(f"{name.removesuffix('_identical').replace('_', ' ')} not identical")
    return found


def _is_behind(line: dict[str, Any], series: Mapping[str, read.Series]) -> bool:
    return bool(series["loss"].steps) and series["loss"].steps[-1] > line["at_step"]


def _false_alarms(calm: Sequence[Event], storm: Sequence[Event]) -> int:
    """Endings of workers and alarms of sentinels that no fault explains."""
    told = {(event.cause, event.step) for event in calm if event.kind == "sentinel"}
    alarms = sum(event.kind in SYMPTOMS and event.cause != "injected" for event in (*calm, *storm))
    return alarms + sum(event.kind == "sentinel" and (event.cause, event.step) not in told for event in storm)


def _table(facts: Mapping[str, Any]) -> dict[str, Any]:
    rows = [[name.replace("_", " "), str(value)] for name, value in facts.items() if name != "by_kind"]
    rows += [[f"faults: {kind}", str(count)] for kind, count in facts["by_kind"].items()]
    text = "The same run twice, undisturbed and with faults on purpose; nothing may differ but the time."
    return {"title": "Drill", "columns": ["what", "value"], "rows": rows, "text": text}
