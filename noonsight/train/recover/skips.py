"""Batches that a run passes over, because they brought it down: `skips.jsonl`, one line each.

A skipped step consumes its number and its batch and changes nothing else. A checkpoint that was written before the
decision and has taken the step in already belongs to a line of the run that is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from noonsight.logbook import read
from noonsight.logbook.record import CheckpointManifest, encode, now
from noonsight.logbook.write import append_line

SKIPS = "skips.jsonl"
MOST = 64
"""A run that must pass over more batches has another problem; so many fit into its state."""


def skips(out: Path) -> dict[int, int]:
    """Step -> fence token of the attempt that it ended, for every step to be passed over."""
    return {line["step"]: line["fence"] for line in read.lines(out / SKIPS)}


def add(out: Path, steps: Iterable[int], *, fence: int, cause: str) -> None:
    """Pass over `steps` from now on; `fence` is the token of the worker that fell over them."""
    for step in steps:
        append_line(out / SKIPS, encode({"step": step, "fence": fence, "cause": cause, "at": now()}))


def why_given_up(manifest: CheckpointManifest, skipped: Mapping[int, int]) -> str | None:
    """Why a checkpoint belongs to a line that was given up: it holds the effect of a step that is passed over by now."""
    for step, fence in skipped.items():
        if step < manifest.step and manifest.fence <= fence:
            return f"it holds the effect of step {step}, which is passed over since then"
    return None
