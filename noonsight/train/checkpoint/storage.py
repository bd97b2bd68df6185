"""Where checkpoints lie: a local folder, or an object store through fsspec.

Both are paths (`pathlib.Path`, or `UPath` for an address such as s3://bucket/run). Local folders appear by rename after their
bytes are on the disk. An object store has no rename: there the manifest, written last, is what makes a folder a
checkpoint, and without one it is nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from noonsight.logbook.record import CheckpointManifest, Placement, encode
from noonsight.logbook.write import write_atomic

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})")
INVISIBLE_S = 10.0  # how long a network file system may hide a file that another machine has written

Kind = Literal["permanent", "temporary", "final"]
T = TypeVar("T")


class StorageRefused(OSError):
    """The place of the checkpoints takes no writes; the message says which, why and what to do."""

    symptom = "storage"


def root_of(out: Path, placement: Placement = Placement()) -> Any:
    """The folder of the checkpoints of the run in `out`: its own, or below the address that the placement gives."""
    if placement.checkpoints is None:
        return Path(out) / "checkpoints"
    from upath import UPath

    return UPath(placement.checkpoints) / Path(out).parent.name / Path(out).name


def is_local(path: Any) -> bool:
    """Whether `path` is on a file system of this machine, with rename and fsync."""
    return isinstance(path, Path) and not hasattr(path, "storage_options")


def folder(root: Any, step: int) -> Any:
    """Where the state after `step` steps is kept."""
    return root / f"step_{step:08d}"


def folders(root: Any) -> list[Any]:
    """The checkpoint folders of `root`, oldest first. Only exact names count: `step_00000010_old`, `step-9`,
    `step_00000010.tmp` do not; nor does, in an object store, a folder without a manifest.
    """
    found = {}
    if not is_local(root):
        root.fs.invalidate_cache()  # another process may have written since this one looked
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.name == folder(root, int(match[1])).name and (is_local(path) or marked(path)):
                found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def marked(path: Any) -> bool:
    """Whether the folder has the mark of a complete checkpoint."""
    return (path / MANIFEST).exists()


def read_manifest(path: Any) -> CheckpointManifest:
    """The manifest in a checkpoint's folder. Raises OSError or msgspec.DecodeError (a ValueError)."""
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=CheckpointManifest)


def write_manifest(path: Any, manifest: CheckpointManifest) -> None:
    """Write the mark of a complete checkpoint into its folder."""
    if is_local(path):
        write_atomic(path / MANIFEST, encode(manifest))
    else:
        (path / MANIFEST).write_bytes(encode(manifest))


def relabel(path: Any, kind: Kind) -> None:
    """Change a checkpoint's kind; a state that something forks from is made permanent first, so that it is never pruned
    (F25).
    """
    write_manifest(path, msgspec.structs.replace(read_manifest(path), kind=kind))


def remove(path: Any) -> None:
    """Take a folder away: its mark first, so that nobody finds half of a checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        (path / MANIFEST).unlink()
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        path.fs.rm(path.path, recursive=True)


def read_range(file: Any, start: int, size: int) -> Any:
    """`size` bytes of a file from `start` on: a view of the file's pages where it is local, else a download."""
    if is_local(file):
        import numpy as np

        return np.memmap(file, np.uint8, "r", start, (size,)) if size else b""
    return file.fs.cat_file(file.path, start=start, end=start + size)


def size_of(file: Any) -> int | None:
    """Bytes of a file, None where there is none."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None


def sync(path: Path) -> None:
    """Bring a local file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def patiently(
    look: Callable[[], T | None],
    patience_s: float = INVISIBLE_S,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> T | None:
    """What `look` finds, asked again until it finds something or `patience_s` is over: a network file system may show a
    folder before its files.
    """
    deadline, pause_s = clock() + patience_s, 0.01
    while (found := look()) is None and clock() < deadline:
        wait(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    return found


def require_space(root: Any, needed_bytes: int) -> None:
    """Raises StorageRefused unless `needed_bytes` more can be written below `root`."""
    if why := writable(root, needed_bytes):
        raise StorageRefused(f"checkpoints cannot be kept: {why}. The last one is safe.")


def writable(place: Any, num_bytes: int) -> str | None:
    """Why `num_bytes` cannot be written below `place` (a path or an address), or None. It asks the volume and tries."""
    if "://" in str(place):
        from upath import UPath

        place = UPath(place)
    elif not hasattr(place, "storage_options"):
        place = Path(place)
    try:
        return _try_local(place, num_bytes) if is_local(place) else _try_remote(place)
    except OSError as error:
        return f"{place} takes no writes ({error.strerror or error}). {_remedy(error)}"


def _try_local(place: Path, num_bytes: int) -> str | None:
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        return (
            f"{place} has {free / 1e6:.1f} MB free and {num_bytes / 1e6:.1f} MB are needed. Free some space there (noon "
            "prune lists what can go)"
        )
    probe = place / f".probe.{os.getpid()}"
    try:
        with probe.open("wb") as file:  # a quota shows only when something is written
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
    return None


def _try_remote(place: Any) -> str | None:
    probe = place / f".probe.{os.getpid()}"
    probe.write_bytes(b"noon")
    probe.unlink()
    return None


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space there (noon prune lists what can go)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "Mount it writable again, or change its permissions"
    return "Bring the storage back"
