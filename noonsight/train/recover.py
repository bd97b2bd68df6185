"""Supervisor and worker: two processes, one table from symptom to action.

The supervisor starts the worker, reads its heartbeats and decides what its end means. The worker owns the folder's
`worker` claim, dies with its parent, and says by its exit code why it gave up. What can be repaired by starting again
from the last checkpoint is restarted; what would only happen again is stopped with a sentence. Every action is an
Event with its cause, the steps and the seconds it cost. JAX is not imported here: the supervisor needs none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from noonsight.logbook import read
from noonsight.logbook.claim import Claim, Fenced, Held, claim
from noonsight.logbook.record import Artifact, Placement, Progress, encode, now
from noonsight.logbook.write import Writer, append_line, write_atomic

POLL_S = 0.05
GRACE_S = 30.0  # a worker that was asked to end may finish its step and save
PATIENCE_S = {"start": 900.0, "compile": 3600.0, "evaluate": 1800.0, "save": 1800.0, "done": 900.0}
"""How long a phase may show no sign of life; `run` is judged by its own speed instead. A slow restore or a cold
compilation is no hang.
"""

PARENT, FAULTS, PROGRESS = "NOONSIGHT_PARENT", "faults.jsonl", "progress.jsonl"


class Interrupted(BaseException):
    """The process was asked to end."""

    symptom = "interrupted"


class RunStopped(RuntimeError):
    """Training ended for a reason that starting again would only repeat."""


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """One line of the table: how a worker ends, what is done, what a reader is told."""

    action: Literal["restart", "stop"]
    text: str
    exit_code: int | None = None  # the worker's way of saying it; None: seen from outside


SYMPTOMS: dict[str, Symptom] = {
    "killed": Symptom(action="restart", text="The worker was killed from outside"),
    "crash": Symptom(action="restart", text="The worker crashed"),
    "hang": Symptom(action="restart", text="The worker showed no sign of life and was killed"),
    "out-of-memory": Symptom(action="restart", text="The worker ran out of memory", exit_code=71),
    "interrupted": Symptom(action="restart", text="The worker was asked to end and saved its state", exit_code=75),
    "non-finite": Symptom(
        action="stop", text="The loss is not finite, and the same batch would give it again", exit_code=65
    ),
    "dropped": Symptom(action="stop", text="The placement's exchange dropped what the config's does not", exit_code=67),
    "no-checkpoint": Symptom(action="stop", text="Checkpoints exist but none can be trusted", exit_code=66),
    "disk-full": Symptom(action="stop", text="The disk is full; the last checkpoint is kept", exit_code=74),
    "fenced": Symptom(action="stop", text="Another process owns the folder", exit_code=77),
}
REPEATS = 3
"""The same symptom at the same step this many times in a row: starting again does not help."""


@dataclass(kw_only=True)
class _Watched:
    """A worker and what the supervisor has seen of it."""

    process: subprocess.Popen[bytes]
    log_start: int  # where in the log its own words begin
    num_faults: int  # injected before its time
    beats_read: int  # bytes of the heartbeats already taken in
    seen_at: float = field(default_factory=time.monotonic)
    phase: str = "start"
    step: int | None = None  # completed steps, once it is known where the worker resumed
    resumed_at: int | None = None
    first_step_at: float | None = None
    regained_at: float | None = None  # when it was as far as the one before it
    median_step_s: float = 0.0


@dataclass(kw_only=True)
class _Outage:
    """From the last sign of life of a dead worker until a new one is where the dead one was."""

    since: float
    cause: str
    step: int


def supervise(command: Sequence[str], out: Path, *, writer: Writer, placement: Placement) -> dict[str, Any]:
    """Run `command + [out]` until it has finished its work, restarting it as the table says, and return its facts.

    Adds `kills`, `restarts`, `seconds_lost` and `resumed_bit_identical` to what the worker returned. Raises
    RunStopped with the symptom, the step and the end of the worker's log. When this process is interrupted the worker
    is asked to save, and then ended.
    """
    (out / "result.json").unlink(missing_ok=True)
    endings: list[tuple[str, int]] = []
    outage = _outage_before(out)
    with _terminate_as_exit():
        while True:
            worker = _start(command, out, placement)
            try:
                symptom, outage = _watch(worker, out, writer, placement, outage)
            except BaseException:
                _end(worker.process)
                raise
            if symptom == "done":
                break
            step = worker.step if worker.step is not None else (outage.step if outage else 0)
            endings.append((symptom, step))
            outage = _report_ending(symptom, step, worker, outage, out, writer)
            _stop_if_hopeless(endings, worker, out, writer)
    facts = msgspec.json.decode((out / "result.json").read_bytes(), type=Artifact).facts
    events = read.events(out)
    return facts | {
        "kills": sum(event.kind == "kill-injected" for event in events),
        "restarts": sum(event.kind == "restart" for event in events),
        "seconds_lost": round(sum(event.seconds_lost or 0.0 for event in events), 3),
        "resumed_bit_identical": resumed_bit_identical(out),
    }


def resumed_bit_identical(out: Path) -> bool | None:
    """Whether every step that ran more than once gave the same loss bits and the same parameter hash each time.

    None when nothing ran twice and no kill was injected; False also when something did but no hash can be compared.
    """
    losses: dict[int, set[float]] = {}
    counts: dict[int, int] = {}
    series = read.metrics(out, attempts="all").get("loss")
    for step, value in zip(series.steps, series.values) if series else ():
        losses.setdefault(step, set()).add(value)
        counts[step] = counts.get(step, 0) + 1
    hashes: dict[int, dict[int, str]] = {}
    events = read.events(out)
    for event in events:
        if event.kind == "params-hash" and event.step is not None:
            hashes.setdefault(event.step, {})[event.attempt] = event.data["hash"]
    replayed = [step for step, count in counts.items() if count > 1]
    rehashed = [step for step, by_attempt in hashes.items() if len(by_attempt) > 1]
    if not any(event.kind == "kill-injected" for event in events) and not replayed:
        return None
    same = all(len(losses[step]) == 1 for step in replayed) and all(
        len(set(hashes[step].values())) == 1 for step in rehashed
    )
    return same and bool(replayed) and bool(rehashed)


# The worker's side


def work(body: Callable[[Path, Claim, Placement], Artifact], out: Path) -> NoReturn:
    """Be a worker: die with the parent, own `out`, run `body(out, claim, placement)`, exit with a code of the table.

    What `body` returns becomes `result.json`, which the supervisor reads. The exit is abrupt once that is on the disk:
    a stuck thread of a library must keep neither a failed worker alive nor a finished one.
    """
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    try:
        with claim(out, "worker", wait_s=10.0) as owned:
            artifact = body(out, owned, read.placement(out))
            owned.check()
            write_atomic(out / "result.json", encode(artifact))
    except BaseException as error:
        traceback.print_exc()
        code = exit_code(error)
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code(error: BaseException) -> int:
    """How a worker says what ended it: by the error's own `symptom`, or its kind; 1 for what the table does not know."""
    symptom = getattr(error, "symptom", None)
    if isinstance(error, (Fenced, Held)):
        symptom = "fenced"
    elif isinstance(error, KeyboardInterrupt):
        symptom = "interrupted"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        symptom = "disk-full"
    elif isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        symptom = "out-of-memory"
    return (SYMPTOMS[symptom].exit_code if symptom else None) or 1


