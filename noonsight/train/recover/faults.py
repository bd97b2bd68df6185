"""Faults on purpose: what a placement asks for strikes once in the life of a folder, with the real means of the system."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from noonsight.logbook import read
from noonsight.logbook.record import Fault, Placement, encode, now, shift_clock
from noonsight.logbook.write import Writer, append_line
from noonsight.train.recover.worker import PARENT

FAULTS = "faults.jsonl"
_SMALLEST_FILE = 1  # bytes; with it no file takes another byte

SENTENCES = {
    "kill": "The worker kills itself",
    "kill-supervisor": "The worker kills its supervisor",
    "freeze": "The worker stops itself",
    "terminate": "The worker is asked to end",
    "torn-save": "The worker kills itself in the middle of a save",
    "corrupt": "The worker damages the newest checkpoint and kills itself",
    "disk-full": "No file of the worker may grow any more",
    "nan": "A number of the batch becomes NaN",
    "clock": "The wall clock jumps",
    "slow": "The data of a rank are late from now on",
}

DEADLY = ("kill", "kill-supervisor", "torn-save", "corrupt")  # the worker sends itself SIGKILL


class Faults:
    """The faults of one rank, each once in the life of a folder: remembered on disk before it strikes."""

    def __init__(self, placement: Placement, out: Path, writer: Writer, rank: int = 0) -> None:
        self._faults, self._writer, self._file = placement.faults, writer, out / FAULTS
        self._out, self._rank = out, rank
        self._struck = {(line["kind"], line["at_step"]) for line in read.lines(self._file)}
        self._late_s = 0.0

    def planned(self, step: int) -> bool:
        """Whether a fault belongs to this step, in any attempt: its parameters are hashed each time, to be compared."""
        return any(fault.at_step == step for fault in self._faults)

    def before(self, step: int, batch: Any) -> Any:
        """The batch of `step` as it reaches the device: late, or with a NaN in its first array of floats."""
        for fault in self._due(step, ("nan", "slow")):
            self._note(fault, step)
            if fault.kind == "slow":
                self._late_s = fault.seconds
            else:
                batch = _with_nan(batch)
        if self._late_s:
            time.sleep(self._late_s)
        return batch

    def after(self, step: int, save: Callable[[], None]) -> None:
        """Strike after `step` is complete and all that belongs to it is written; `save` starts a save of the state."""
        for fault in self._due(step, tuple(kind for kind in SENTENCES if kind not in ("nan", "slow"))):
            self._note(fault, step)
            if fault.kind == "kill":
                _die()
            elif fault.kind == "kill-supervisor":
                os.kill(int(os.environ[PARENT]), signal.SIGKILL)
                _die()
            elif fault.kind == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault.kind == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            elif fault.kind == "torn-save":
                save()
                time.sleep(fault.seconds)
                _die()
            elif fault.kind == "corrupt":
                _damage_newest(self._out)
                _die()
            elif fault.kind == "disk-full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALLEST_FILE, resource.RLIM_INFINITY))
            elif fault.kind == "clock":
                shift_clock(fault.seconds)

    def _due(self, step: int, kinds: tuple[str, ...]) -> list[Fault]:
        return [
            fault
            for fault in self._faults
            if fault.at_step == step
            and fault.rank == self._rank
            and fault.kind in kinds
            and (fault.kind, step) not in self._struck
        ]

    def _note(self, fault: Fault, step: int) -> None:
        self._struck.add((fault.kind, step))
        append_line(self._file, encode({"kind": fault.kind, "at_step": step, "at": now(), "clock": time.monotonic()}))
        text = f"{SENTENCES[fault.kind]} at step {step}, as the placement asks."
        kind = "kill-injected" if fault.kind in DEADLY else "fault-injected"
        self._writer.event(kind, text, cause="injected", step=step, data={"fault": fault.kind})


def num_struck(out: Path) -> int:
    """How many faults have struck in the folder `out` so far."""
    return len(read.lines(out / FAULTS))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _with_nan(batch: Any) -> Any:
    import jax
    import numpy as np

    leaves, tree = jax.tree.flatten(batch)
    for index, leaf in enumerate(leaves):
        if np.issubdtype(leaf.dtype, np.floating):
            leaves[index] = _poisoned(leaf)
            break
    return jax.tree.unflatten(tree, leaves)


def _poisoned(leaf: Any) -> Any:
    import jax
    import numpy as np

    if not isinstance(leaf, jax.Array):
        return np.full_like(leaf, np.nan)
    parts = [
        jax.device_put(np.full_like(np.asarray(part.data), np.nan), part.device) for part in leaf.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _damage_newest(out: Path) -> None:
    """Flip one bit in the middle of the largest file of the newest local checkpoint."""
    from noonsight.train.checkpoint.storage import folders, root_of

    found = folders(root_of(out))
    if not found:
        return
    file = max((path for path in found[-1].iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    with file.open("r+b") as data:
        data.seek(file.stat().st_size // 2)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 1]))
