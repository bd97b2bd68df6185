"""The supervisor: starts the workers, reads their heartbeats, and does what the table says when one ends.

What can be repaired by starting again from the last checkpoint is restarted, a batch that brings the run down is passed
over, a storage that takes no writes is waited for, and what would only happen again is stopped with a sentence. Every
action is an Event with its cause, the steps and the seconds it cost. JAX is not imported here: the supervisor needs none.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from noonsight.logbook import read
from noonsight.logbook.record import Artifact, Event, Placement
from noonsight.logbook.write import LogbookError, Writer
from noonsight.train.recover import skips
from noonsight.train.recover.faults import num_struck
from noonsight.train.recover.gang import Gang, start
from noonsight.train.recover.pause import tell, wait_for_storage
from noonsight.train.recover.symptoms import REPEATS, SYMPTOMS, RunStopped, symptom_of
from noonsight.train.recover.watch import Outage, Watch, watch

POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one attempt ended."""

    symptom: str
    step: int  # completed steps
    injected: bool  # a fault on purpose did it
    words: str  # the end of its log
    exit_code: int | None
    phase: str
    fence: int  # of its worker


def supervise(command: Sequence[str], out: Path, *, writer: Writer) -> dict[str, Any]:
    """Run `command + [out]` until it has finished its work, restarting it as the table says, and return its facts.

    The placement of `out` is read before every start: who changes it between two gives the run other devices. Adds
    `kills`, `restarts`, `skipped_steps`, `seconds_lost` and `resumed_bit_identical` to what the worker returned. Raises
    RunStopped with the symptom, the step and the end of the worker's log. When this process is interrupted the workers
    are asked to save, and then ended; SIGUSR1 (a scheduler's notice) is passed on to them and makes them save at once.
    """
    (out / "result.json").unlink(missing_ok=True)
    endings: list[Ending] = []
    outage = _outage_before(out)
    with _signals() as notice:
        while True:
            placement = read.placement(out)
            struck = num_struck(out)
            gang, seen = start(command, out, placement), watch(out, placement.num_processes)
            try:
                symptom, outage = _attend(gang, seen, out, writer, placement, outage, notice)
            except BaseException:
                gang.end(placement.grace_s)
                raise
            if symptom == "done":
                break
            step = seen.step if seen.step is not None else (outage.step if outage else 0)
            ending = _ending(symptom, step, gang, seen, out, injected=num_struck(out) > struck)
            endings.append(ending)
            outage = outage or Outage(since=seen.seen_at, cause=_cause(ending), symptom=symptom, step=step)
            _act(endings, out, writer, placement)
    return _facts(out)


def resumed_bit_identical(out: Path) -> bool | None:
    """Whether every step that ran more than once gave the same loss bits and the same parameter hash each time.

    None when nothing ran twice and no kill was injected; False also when something did but no hash can be compared.
    Steps at or after one that was passed over later are another line of the run and not compared.
    """
    end = min(skips.skips(out), default=sys.maxsize)
    losses: dict[int, set[float]] = {}
    counts: dict[int, int] = {}
    series = read.metrics(out, attempts="all").get("loss")
    for step, value in zip(series.steps, series.values) if series else ():
        if step < end:
            losses.setdefault(step, set()).add(value)
            counts[step] = counts.get(step, 0) + 1
    hashes: dict[int, dict[int, str]] = {}
    events = read.events(out)
    for event in events:
        if event.kind == "params-hash" and event.step is not None and event.step <= end:
            hashes.setdefault(event.step, {})[event.attempt] = event.data["hash"]
    replayed = [step for step, count in counts.items() if count > 1]
    rehashed = [step for step, by_attempt in hashes.items() if len(by_attempt) > 1]
    if not any(event.kind == "kill-injected" for event in events) and not replayed:
        return None
    same = all(len(losses[step]) == 1 for step in replayed) and all(
        len(set(hashes[step].values())) == 1 for step in rehashed
    )
    return same and bool(replayed) and bool(rehashed)


def _attend(
    gang: Gang,
    seen: Watch,
    out: Path,
    writer: Writer,
    placement: Placement,
    outage: Outage | None,
    notice: threading.Event,
) -> tuple[str, Outage | None]:
    """Wait for the gang's end: its symptom (or "done"), and the outage if the lost ground was not regained."""
    oom_kills = _num_oom_kills()
    while True:
        code = gang.poll()
        seen.look(outage)
        if outage and (code == 0 or seen.regained_at is not None):
            _report_restart(seen, outage, writer)
            outage = None
        if code is not None:
            symptom = symptom_of(code)
            return "out-of-memory" if symptom == "killed" and _num_oom_kills() > oom_kills else symptom, outage
        for rank, own_s, others_s in seen.stragglers():
            text = f"Rank {rank} holds the others up: its own work takes {own_s:.3f} s a step, theirs {others_s:.3f} s."
            writer.event("straggler", text, cause="straggler", step=seen.step, data={"rank": rank, "own_s": own_s})
        if seen.is_silent(placement):
            gang.capture_stacks()
            gang.kill()
            return "hang", outage
        if notice.is_set():
            notice.clear()
            gang.ask(signal.SIGUSR1)
        time.sleep(POLL_S)


def _ending(symptom: str, step: int, gang: Gang, seen: Watch, out: Path, *, injected: bool) -> Ending:
    fence = int((out / "worker.fence").read_bytes()) if (out / "worker.fence").exists() else 0
    code = gang.ranks[gang.ended or 0].returncode
    words = gang.last_words()
    return Ending(
        symptom=symptom, step=step, injected=injected, words=words, exit_code=code, phase=seen.phase, fence=fence
    )