def die_with_parent() -> None:
    """End this process when its parent ends, however that happens.

    The kernel does it on Linux; elsewhere a thread looks once a second.
    """
    expected = int(os.environ.get(PARENT) or os.getppid())
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == expected:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != expected:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=look, name="parent-watch", daemon=True).start()


class Faults:
    """The faults a placement asks for, each once in the life of a folder: remembered on disk before it strikes."""

    def __init__(self, placement: Placement, out: Path, writer: Writer) -> None:
        self._faults, self._writer, self._file = placement.faults, writer, out / FAULTS
        self._struck = {(line["kind"], line["at_step"]) for line in read.lines(self._file)}

    def planned(self, step: int) -> bool:
        """Whether a fault belongs to this step, in any attempt: its parameters are hashed each time, to be compared."""
        return any(fault.at_step == step for fault in self._faults)

    def strike(self, step: int) -> None:
        """Kill this process if a fault of this step has not struck yet."""
        for fault in self._faults:
            if fault.at_step == step and (fault.kind, step) not in self._struck:
                append_line(self._file, encode({"kind": fault.kind, "at_step": step, "at": now()}))
                self._writer.event(
                    "kill-injected",
                    f"The worker kills itself after step {step}, as the placement asks.",
                    cause="injected",
                    step=step,
                )
                os.kill(os.getpid(), signal.SIGKILL)


# The supervisor's side


