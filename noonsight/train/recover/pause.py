"""Waiting for a storage that takes no writes: full, read-only or gone. Nothing is lost, and the terminal says why."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec

from noonsight.logbook.record import CheckpointManifest, Placement

POLL_S = 1.0
TELL_EVERY_S = 600.0
TERMINAL = "NOONSIGHT_TERMINAL"  # file descriptor of a pipe to whoever shows a screen


def wait_for_storage(out: Path, placement: Placement) -> tuple[float, str]:
    """Wait until both `out` and the place of its checkpoints take writes; (seconds, what was wrong last)."""
    from noonsight.train.checkpoint import writable  # with it comes JAX

    began, told = time.monotonic(), -TELL_EVERY_S
    reason = "it refused one write and takes the next"
    places = [str(out), *([placement.checkpoints] if placement.checkpoints else [])]
    while found := next((why for place in places if (why := writable(place, _needed_bytes(out)))), None):
        reason, waited = found, time.monotonic() - began
        if waited - told >= TELL_EVERY_S:
            told = waited
            tell(f"Paused: {reason}. The last checkpoint is safe; the run goes on by itself when there is room.")
        time.sleep(POLL_S)
    return time.monotonic() - began, reason


def tell(text: str) -> None:
    """Say something that perhaps no file can hold: to the screen of the runner, or to stderr."""
    try:
        os.write(int(os.environ[TERMINAL]), f"{text}\n".encode())
    except (KeyError, ValueError, OSError):
        print(text, file=sys.stderr, flush=True)


def _needed_bytes(out: Path) -> int:
    """What the next checkpoint will take, from the last one that is there; at least a megabyte."""
    sizes = [1 << 20]
    for path in (out / "checkpoints").glob("step_*/manifest.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # a damaged one says nothing
            manifest = msgspec.json.decode(path.read_bytes(), type=CheckpointManifest)
            sizes.append(sum(fact["bytes"] for fact in manifest.files.values()))
    return max(sizes)
