"""What a run prints: few lines, none wider than a terminal, each with what is left to wait for.

A stage gets one line when it ends and progress lines at times that double (10 s, 20 s, 40 s, ... then every ten
minutes), so a voyage of minutes stays on one screen and one of weeks stays readable. On a terminal the time between
is filled by one line that is rewritten in place.
"""

from __future__ import annotations

import sys
import textwrap
import time
from typing import TextIO

from noonsight.logbook.record import Progress
from noonsight.plan.stage import Stage

COLUMNS = 100
FIRST_S, LONGEST_S = 10.0, 600.0


class Screen:
    """Prints to `stream` and remembers when it last spoke."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self._live = self.stream.isatty()
        self._start = self._due = 0.0

    def say(self, text: str) -> None:
        """Print `text`; lines wider than a terminal go on below, indented. Nothing of a message is lost."""
        if self._live:
            self.stream.write("\r\x1b[K")
        for line in text.splitlines() or [""]:
            indent = " " * (len(line) - len(line.lstrip()))
            self.stream.write(_wrap(line.lstrip(), indent, indent + "  ") + "\n")
        self.stream.flush()

    def graph(self, stages: list[Stage], done: set[str]) -> None:
        """Print the stages by depth, `a, b > c > d`; finished ones carry a tick."""
        depth: dict[str, int] = {}
        for stage in stages:
            depth[stage.address] = 1 + max((depth[given.address] for given in stage.inputs.values()), default=-1)
        levels: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
        for stage in stages:
            levels[depth[stage.address]].append(stage.name + ("✓" if stage.address in done else ""))
        text = " > ".join(", ".join(level) for level in levels)
        self.say(_wrap(text, "  ", "  "))

    def begin(self) -> None:
        """A stage starts now."""
        self._start = time.monotonic()
        self._due = FIRST_S

    def progress(self, label: str, beat: Progress | None) -> None:
        """Say how far the stage is, if it is time to; call as often as you like."""
        elapsed = time.monotonic() - self._start
        line = f"{label}  {describe(beat, elapsed)}"
        if elapsed >= self._due:
            self._due += min(self._due, LONGEST_S)
            self.say(clip(line))
        elif self._live:
            self.stream.write("\r\x1b[K" + clip(line))
            self.stream.flush()


def describe(beat: Progress | None, elapsed_s: float) -> str:
    """One heartbeat in words: how far, how fast, how long still."""
    if beat is None:
        return f"running for {duration(elapsed_s)}"
    words = [beat.phase] if beat.phase not in ("run", "done") else []
    if beat.of > 0:
        words.append(f"{beat.step:,}/{beat.of:,} {beat.unit}")
    rate = beat.rate
    if rate is None and beat.step > 0 and beat.attempt == 0:
        rate = beat.step / max(elapsed_s, 1e-9)
    if rate and beat.of > 0:
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        words += [f"{shown} {beat.unit}/s", f"{duration(max(0, beat.of - beat.step) / rate)} left"]
    return ", ".join([*words, *([beat.text] if beat.text else [])])


def duration(seconds: float) -> str:
    """Seconds as people say them: 4.2 s, 3 min 05 s, 2 h 10 min, 5 d 3 h."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, below, size, smaller in (("min", "s", 60, 1), ("h", "min", 3600, 60), ("d", "h", 86400, 3600)):
        if whole < size * (60 if size < 3600 else 24) or unit == "d":
            return f"{whole // size} {unit} {whole % size // smaller:02d} {below}"
    raise AssertionError


def _wrap(text: str, first: str, rest: str) -> str:
    return textwrap.fill(
        text, COLUMNS, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def clip(line: str) -> str:
    """`line`, cut to the width with an ellipsis."""
    return line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
