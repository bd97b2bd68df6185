"""Runs an experiment: one stage after another, each in a process of its own, from wherever the last run stopped.

Before anything starts, every finished stage is compared with what the experiment file says now (`decide.py`). Equal:
skipped. Different: nothing runs, and the config field, the input or the file that moved is named. So the folder of an
experiment never holds two stories, and the same command is always the right one to give.

The runner knows processes and folders; it knows nothing of learning or of pages (`after` is given by the caller).
"""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec

from noonsight.logbook import chain, read, record
from noonsight.logbook.claim import Held, claim
from noonsight.logbook.write import write_atomic
from noonsight.plan.child import run_worker
from noonsight.plan.decide import Decision, Plan
from noonsight.plan.screen import Screen, clip, duration
from noonsight.plan.stage import Experiment, Stage
from noonsight.plan.worker import Job, load_experiment_module

DONE, FAILED, WRONG_USE, MOVED, LOCKED, INTERRUPTED = 0, 1, 2, 3, 4, 130


class _Stopped(BaseException):
    """A signal asks the runner to stop."""


def load_experiment(path: Path) -> Experiment:
    """The `Experiment` that the file at `path` describes. Raises ValueError with the file's own line when it cannot."""
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        folder = path if path.is_dir() else path.parent
        near = sorted(str(each) for each in folder.glob("*.py") if each.is_file())
        hint = f"Files there: {', '.join(near[:8])}." if near else "Give the path of an experiment file."
        raise ValueError(f"no experiment file at {path}. {hint}")
    try:
        make = getattr(load_experiment_module(path), "experiment", None)
        found = make() if callable(make) else None
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.filename else str(path)
        raise ValueError(": ".join(filter(None, (where, error.msg, (error.text or "").strip())))) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(_own_line(path, error)) from None
    if not callable(make):
        raise ValueError(f"{path} defines no function experiment(); write one that returns the Experiment to run.")
    if not isinstance(found, Experiment):
        raise ValueError(f"experiment() in {path} returned {type(found).__name__}; it must return an Experiment.")
    return found


def run_experiment(
    path: Path,
    root: Path,
    *,
    experiment: Experiment | None = None,
    accept_code: bool = False,
    after: Callable[[Path], None] | None = None,
    screen: Screen | None = None,
) -> int:
    """Run what is not done of the experiment in file `path`, with results below `root`; return the exit code.

    `experiment` is one made from that file, in the place of what it describes. `after(root)` is called when stages ran, also after a failure. Raises ValueError for an experiment that cannot run
    (nothing was started), `Held` when another process runs it, `LogbookError` when the disk refuses.
    """
    screen = screen or Screen()
    experiment = experiment or load_experiment(path)
    folder = Path(root).absolute() / experiment.name
    plan = Plan(experiment, Path(path), folder)
    with claim(folder, "runner", wait_s=1.0), _signals():
        try:
            return _Voyage(plan, Path(path), screen).run(accept_code, after)
        except _Stopped:
            screen.say("stopped; the same command goes on from here.")
            return INTERRUPTED