def _start(command: Sequence[str], out: Path, placement: Placement) -> _Watched:
    environment = os.environ | placement.environment | {PARENT: str(os.getpid())}
    progress = out / PROGRESS
    beats = progress.read_bytes().rfind(b"\n") + 1 if progress.exists() else 0
    with (out / "worker.log").open("ab") as log:
        log_start = log.seek(0, os.SEEK_END)
        # A session of its own: Ctrl-C reaches the supervisor alone, which then asks the worker to save.
        process = subprocess.Popen(
            [*command, str(out)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    return _Watched(
        process=process,
        log_start=log_start,
        num_faults=len(read.lines(out / FAULTS)),
        beats_read=beats,
    )


def _watch(
    worker: _Watched, out: Path, writer: Writer, placement: Placement, outage: _Outage | None
) -> tuple[str, _Outage | None]:
    """Wait for the worker's end: its symptom (or "done"), and the outage if the lost ground was not regained."""
    oom_kills = _num_oom_kills()
    while True:
        code = worker.process.poll()
        _observe(worker, out, outage)
        if outage and (code == 0 or worker.regained_at is not None):
            _report_restart(worker, outage, writer)
            outage = None
        if code is not None:
            return _symptom_of(code, oom_kills), outage
        if time.monotonic() - worker.seen_at > _patience(worker, placement):
            _capture_stacks(worker.process, out)
            worker.process.kill()
            worker.process.wait()
            return "hang", outage
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=POLL_S)


def _observe(worker: _Watched, out: Path, outage: _Outage | None) -> None:
    """Take in every heartbeat since the last look: a fast worker makes many steps between two."""
    for beat in _new_beats(worker, out):
        worker.seen_at, worker.phase = time.monotonic(), beat.phase
        worker.median_step_s = 1 / beat.rate if beat.rate else worker.median_step_s
        if beat.phase == "start":
            continue
        if worker.resumed_at is None:
            worker.resumed_at = beat.step
        worker.step = beat.step
        if beat.step > worker.resumed_at:
            worker.first_step_at = worker.first_step_at or beat.monotonic
            if outage and beat.step >= outage.step:
                worker.regained_at = worker.regained_at or beat.monotonic


def _new_beats(worker: _Watched, out: Path) -> list[Progress]:
    with contextlib.suppress(FileNotFoundError), (out / PROGRESS).open("rb") as file:
        file.seek(worker.beats_read)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        worker.beats_read += len(whole)
        beats = []
        for line in whole.splitlines():
            with contextlib.suppress(msgspec.MsgspecError):  # a damaged heartbeat is no reason to lose the worker
                beats.append(msgspec.json.decode(line, type=Progress, strict=False))
        return beats
    return []


def _patience(worker: _Watched, placement: Placement) -> float:
    if worker.phase == "run":
        return max(placement.hang_floor_s, 5 * worker.median_step_s)
    return max(placement.hang_floor_s, PATIENCE_S[worker.phase])


def _symptom_of(code: int, oom_kills_before: int) -> str:
    if code == 0:
        return "done"
    if code == -signal.SIGKILL:
        return "out-of-memory" if _num_oom_kills() > oom_kills_before else "killed"
    return next((name for name, symptom in SYMPTOMS.items() if symptom.exit_code == code), "crash")


def _num_oom_kills() -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _outage_before(out: Path) -> _Outage | None:
    """What a supervisor finds that starts over an unfinished run: the one before it was lost, with its worker."""
    last = read.last_progress(out)
    if last is None or last.phase in ("start", "done"):
        return None
    return _Outage(since=time.monotonic(), cause="supervisor-lost", step=last.step)


def _report_ending(
    symptom: str, step: int, worker: _Watched, outage: _Outage | None, out: Path, writer: Writer
) -> _Outage:
    injected = symptom == "killed" and len(read.lines(out / FAULTS)) > worker.num_faults
    cause = "injected" if injected else symptom
    writer.event(
        symptom,
        f"{SYMPTOMS[symptom].text} (phase {worker.phase}, {step} steps done).",
        cause=cause,
        step=step,
        data={"exit_code": worker.process.returncode, "phase": worker.phase, "log": _log_of(worker, out)},
    )
    return outage or _Outage(since=worker.seen_at, cause=cause, step=step)


def _report_restart(worker: _Watched, outage: _Outage, writer: Writer) -> None:
    resumed_at = outage.step if worker.resumed_at is None else worker.resumed_at
    lost, lost_s = max(outage.step - resumed_at, 0), max((worker.regained_at or worker.seen_at) - outage.since, 0.0)
    writer.event(
        "restart",
        f"Started again from step {resumed_at}: {lost} steps done twice, {lost_s:.1f} s lost ({outage.cause}).",
        cause=outage.cause,
        step=outage.step,
        steps_lost=lost,
        seconds_lost=round(lost_s, 3),
        data={
            "resumed_at": resumed_at,
            "to_first_step_s": worker.first_step_at and round(worker.first_step_at - outage.since, 3),
        },
    )


def _stop_if_hopeless(endings: list[tuple[str, int]], worker: _Watched, out: Path, writer: Writer) -> None:
    symptom, step = endings[-1]
    repeated = len(endings) >= REPEATS and len(set(endings[-REPEATS:])) == 1
    if SYMPTOMS[symptom].action == "restart" and not repeated:
        return
    why = f"{SYMPTOMS[symptom].text} after {step} steps"
    if repeated:
        why += f", {REPEATS} times in a row without progress"
    log = _log_of(worker, out)
    last_words = f" Its last words: {log.splitlines()[-1]}" if log else ""
    text = f"{why}; training stops.{last_words}"
    writer.event("stop", text, cause=symptom, step=step)
    raise RunStopped(f"{text} The whole log is {out / 'worker.log'}.")


def _capture_stacks(process: subprocess.Popen[bytes], out: Path) -> None:
    """Let the worker write the stack of every thread to its log; a frozen one cannot, and is not waited for long."""
    log = out / "worker.log"
    before, deadline = log.stat().st_size, time.monotonic() + 1.0
    process.send_signal(signal.SIGUSR1)
    while log.stat().st_size == before and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _log_of(worker: _Watched, out: Path, num_bytes: int = 2000) -> str:
    """The end of what this worker wrote to the log."""
    with (out / "worker.log").open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(worker.log_start, size - num_bytes))
        return log.read().decode(errors="replace").strip()


@contextlib.contextmanager
def _terminate_as_exit() -> Iterator[None]:
    """SIGTERM leaves by an exception, so that the worker is ended in order; someone else's handler is respected."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
