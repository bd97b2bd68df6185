"""Waiting for a storage that takes no writes: full, read-only or gone. Nothing is lost, and the terminal says why."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from noonsight.logbook.record import Placement

POLL_S = 1.0
TELL_EVERY_S = 600.0
TERMINAL = "NOONSIGHT_TERMINAL"  # file descriptor of a pipe to whoever shows a screen


def wait_for_storage(out: Path, placement: Placement) -> tuple[float, str]:
    """Wait until both `out` and the place of its checkpoints take writes; (seconds, what was wrong last)."""
    from noonsight.train.checkpoint import storage  # JAX comes with it

    began, told = time.monotonic(), -TELL_EVERY_S
    reason = "it refused one write and takes the next"
    root = storage.root_of(out, placement)
    needed = {out: 1 << 20, root: _needed_bytes(root)}
    while found := next((why for place, size in needed.items() if (why := storage.writable(place, size))), None):
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


def _needed_bytes(root: Any) -> int:
    """What the next checkpoint will take, from the last one that is there; at least a megabyte."""
    from noonsight.train.checkpoint import storage

    sizes = [1 << 20]
    with contextlib.suppress(OSError, ValueError):  # what cannot be read says nothing
        for path in storage.folders(root):
            sizes.append(sum(fact["bytes"] for fact in storage.read_manifest(path).files.values()))
    return max(sizes)