class _Voyage:
    """One invocation of `run_experiment`, which holds the experiment's folder."""

    def __init__(self, plan: Plan, path: Path, screen: Screen):
        self.plan, self.path, self.screen = plan, path, screen
        self.folder, self.stages = plan.folder, plan.stages
        self.start, self.old = time.monotonic(), read.experiment(plan.folder)
        self.started_at = self.old.started_at if self.old else record.now()

    def run(self, accept_code: bool, after: Callable[[Path], None] | None) -> int:
        decisions = self.plan.decide_all()
        if accept_code:
            decisions = self._accept(decisions)
        if any(decision.reasons for decision in decisions.values()):
            return self._say_moved(decisions)
        done = {address for address, decision in decisions.items() if decision.skip}
        name = self.plan.experiment.name
        if len(done) == len(self.stages):
            self._write("done")
            if (ledger := self.folder.parent / "predictions.jsonl").exists():
                chain.verify(ledger)
            self.screen.say(f"{name}: all {len(self.stages)} stages are done already; nothing to run.")
            return self._end(DONE)
        self.screen.say(f"{name}: {len(self.stages)} stages, {len(done)} done (✓)")
        self.screen.graph(self.stages, done)
        self._write("running")
        try:
            code = self._run_stages()
            self._write("done" if code == DONE else "failed")
        except _Stopped:
            self._write("interrupted")
            raise
        except (ValueError, Held):
            self._write("failed")
            if after is not None:
                after(self.folder.parent)
            raise
        if after is not None:
            after(self.folder.parent)
        return self._end(code)

    def _accept(self, decisions: dict[str, Decision]) -> dict[str, Decision]:
        """Accept moved code stage by stage: accepting one settles the users that only saw its input move."""
        while True:
            stage = next((each for each in self.stages if decisions[each.address].only_code), None)
            if stage is None:
                return decisions
            files = self.plan.accept(stage, decisions[stage.address])
            self.screen.say(f"  {stage.address}  accepted: {files}")
            decisions = self.plan.decide_all()

    def _say_moved(self, decisions: dict[str, Decision]) -> int:
        moved = {address: decision.reasons for address, decision in decisions.items() if decision.reasons}
        inner = ("input ", "prediction: ")  # follow from a move further up
        causes = {
            address: reasons
            for address, reasons in moved.items()
            if any(not each.startswith(inner) for each in reasons)
        }
        self.screen.say("stopped: results here were made from something else than the experiment says now.")
        for address, reasons in list((causes or moved).items())[:12]:
            for reason in reasons[:5]:
                self.screen.say(f"  {address}  {reason}")
        if causes and (users := [address for address in moved if address not in causes]):
            self.screen.say(f"  and what was made from them: {', '.join(users)}")
        self.screen.say(
            f"Give such stages a new version, remove their folders below {_shown(self.folder)}, "
            "or give the experiment another name."
        )
        if any(reason.startswith("code ") for reasons in moved.values() for reason in reasons):
            self.screen.say("Where new code changes no result: --accept-code keeps the result and records that.")
        return MOVED

    def _run_stages(self) -> int:
        decisions: dict[str, Decision] = {}
        for index, stage in enumerate(self.stages, start=1):
            decision = decisions[stage.address] = self.plan.decide(stage, decisions)
            if decision.skip:
                continue
            if decision.reasons:
                return self._say_moved({stage.address: decision})
            if not self._run_stage(stage, decision.run, f"[{index:>2}/{len(self.stages)}] {stage.name}"):
                return FAILED
        return DONE

    def _run_stage(self, stage: Stage, run: record.Run, label: str) -> bool:
        out = self.folder / stage.address
        job = Job(
            run=msgspec.structs.replace(run, **self._gate(stage)),
            config_type=f"{type(stage.config).__module__}:{type(stage.config).__qualname__}",
            experiment_file=str(self.path.absolute()),
            inputs={name: str(self.folder / given.address) for name, given in stage.inputs.items()},
            resumable=stage.resumable,
        )
        with claim(out, "stage", wait_s=10.0):  # the process of a killed runner may still be dying
            write_atomic(out / "placement.json", record.encode(stage.placement))
            write_atomic(out / "stage.json", record.encode(job))
        began = time.monotonic()
        code = run_worker(out, self.folder.parent, stage.placement, self.screen, label)
        result = read.run(out)
        if code == 0 and result is not None and result.status == "done":
            last = read.last_progress(out)
            words = last.text if last is not None and last.phase == "done" and last.text else stage.sentence
            self.screen.say(clip(f"{label}  {duration(time.monotonic() - began)}  {words}"))
            return True
        self._write("failed")  # a full disk speaks up here, once, instead of as the riddle it was to the stage
        self.screen.say(f"{label} failed: {_why(out, result, code)}")
        return False

    def _gate(self, stage: Stage) -> dict[str, object]:
        """What the record of a predicted stage must hold. Raises ValueError unless its prediction is frozen."""
        if stage.prediction is None:
            return {}
        source = self.folder / stage.inputs[stage.prediction].address
        ledger = self.folder.parent / "predictions.jsonl"
        frozen, file = read.prediction(source), _shown(source / "prediction.json")
        rule = f"{stage.address} cannot start before its prediction is frozen."
        if frozen is None:
            raise ValueError(f"{rule} There is no {file}.")
        if frozen.hash != chain.content_hash(frozen):
            raise ValueError(f"{rule} {file} was changed after it was hashed.")
        if frozen.run != stage.address:
            raise ValueError(f"{rule} {file} is about {frozen.run}.")
        entries = chain.verify(ledger)
        if frozen.hash not in {entry.prediction for entry in entries}:
            raise ValueError(f"{rule} {_shown(ledger)} does not hold its hash {frozen.hash[:12]}.")
        return {"prediction_hash": frozen.hash, "chain_length": len(entries)}

    def _end(self, code: int) -> int:
        for stage in self.stages:
            verdict = read.verdict(self.folder / stage.address)
            if verdict is not None and code == DONE:
                self.screen.say(f"verdict: {verdict.sentence}")
        return code

    def _write(self, status: record.Status) -> None:
        """Write `experiment.json`; wall seconds add up over the invocations in which something ran."""
        stages = tuple(stage.address for stage in self.stages)
        if status == "done" and self.old and (self.old.status, self.old.stages) == ("done", stages):
            return
        before_s = self.old.seconds if self.old else 0.0
        edges = [(given.address, stage.address) for stage in self.stages for given in stage.inputs.values()]
        written = record.ExperimentRecord(
            name=self.plan.experiment.name,
            question=self.plan.experiment.question,
            file=os.path.relpath(self.path),
            started_at=self.started_at,
            ended_at=None if status == "running" else record.now(),
            status=status,
            stages=stages,
            edges=tuple(edges),
            expected=self.plan.experiment.expected,
            seconds=round(before_s + time.monotonic() - self.start, 3),
        )
        write_atomic(self.folder / "experiment.json", record.encode(written))


def _why(out: Path, result: record.Run | None, code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"its process was killed ({name}). The same command goes on from here."
    if result is not None and result.status == "failed":
        return f"{result.error}\n  Traceback: {_shown(out)}/error.txt. The same command tries again."
    with contextlib.suppress(OSError):
        if tail := (out / "stderr.txt").read_text(errors="replace").strip().splitlines()[-3:]:
            return "\n  ".join([*tail, f"All that it wrote: {_shown(out)}/stderr.txt"])
    return f"its process ended with code {code} and wrote nothing; see {_shown(out)}."


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP raises `_Stopped`; later ones are ignored while it cleans up."""
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        for kind in kinds:
            signal.signal(kind, signal.SIG_IGN)
        raise _Stopped

    before = {kind: signal.signal(kind, stop) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _own_line(path: Path, error: BaseException) -> str:
    """The experiment's own line that led to `error`, and what the error says."""
    said = f"{type(error).__name__}: {error}"
    here = path.resolve()
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).resolve() == here]
    if not frames:
        return f"{path}: {said}"
    number = frames[-1].lineno or 0
    linecache.checkcache(str(here))
    return f"{path}, line {number}: {linecache.getline(str(here), number).strip()}\n  {said}"
