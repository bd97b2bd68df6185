"""Checkpoints: one folder per kept state, complete or absent, never half.

A save copies the state off the device, then a background thread writes `checkpoints/step_00000120.tmp/` (arrays as
safetensors, fsync, manifest with a checksum of every array and file) and renames the folder: whatever kills the
process, a folder with a proper name is whole. Restore trusts nothing: names are parsed strictly, checksums are
verified, and where checkpoints exist but none verifies it raises, because starting again from random weights is the
one answer that must never be given (Marin, issue #8684). Format and manifest: contract 8. The state carries no loader
position; the step number is enough.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import msgspec
import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from noonsight.logbook.record import CheckpointManifest, encode, now
from noonsight.logbook.write import refusal, write_atomic
from noonsight.train.groups import by_path, like

if TYPE_CHECKING:
    from noonsight.logbook.claim import Claim

ARRAYS, MANIFEST = "arrays.safetensors", "manifest.json"
_NAME = re.compile(r"step_(\d{8,})")

Kind = Literal["permanent", "temporary", "final"]


class NoValidCheckpoint(RuntimeError):
    """Checkpoints exist, none of them verifies."""

    symptom = "no-checkpoint"


class NonFiniteState(RuntimeError):
    """A state with a NaN or an infinity was about to be kept."""

    symptom = "non-finite"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest checkpoint that verifies, and what had to be passed over to reach it."""

    path: Path
    manifest: CheckpointManifest
    rejected: tuple[str, ...]  # one reason per newer folder that did not verify


class Saver:
    """Saves in one background thread: the loop waits for the copy off the device and for the save before, not for disk.

    A save that failed is raised in the caller's thread, by the next `save`, `poll` or `join`. A context manager:
    leaving it finishes the save in flight. The first save of a process is read back and compared, so that a state
    that cannot be restored is found at once.
    """

    def __init__(self, out: Path, claim: Claim, *, attempt: int, on_saved: Callable[[Path, Kind], None]) -> None:
        """`on_saved(path, kind)` is called in the background thread once a checkpoint is complete."""
        self._out, self._claim, self._attempt, self._on_saved = out, claim, attempt, on_saved
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._proven = False

    def save(self, state: Any, *, step: int, kind: Kind, tokens: int) -> None:
        """Start keeping `state`. Raises NonFiniteState before anything is written, and the error of the save before."""
        self.join()
        arrays = to_host(state)
        refuse_non_finite(arrays, step)
        work = {"step": step, "kind": kind, "tokens": tokens}
        self._thread = threading.Thread(target=self._write, args=(arrays, work), name=f"save-{step}")
        self._thread.start()

    def poll(self) -> None:
        """Raise the error of a save that has failed; return at once otherwise."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def join(self) -> None:
        """Wait for the save in flight, then raise its error if it had one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Whatever ends the run, a save in flight is finished first; its own error counts only if there is no other."""
        if kind is None:
            self.join()
        elif self._thread is not None:
            self._thread.join()

    def _write(self, arrays: dict[str, np.ndarray], work: dict[str, Any]) -> None:
        try:
            path = write(self._out, arrays, claim=self._claim, attempt=self._attempt, **work)
            if not self._proven:
                _prove(path, arrays)
                self._proven = True
            _prune(self._out, newest_kept=work["step"])
            self._on_saved(path, work["kind"])
        except BaseException as error:  # handed to the caller's thread by `poll`
            self._error = error


def to_host(state: Any) -> dict[str, np.ndarray]:
    """Own copies of all leaves by path: a view would change under the writer when the next step reuses the donated
    buffers.
    """
    return {path: np.array(leaf, copy=True) for path, leaf in by_path(jax.device_get(state)).items()}


def refuse_non_finite(arrays: dict[str, np.ndarray], step: int) -> None:
    """Raises NonFiniteState, naming the leaves, when any floating array holds a NaN or an infinity."""
    bad = [
        path
        for path, array in arrays.items()
        if jax.numpy.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all()
    ]
    if bad:
        raise NonFiniteState(
            f"the state after {step} steps holds non-finite numbers in {', '.join(bad[:4])} ({len(bad)} leaves); "
            "it is not saved, the checkpoint before it stands"
        )


def write(
    out: Path, arrays: dict[str, np.ndarray], *, step: int, kind: Kind, tokens: int, claim: Claim, attempt: int
) -> Path:
    """Write one checkpoint, blocking; returns its folder. A valid one of the same step is kept, at the stronger kind.

    Raises Fenced when another process owns `out` by now, OSError when the disk refuses.
    """
    claim.check()
    final = folder(out, step)
    if final.exists():
        if verify(final) is None:
            if kind != "temporary":
                relabel(final, kind)
            return final
        shutil.rmtree(final)
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_arrays(temporary / ARRAYS, arrays)
    manifest = CheckpointManifest(
        step=step,
        kind=kind,
        attempt=attempt,
        fence=claim.fence,
        arrays={path: _describe(array) for path, array in arrays.items()},
        files={ARRAYS: {"bytes": (temporary / ARRAYS).stat().st_size, "xxh3": _file_hash(temporary / ARRAYS)}},
        tokens=tokens,
        at=now(),
    )
    _write_manifest(temporary, manifest)
    claim.check()
    os.rename(temporary, final)
    _sync(final.parent)
    return final


def restore(path: Path, target: Any) -> Any:
    """The state kept in the folder `path`, as arrays laid out like `target` (arrays or ShapeDtypeStructs, with their
    shardings).

    Raises ValueError naming the leaves that are missing, unexpected, or of another shape, dtype or checksum.
    """
    manifest = read_manifest(path)
    arrays = load_file(path / ARRAYS)
    wanted = by_path(target)
    faults = [f"{name} is missing from the checkpoint" for name in wanted if name not in arrays]
    faults += [f"{name} is in the checkpoint but not in this run" for name in arrays if name not in wanted]
    for name in wanted.keys() & arrays.keys():
        have, want = arrays[name], wanted[name]
        if have.shape != tuple(want.shape) or have.dtype != want.dtype:
            faults.append(f"{name} is {have.dtype}{list(have.shape)}, this run has {want.dtype}{list(want.shape)}")
        elif _describe(have) != manifest.arrays.get(name):
            faults.append(f"{name} does not match its checksum")
    if faults:
        raise ValueError(
            f"cannot restore {path}: {'; '.join(sorted(faults)[:4])} ({len(faults)} in all). "
            "It belongs to another model or optimiser: give this run another name or version."
        )
    placed = {name: jax.device_put(arrays[name], getattr(wanted[name], "sharding", None)) for name in wanted}
    return like(target, placed)


def newest(out: Path) -> Found | None:
    """The newest checkpoint of `out` that verifies, or None when none was ever completed.

    Raises NoValidCheckpoint, with the reason for each folder, when there are some but none can be trusted.
    """
    rejected: list[str] = []
    for path in reversed(folders(out)):
        reason = verify(path)
        if reason is None:
            return Found(path=path, manifest=read_manifest(path), rejected=tuple(rejected))
        rejected.append(f"{path.name}: {reason}")
    if rejected:
        raise NoValidCheckpoint(
            f"{out / 'checkpoints'} holds {len(rejected)} checkpoints and none verifies ({'; '.join(rejected)}). "
            "Training does not start again from random weights: put a good copy back, or remove the folder "
            "`checkpoints` if the run shall begin anew."
        )
    return None


def verify(path: Path) -> str | None:
    """Why the folder is no checkpoint, or None when manifest, sizes and checksums hold."""
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        return f"manifest.json cannot be read ({error})"
    if folder(path.parent.parent, manifest.step).name != path.name:
        return f"manifest.json says step {manifest.step}"
    for name, fact in manifest.files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != fact["bytes"] or _file_hash(file) != fact["xxh3"]:
            return f"{name} does not match its checksum"
    return None


def read_manifest(path: Path) -> CheckpointManifest:
    """The manifest in a checkpoint's folder. Raises OSError or msgspec.DecodeError (a ValueError)."""
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=CheckpointManifest)


