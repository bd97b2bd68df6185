"""Starting, watching and ending the process of a stage. Nothing that is started here outlives the call."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import noonsight
from noonsight.logbook import read, record
from noonsight.logbook.write import refusal
from noonsight.plan.screen import Screen
from noonsight.plan.worker import PARENT

TERMINAL = "NOONSIGHT_TERMINAL"  # environment variable: file descriptor of a pipe to this screen
GRACE_S = 5.0  # between asking a stage to stop and killing it, beyond what its placement grants its own processes
ALLOCATOR = ("glibc.malloc.hugetlb=1",)  # transparent huge pages


def run_worker(out: Path, root: Path, placement: record.Placement, screen: Screen, label: str) -> int:
    """Run the worker of the folder `out` to its end and return its exit code (negative: the signal that killed it).

    What it prints goes to `out/stderr.txt`; its heartbeats go to the screen. When this returns or raises, no process
    of the worker's group is left. Raises `LogbookError` when the disk refuses.
    """
    try:
        errors = open(out / "stderr.txt", "wb")
    except OSError as error:
        raise refusal("write", out / "stderr.txt", error) from error
    started = record.now()
    told, tell = os.pipe()
    os.set_blocking(told, False)
    with errors, open(told, "rb", buffering=0) as notes:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "noonsight.plan.worker", str(out)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env={**environment(root, placement), TERMINAL: str(tell)},
            pass_fds=(tell,),
            start_new_session=True,  # Ctrl-C reaches the runner alone, which then stops the group in order
        )
        os.close(tell)
        try:
            return _watched(child, out, screen, label, started, notes)
        finally:
            _end_group(child, placement.grace_s + GRACE_S)
            _pass_on(notes, screen, label)


def _watched(
    child: subprocess.Popen[bytes], out: Path, screen: Screen, label: str, started: str, notes: io.RawIOBase
) -> int:
    """Show heartbeats, and what the stage says that perhaps no file can hold, until it ends."""
    screen.begin()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=0.2)
        _pass_on(notes, screen, label)
        beat = read.last_progress(out)
        screen.progress(label, beat if beat is not None and beat.at >= started else None)


def _pass_on(notes: io.RawIOBase, screen: Screen, label: str) -> None:
    if said := notes.read(1 << 16):
        screen.say(f"{label}  {said.decode(errors='replace').strip()}")


def environment(root: Path, placement: record.Placement) -> dict[str, str]:
    """Environment of a worker: memory in huge pages where the C library is glibc, one compilation cache per root, as many devices
    as the placement says.
    """
    given = dict(os.environ)
    source = str(Path(noonsight.__file__).parent.parent)
    flags = [flag for flag in given.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    return {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **given,
        "JAX_COMPILATION_CACHE_DIR": str(root / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **({"GLIBC_TUNABLES": with_huge_pages(given.get("GLIBC_TUNABLES", ""))} if _has_glibc() else {}),
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={placement.num_devices}"]),
        "PYTHONPATH": os.pathsep.join([source, *([given["PYTHONPATH"]] if given.get("PYTHONPATH") else [])]),
        PARENT: str(os.getpid()),
        **placement.environment,
    }


def with_huge_pages(tunables: str) -> str:
    """The value of GLIBC_TUNABLES with `ALLOCATOR` added, but for what `tunables` settles already.

    Huge pages are worth a quarter of a step (25M parameters, two cores), because a step takes and gives back hundreds of
    megabytes and fresh pages must be cleared. Keeping them in the one heap (mmap_max=0, arena_max=1) is worth another
    5 % and was tried: the heap falls into pieces, and memory crept from 1.5 to 3.3 GiB within 300 steps.
    """
    given = list(filter(None, tunables.split(":")))
    settled = {each.split("=")[0] for each in given}
    return ":".join(given + [each for each in ALLOCATOR if each.split("=")[0] not in settled])


def _has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # no such question on this system
        return False


def _end_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask, wait, kill. The guard in the group keeps the group's number from being given to anyone else meanwhile."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
