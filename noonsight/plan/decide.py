"""Skip, run or stop: what to do about one stage, from what its folder holds and what the plan says now.

    finished, and made from the same            -> skip
    finished, and made from something else      -> stop, naming what moved
    begun, resumable, made from something else  -> stop likewise: no result is made from two configs
    anything else                               -> run

Code that moved can be accepted: an event in the stage's folder says so, the result and its record stay as they are,
and its users go on being compared with the result that exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from noonsight.logbook import read, record
from noonsight.logbook.claim import claim
from noonsight.logbook.write import Writer
from noonsight.plan import fingerprint
from noonsight.plan.stage import Experiment, Stage

ACCEPTED = "code-accepted"
SMALL_BYTES = 1 << 16  # up to here a finished file is compared byte for byte before every run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do about one stage: skip it, run it as `run` says, or stop for `reasons`."""

    run: record.Run
    skip: bool
    reasons: tuple[str, ...] = ()

    @property
    def only_code(self) -> bool:
        """Whether code alone moved, so that a person may accept it."""
        return bool(self.reasons) and all(reason.startswith("code ") for reason in self.reasons)


class Plan:
    """An experiment whose configs and source closures were computed once; decisions are made as often as needed.

    Raises ValueError for a config that cannot be written down.
    """

    def __init__(self, experiment: Experiment, path: Path, folder: Path):
        self.experiment, self.folder, self.stages = experiment, folder, experiment.ordered()
        self._code = {each.address: fingerprint.source_closure(each.function, path) for each in self.stages}
        self._config = {each.address: fingerprint.canonical(each.config) for each in self.stages}

    def decide_all(self) -> dict[str, Decision]:
        """A decision for every stage by address, inputs before their users."""
        decisions: dict[str, Decision] = {}
        for stage in self.stages:
            decisions[stage.address] = self.decide(stage, decisions)
        return decisions

    def decide(self, stage: Stage, decisions: Mapping[str, Decision]) -> Decision:
        """The decision for `stage`, given those for its inputs."""
        out = self.folder / stage.address
        new, old = self._planned(stage, decisions), read.run(out)
        if old is None or (old.status != "done" and not stage.resumable):
            return Decision(run=new, skip=False)
        reasons = tuple(fingerprint.moved(old, new))
        if Decision(run=new, skip=False, reasons=reasons).only_code and _accepted(out, new.fingerprint):
            reasons = ()
            if old.status == "done":
                new = msgspec.structs.replace(new, fingerprint=old.fingerprint)
        if old.status == "done":
            reasons += tuple(_damaged(out, old))
        return Decision(run=new, skip=old.status == "done" and not reasons, reasons=reasons)

    def accept(self, stage: Stage, decision: Decision) -> str:
        """Record that the result of `stage` stays although its code moved; return the files in words."""
        assert decision.only_code
        files = ", ".join(reason.removeprefix("code ") for reason in decision.reasons)
        out = self.folder / stage.address
        with claim(out, "stage", wait_s=1.0) as mine:
            Writer(out, mine).event(
                ACCEPTED,
                f"The result is kept although its code moved: {files}.",
                data={"fingerprint": decision.run.fingerprint, "moved": list(decision.reasons)},
            )
        return files

    def _planned(self, stage: Stage, decisions: Mapping[str, Decision]) -> record.Run:
        inputs = {
            name: {"stage": given.address, "fingerprint": decisions[given.address].run.fingerprint}
            for name, given in stage.inputs.items()
        }
        frozen = read.prediction(self.folder / stage.inputs[stage.prediction].address) if stage.prediction else None
        run = record.Run(
            experiment=self.experiment.name,
            name=stage.name,
            version=stage.version,
            fingerprint="",
            function=f"{stage.function.__module__}:{stage.function.__qualname__}",
            status="waiting",
            sentence=stage.sentence,
            started_at=record.now(),
            config=self._config[stage.address],
            inputs=inputs,
            code=self._code[stage.address],
            placement=stage.placement,
            prediction_hash=frozen.hash if frozen else None,
        )
        return msgspec.structs.replace(run, fingerprint=fingerprint.fingerprint(run))


def _accepted(out: Path, wanted: str) -> bool:
    return any(event.kind == ACCEPTED and event.data.get("fingerprint") == wanted for event in read.events(out))


def _damaged(out: Path, run: record.Run) -> list[str]:
    """Files of a finished stage that are gone, have another size or, if small, other bytes.

    Predictions and verdicts are small, so an edited one stops here; `noon check logbook` compares the large ones too.
    """
    lines = []
    for name, file in run.files.items():
        try:
            size = (out / name).stat().st_size
            small = (out / name).read_bytes() if size <= SMALL_BYTES else None
        except OSError:
            lines.append(f"file {name} is gone")
            continue
        if size != file["bytes"]:
            lines.append(f"file {name}: {file['bytes']} bytes recorded, {size} found")
        elif small is not None and xxhash.xxh3_128_hexdigest(small) != file["xxh3"]:
            lines.append(f"file {name} is not what the stage wrote")
    return lines