def relabel(path: Path, kind: Kind) -> None:
    """Change a checkpoint's kind; a state that something forks from is made permanent first, so that it is never
    pruned.
    """
    _write_manifest(path, msgspec.structs.replace(read_manifest(path), kind=kind))


def remove(path: Path) -> None:
    """Take a checkpoint away: its marker first, so that nobody finds half of one."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def writable(place: str, num_bytes: int) -> str | None:
    free = shutil.disk_usage(place).free
    return None if free > num_bytes else "full"


def folders(out: Path) -> list[Path]:
    """The checkpoint folders of `out`, oldest first. Only exact names count: `step_00000010_old`, `step-9`,
    `step_00000010.tmp` do not.
    """
    found = []
    for path in (out / "checkpoints").glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match and path == folder(out, int(match[1])):
            found.append(path)
    return sorted(found, key=lambda path: int(path.name[5:]))


def folder(out: Path, step: int) -> Path:
    """Where the state after `step` steps is kept."""
    return out / "checkpoints" / f"step_{step:08d}"


def _prune(out: Path, *, newest_kept: int) -> None:
    """Remove what a newer checkpoint has made needless: older temporaries and torn `.tmp` folders."""
    for path in folders(out):
        if int(path.name[5:]) < newest_kept and verify(path) is None and read_manifest(path).kind == "temporary":
            shutil.rmtree(path)
    for path in (out / "checkpoints").glob("step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _prove(path: Path, arrays: dict[str, np.ndarray]) -> None:
    again = load_file(path / ARRAYS)
    wrong = [name for name, array in arrays.items() if name not in again or _describe(again[name]) != _describe(array)]
    if wrong:
        raise RuntimeError(f"the first checkpoint does not read back as it was written: {wrong[:4]} in {path}")


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        save_file(arrays, path)
    except SafetensorError as error:  # it wraps the error of the disk in text: "... (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        raise (
            refusal("write", path, OSError(int(number[1]), os.strerror(int(number[1])))) if number else error
        ) from error
    _sync(path)


def _describe(array: np.ndarray) -> dict[str, Any]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {"shape": list(array.shape), "dtype": str(array.dtype), "xxh3": xxhash.xxh3_128_hexdigest(flat)}


def _write_manifest(path: Path, manifest: CheckpointManifest) -> None:
    write_atomic(path / MANIFEST, encode(manifest))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