def _act(endings: list[Ending], out: Path, writer: Writer, placement: Placement) -> None:
    """Do what the table says of the last ending; to start again is what the caller does then. Raises RunStopped."""
    ending = endings[-1]
    symptom = SYMPTOMS[ending.symptom]
    report = Event(
        at="",
        kind=ending.symptom,
        text=f"{symptom.text} (phase {ending.phase}, {ending.step} steps done).",
        cause=_cause(ending),
        step=ending.step,
        data={
            "exit_code": ending.exit_code,
            "phase": ending.phase,
            "log": ending.words,
            "attempt": ending.fence,
            "injected": ending.injected,
        },
    )
    if symptom.action == "pause":
        waited_s, reason = wait_for_storage(out, placement)
        _write(report, writer)
        text = f"The run waited {waited_s:.1f} s until the storage took writes again ({reason})."
        writer.event("paused", text, cause=_cause(ending), step=ending.step, seconds_lost=round(waited_s, 3))
    else:
        _write(report, writer)
    if symptom.action == "stop":
        _stop(ending, out, writer, "")
    last = [(each.symptom, each.step) for each in endings[-REPEATS:]]
    if symptom.action == "skip":
        _skip(ending, out, writer)
    elif len(last) == REPEATS and len(set(last)) == 1:
        _stop(ending, out, writer, f", {REPEATS} times in a row without progress")


def _skip(ending: Ending, out: Path, writer: Writer) -> None:
    """Pass over the batches that the worker named before it ended. Raises RunStopped when that does not help any more."""
    found = [event for event in read.events(out) if event.kind == "bad-steps" and event.attempt == ending.fence]
    if not found:
        _stop(ending, out, writer, ", and the worker did not say which batch it was")
    bad, before = found[-1].data["steps"], skips.skips(out)
    if len(before) + len(bad) > skips.MOST:
        _stop(ending, out, writer, f", and {len(before)} batches have been passed over already")
    if all(step in before for step in range(bad[0] - REPEATS + 1, bad[0])):
        why = f": this is the batch after {REPEATS - 1} that were passed over, so it is not the data"
        _stop(ending, out, writer, why)
    skips.add(out, bad, fence=ending.fence, cause=_cause(ending))
    which = f"step {bad[0]}" if len(bad) == 1 else f"steps {bad[0]} to {bad[-1]}"
    text = f"The batch of {which} is passed over: {SYMPTOMS[ending.symptom].text.lower()} there."
    writer.event("skipped", text, cause=_cause(ending), step=bad[0], data={"steps": bad})


def _stop(ending: Ending, out: Path, writer: Writer, more: str) -> None:
    why = f"{SYMPTOMS[ending.symptom].text} after {ending.step} steps{more}"
    last = f" Its last words: {ending.words.splitlines()[-1]}" if ending.words else ""
    text = f"{why}; training stops.{last}"
    writer.event("stop", text, cause=ending.symptom, step=ending.step)
    raise RunStopped(f"{text} The whole log is {out / 'worker.log'}.")


def _write(event: Event, writer: Writer) -> None:
    """A report that cannot be written must not end what it reports on: it goes to the terminal."""
    try:
        writer.event(
            event.kind, event.text, cause=event.cause, step=event.step, data={**event.data, "told_at": time.monotonic()}
        )
    except LogbookError as error:
        tell(f"{event.text} It cannot be written down: {error}")


def _cause(ending: Ending) -> str:
    return "injected" if ending.injected else ending.symptom


def _num_oom_kills() -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _outage_before(out: Path) -> Outage | None:
    """What a supervisor finds that starts over an unfinished run: the one before it was lost, with its worker."""
    last = read.last_progress(out)
    if last is None or last.phase in ("start", "done"):
        return None
    return Outage(since=time.monotonic(), cause="supervisor-lost", symptom="supervisor-lost", step=last.step)


def _report_restart(seen: Watch, outage: Outage, writer: Writer) -> None:
    resumed_at = outage.step if seen.resumed_at is None else seen.resumed_at
    lost, lost_s = max(outage.step - resumed_at, 0), max((seen.regained_at or seen.seen_at) - outage.since, 0.0)
    writer.event(
        "restart",
        f"Started again from step {resumed_at}: {lost} steps done twice, {lost_s:.1f} s lost ({outage.cause}).",
        cause=outage.cause,
        step=outage.step,
        steps_lost=lost,
        seconds_lost=round(lost_s, 3),
        data={
            "symptom": outage.symptom,
            "resumed_at": resumed_at,
            "to_first_step_s": seen.first_step_at and round(seen.first_step_at - outage.since, 3),
        },
    )


def _facts(out: Path) -> dict[str, Any]:
    facts = msgspec.json.decode((out / "result.json").read_bytes(), type=Artifact).facts
    events = read.events(out)
    return facts | {
        "kills": sum(event.kind == "kill-injected" for event in events),
        "restarts": sum(event.kind == "restart" for event in events),
        "skipped_steps": sorted(skips.skips(out)),
        "seconds_lost": round(sum(event.seconds_lost or 0.0 for event in events), 3),
        "resumed_bit_identical": resumed_bit_identical(out),
    }


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """SIGTERM and SIGHUP leave by an exception, so that the worker is ended in order; SIGUSR1 sets the event. Someone
    else's handlers are respected, and nothing is touched outside the main thread.
    """
    notice = threading.Event()

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    wanted: dict[signal.Signals, Callable[..., None]] = {
        signal.SIGTERM: leave,
        signal.SIGHUP: leave,
        signal.SIGUSR1: lambda *_: notice.set(),
    }
    main = threading.current_thread() is threading.main_thread()
    ours = {number for number in wanted if main and signal.getsignal(number) is signal.SIG_DFL}
    for number in ours:
        signal.signal(number, wanted[number])
    try:
        yield notice
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
