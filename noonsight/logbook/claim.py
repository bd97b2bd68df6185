"""One writer per folder: an OS lock that falls with its process, and a token that outlives it.

The lock keeps a second writer out while the first lives. The token (a fence) catches the case that a lock cannot: a
process that was frozen, lost its folder to a successor, and wakes up still believing that it owns it. Every claim
increments the integer in `<role>.fence`; a write whose claim holds a smaller one is refused.

Invariant: of all processes that ever claimed a folder in a role, only the latest gets past `check`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType

import msgspec

from noonsight.logbook import record
from noonsight.logbook.write import LogbookError, refusal, write_atomic

ROLES = ("stage", "worker", "runner")


class Held(RuntimeError):
    """Another living process owns the folder; the message names it."""


class Fenced(RuntimeError):
    """This process lost the folder to a later one and must not write."""


class Holder(record.Record, kw_only=True):
    """Who holds a lock; the content of the lock file."""

    pid: int
    host: str
    at: str


class Claim:
    """Ownership of a folder in one role. A context manager; leaving it gives the folder back."""

    def __init__(self, out: Path, role: str, fence: int, handle: int | None):
        self.out, self.role, self.fence, self._handle = out, role, fence, handle

    def check(self) -> None:
        """Raise `Fenced` unless this claim is the latest of its role."""
        current = _read_fence(self.out, self.role)
        if current != self.fence:
            raise Fenced(
                f"this process (pid {os.getpid()}) lost {self.out}: it claimed the folder as {self.role} number "
                f"{self.fence}, and number {current} owns it now. Nothing was written; end this process."
            )

    def release(self) -> None:
        """Give the lock back; a lent claim belongs to its lender and stays."""
        if self._handle is not None:
            _LENT.pop((self.out, self.role), None)
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_LENT: dict[tuple[Path, str], Claim] = {}


def claim(out: Path, role: str = "stage", *, wait_s: float = 0.0, lend: bool = False) -> Claim:
    """Take the lock of `out` for `role` and a new fence token, waiting up to `wait_s` seconds for a dying holder.

    With `lend`, code of the same process that claims the same folder and role gets the same claim: so the process that
    runs a stage owns its folder, and a stage function may claim it in a notebook and under a plan alike.
    Raises `Held`, naming process and host, or `LogbookError` when the folder cannot be written.
    """
    assert role in ROLES, f"unknown role {role!r}; roles are {ROLES}"
    out = Path(out).absolute()
    if lent := _LENT.get((out, role)):
        return Claim(out, role, lent.fence, None)
    path = out / f"{role}.lock"
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise refusal("claim", path, error) from error
    try:
        _lock(handle, path, wait_s)
        holder = Holder(pid=os.getpid(), host=socket.gethostname(), at=record.now())
        os.ftruncate(handle, 0)
        os.pwrite(handle, record.encode(holder), 0)
        fence = _read_fence(out, role) + 1
        write_atomic(out / f"{role}.fence", str(fence).encode())
    except BaseException:
        os.close(handle)
        raise
    mine = Claim(out, role, fence, handle)
    if lend:
        _LENT[out, role] = mine
    return mine


def holder(out: Path, role: str = "stage") -> Holder | None:
    """Who holds the lock of `out` now, or None. A dead process holds nothing, whatever its files say."""
    path = Path(out) / f"{role}.lock"
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named(path)
    finally:
        os.close(handle)
    return None


def _lock(handle: int, path: Path, wait_s: float) -> None:
    # Even without patience try for 50 ms: `holder` takes the lock for a moment to see whether it is free.
    deadline = time.monotonic() + max(wait_s, 0.05)
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                who = _named(path)
                raise Held(
                    f"{path.parent} is in use: process {who.pid} on {who.host} has held it as {path.stem} since "
                    f"{who.at}. Wait for it, or end it with: kill {who.pid}"
                ) from None
            time.sleep(0.01)


def _named(path: Path) -> Holder:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    return Holder(pid=0, host="unknown", at="just now")


def _read_fence(out: Path, role: str) -> int:
    path = out / f"{role}.fence"
    try:
        return int(path.read_bytes())
    except FileNotFoundError:
        return 0
    except ValueError:
        raise LogbookError(
            f"cannot read {path}: it holds no number, so nobody knows who owns the folder. Make sure that no process "
            f"works there, write 1000 into that file, and give the same command again."
        ) from None
