"""Writing the logbook so that a kill at any moment leaves it readable.

Whole files appear by rename, after their bytes are on the disk; lines are appended by one `write` each, under a lock of
the file, and whoever appends next first cuts a last line that a killed writer left torn. Every write asks the claim
first, so a process that lost its folder writes nothing. A disk that refuses becomes one `LogbookError` that says what
to do, and the file is as it was before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noonsight.logbook import record

if TYPE_CHECKING:
    from noonsight.logbook.claim import Claim


class LogbookError(OSError):
    """The disk refused a write or a file cannot be read; the message says what, where, why and what to do."""


class Writer:
    """The one hand that writes the logbook of a stage folder.

    `attempt` counts the starts of the process that measures; a step measured again after a rewind has a higher one.
    Every method raises `Fenced` when the folder has a new owner, and `LogbookError` when the disk refuses.
    """

    def __init__(self, out: Path, claim: Claim, attempt: int = 0):
        self.out, self.claim, self.attempt = Path(out), claim, attempt

    def event(self, kind: str, text: str, **fields: Any) -> None:
        """Append an `Event`; `fields` are those of the record (cause, step, steps_lost, seconds_lost, data)."""
        event = record.Event(at=record.now(), kind=kind, text=text, attempt=self.attempt, **fields)
        self._append("events.jsonl", event)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line of measurements at `step`; names are those of `logbook.vocabulary`."""
        line = {"step": int(step), "attempt": self.attempt, "at": record.now()}
        self._append("metrics.jsonl", {**{name: float(value) for name, value in values.items()}, **line})

    def progress(
        self,
        step: int,
        of: int,
        *,
        unit: str = "steps",
        phase: record.Phase = "run",
        rate: float | None = None,
        text: str = "",
    ) -> None:
        """Append a heartbeat: `step` of `of` units done, at `rate` units per second. `text` is for the terminal."""
        beat = record.Progress(
            step=int(step),
            of=int(of),
            unit=unit,
            phase=phase,
            at=record.now(),
            monotonic=time.monotonic(),
            attempt=self.attempt,
            rate=rate,
            text=text,
        )
        self._append("progress.jsonl", beat)

    def record(self, run: record.Run) -> None:
        """Replace `record.json` as a whole."""
        self.claim.check()
        write_atomic(self.out / "record.json", record.encode(run))

    def _append(self, name: str, value: Any) -> None:
        self.claim.check()
        append_line(self.out / name, record.encode(value))


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that `path` holds either the old bytes or all the new ones, also after a power cut.

    Raises `LogbookError` and leaves no temporary file when the disk refuses.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise refusal("write", path, error) from error


def append_line(path: Path, line: bytes) -> None:
    """Append `line` and a newline in one write, after cutting a torn last line. Raises `LogbookError`.

    A kill of the process loses nothing that this function returned from; a power cut may lose the last lines.
    """
    path = Path(path)
    assert b"\n" not in line, "a line of the logbook holds no newline"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # supervisor and worker both append events
            size = _cut_torn_line(handle)
            data = line + b"\n"
            try:
                if os.write(handle, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
    except OSError as error:
        raise refusal("append to", path, error) from error


def refusal(what: str, path: Path, error: OSError) -> LogbookError:
    """Turn an `OSError` of the file system into one message with a remedy; `what` is a verb such as "write"."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    closed = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    if full:
        remedy = "Free some space there (noon prune lists what can go), then give the same command again."
    elif closed:
        remedy = "Choose another folder with --root, or change the permissions of this one."
    elif error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        remedy = "Something else has this name: move it away, or choose another folder with --root."
    else:
        remedy = "Look at the disk, then give the same command again."
    message = LogbookError(f"cannot {what} {path}: {error.strerror or error}. {remedy}")
    message.errno = error.errno
    return message


def _cut_torn_line(handle: int) -> int:
    """Truncate to the end of the last whole line; return the size. Only a killed writer leaves anything to cut."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    os.ftruncate(handle, end)
    return end


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
