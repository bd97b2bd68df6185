"""Where the time of a training run went, from its heartbeats and events.

    wall clock = useful steps + repeated steps + start + compile + evaluate + save + down + unattended

It is a partition: every stretch between two signs of life belongs to one part, so the parts add up. Inside an attempt the
monotonic clock counts, which no change of the date moves; between attempts too, unless the machine changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import msgspec

from noonsight.logbook import read
from noonsight.logbook.record import Event, Progress

UNATTENDED = "unattended"
"""Nobody ran the run: its supervisor was gone, too."""
PARTS = ("useful", "repeated", "start", "compile", "evaluate", "save", "down", UNATTENDED)
CLOCK_JUMP_S = 7200.0  # two machines' monotonic clocks differ by more than a wall clock is ever set by


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What one cause has cost: steps done again, and seconds until the run was where it had been."""

    times: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The wall clock of a run by parts, in seconds, and what was lost by cause."""

    wall_s: float
    parts: dict[str, float]
    lost: dict[str, Lost] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Useful time over the time in which somebody ran it."""
        attended = self.wall_s - self.parts[UNATTENDED]
        return self.parts["useful"] / attended if attended > 0 else 0.0


def account(out: Path) -> Goodput | None:
    """The time of the run in the stage folder `out` so far; None before its first heartbeat.

    Raises LogbookError when a file cannot be read.
    """
    beats, events = _beats(out), read.events(out)
    if not beats:
        return None
    parts, lost = dict.fromkeys(PARTS, 0.0), {}
    causes = {event.data["attempt"]: event.cause or event.kind for event in events if "attempt" in event.data}
    starts = [event for event in events if event.kind == "start"]
    if starts:
        parts["start"] += max(0.0, _wall_s(starts[0].at, beats[0].at))
    own = read.metrics(out, attempts="all").get("step_s")
    step_s = (
        {(attempt, step): value for attempt, step, value in zip(own.attempts, own.steps, own.values)} if own else {}
    )
    furthest, cause = 0, None
    for attempt in _attempts(beats):
        if attempt[0] is not beats[0]:
            before = beats[beats.index(attempt[0]) - 1]
            cause = causes.get(before.attempt, UNATTENDED)
            gap, idle = _gap(before, attempt[0], starts)
            parts["down"] += gap - idle
            parts[UNATTENDED] += idle
            lost[cause] = _more(lost.get(cause, Lost()), times=1, seconds=gap - idle)
        furthest = _account_attempt(attempt, furthest, cause, step_s, parts, lost)
    ended = read.run(out)
    if ended is not None and ended.ended_at is not None:
        parts["save"] += max(0.0, _wall_s(beats[-1].at, ended.ended_at))
    rounded = {name: round(seconds, 3) for name, seconds in parts.items()}
    return Goodput(wall_s=round(sum(parts.values()), 3), parts=rounded, lost=lost)


def _account_attempt(
    beats: Sequence[Progress],
    furthest: int,
    cause: str | None,
    step_s: dict[tuple[int, int], float],
    parts: dict[str, float],
    lost: dict[str, Lost],
) -> int:
    """Add the stretches of one attempt to `parts`, and those before it was where the last one had been to what `cause` has
    lost; the furthest step there is now.
    """
    here = furthest
    for before, after in pairwise(beats):
        seconds = max(0.0, after.monotonic - before.monotonic)
        name = before.phase
        if name == "compile" and after.step > before.step:  # no sign of life between the compilation and the first step
            compiling = max(0.0, seconds - step_s.get((after.attempt, after.step - 1), 0.0))
            parts["compile"] += compiling
            if cause is not None:
                lost[cause] = _more(lost[cause], seconds=compiling)
            name, seconds = "run", seconds - compiling
        if name in ("run", "done"):
            name = "repeated" if after.step <= furthest and after.step > before.step else "useful"
        parts[name] += seconds
        if cause is not None and here <= furthest and (name in ("start", "compile", "repeated")):
            steps = after.step - before.step if name == "repeated" else 0
            lost[cause] = _more(lost[cause], steps=steps, seconds=seconds)
        here = max(here, after.step)
    return max(furthest, here)


def _gap(before: Progress, after: Progress, starts: Sequence[Event]) -> tuple[float, float]:
    """(seconds between two attempts, seconds of them in which no supervisor was there)."""
    seconds, wall_s = after.monotonic - before.monotonic, _wall_s(before.at, after.at)
    if seconds < 0 or seconds > abs(wall_s) + CLOCK_JUMP_S:  # another machine, or this one after a reboot
        seconds = max(0.0, wall_s)
        idle = [_wall_s(before.at, event.at) for event in starts if before.at < event.at <= after.at]
    else:
        told = [event.data["monotonic"] for event in starts if "monotonic" in event.data]
        idle = [at - before.monotonic for at in told if before.monotonic < at <= after.monotonic]
    return seconds, min(seconds, max(0.0, idle[0])) if idle else 0.0


def _attempts(beats: Sequence[Progress]) -> list[list[Progress]]:
    found: list[list[Progress]] = []
    for beat in beats:
        if not found or found[-1][-1].attempt != beat.attempt:
            found.append([])
        found[-1].append(beat)
    return found


def _beats(out: Path) -> list[Progress]:
    """All heartbeats; a damaged line is passed over."""
    found = []
    try:
        data = (Path(out) / "progress.jsonl").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    decoder = msgspec.json.Decoder(Progress, strict=False)
    for line in data.split(b"\n")[:-1]:
        try:
            found.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return found


def _wall_s(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def _more(lost: Lost, *, times: int = 0, steps: int = 0, seconds: float = 0.0) -> Lost:
    return Lost(times=lost.times + times, steps=lost.steps + steps, seconds=round(lost.seconds + seconds, 3))
