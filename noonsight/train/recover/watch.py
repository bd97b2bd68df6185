"""What a supervisor sees of a gang: heartbeats, and what follows from their absence or their pace."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from noonsight.logbook.record import Placement, Progress, Record

PROGRESS = "progress.jsonl"
PATIENCE_S = {"start": 900.0, "compile": 3600.0, "evaluate": 1800.0, "save": 1800.0, "done": 900.0}
"""How long a phase may show no sign of life; `run` is judged by its own speed instead. A slow restore or a cold
compilation is no hang.
"""
STRAGGLING_STEPS = 10
"""Over so many steps a rank's own work is compared with that of the others."""


class RankBeat(Record, kw_only=True):
    """One line of `ranks/<rank>.jsonl`: how long a step's work of this rank alone took, without waiting for anyone."""

    step: int
    own_s: float
    step_s: float


@dataclass(kw_only=True)
class Tail:
    """A growing file of JSON lines, read from where it was left."""

    path: Path
    kind: type[Record]
    position: int = 0

    def skip(self) -> None:
        """Go to the end of what is there: it belongs to someone else."""
        with contextlib.suppress(FileNotFoundError):
            self.position = self.path.read_bytes().rfind(b"\n") + 1

    def read(self) -> list[Record]:
        """The whole lines since the last call. A damaged one is passed over: it is no reason to lose the worker."""
        found: list[Record] = []
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.position += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(msgspec.MsgspecError):
                    found.append(msgspec.json.decode(line, type=self.kind, strict=False))
        return found


@dataclass(kw_only=True)
class Outage:
    """From the last sign of life of a dead worker until a new one is where the dead one was."""

    since: float
    cause: str
    symptom: str
    step: int


@dataclass(kw_only=True)
class Watch:
    """The course of one attempt, as its heartbeats tell it. Times are of the monotonic clock."""

    beats: Tail
    ranks: list[Tail] = field(default_factory=list)
    seen_at: float = field(default_factory=time.monotonic)
    phase: Literal["start", "compile", "run", "save", "evaluate", "done"] = "start"
    step: int | None = None  # completed steps, once it is known where the worker resumed
    resumed_at: int | None = None
    first_step_at: float | None = None
    regained_at: float | None = None  # when it was as far as the one before it
    median_step_s: float = 0.0
    _own_s: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    def look(self, outage: Outage | None) -> None:
        """Take in every heartbeat since the last look: a fast worker makes many steps between two."""
        for beat in self.beats.read():
            assert isinstance(beat, Progress)
            self.seen_at, self.phase = time.monotonic(), beat.phase
            self.median_step_s = 1 / beat.rate if beat.rate else self.median_step_s
            if beat.phase == "start":
                continue
            if self.resumed_at is None:
                self.resumed_at = beat.step
            self.step = beat.step
            if beat.step > self.resumed_at:
                self.first_step_at = self.first_step_at or beat.monotonic
                if outage and beat.step >= outage.step:
                    self.regained_at = self.regained_at or beat.monotonic

    def is_silent(self, placement: Placement) -> bool:
        """Whether the last sign of life is older than its phase may be: `max(floor, 5 x median step)` between steps."""
        usual = 5 * self.median_step_s if self.phase == "run" else PATIENCE_S[self.phase]
        return time.monotonic() - self.seen_at > max(placement.hang_floor_s, usual)

    def stragglers(self) -> list[tuple[int, float, float]]:
        """(rank, its own seconds a step, the others' median) of every rank that begins to hold the others up.

        Its own work takes more than half of a step and three times the others', as medians over STRAGGLING_STEPS.
        """
        for rank, tail in enumerate(self.ranks):
            for beat in tail.read():
                assert isinstance(beat, RankBeat)
                recent = self._own_s.setdefault(rank, deque(maxlen=STRAGGLING_STEPS))
                recent.append((beat.own_s, beat.step_s))
        if len(self._own_s) < 2 or any(len(recent) < STRAGGLING_STEPS for recent in self._own_s.values()):
            return []
        own = {rank: statistics.median(one for one, _ in recent) for rank, recent in self._own_s.items()}
        found = []
        for rank, recent in self._own_s.items():
            others = statistics.median(value for other, value in own.items() if other != rank)
            step_s = statistics.median(whole for _, whole in recent)
            slow = own[rank] > 3 * others and own[rank] > 0.5 * step_s
            if slow and rank not in self._told:
                found.append((rank, own[rank], others))
            (self._told.add if slow else self._told.discard)(rank)
        return found


def watch(out: Path, num_ranks: int) -> Watch:
    """A watch over an attempt that begins now."""
    seen = Watch(beats=Tail(path=out / PROGRESS, kind=Progress))
    if num_ranks > 1:
        seen.ranks = [Tail(path=rank_beats(out, rank), kind=RankBeat) for rank in range(num_ranks)]
    for tail in (seen.beats, *seen.ranks):
        tail.skip()
    return seen


def rank_beats(out: Path, rank: int) -> Path:
    """Where a rank of several writes its own pace."""
    return out / "ranks" / f"{rank}.jsonl"
