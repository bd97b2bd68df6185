"""The processes of a run as one: started together, judged together, ended together.

Each rank has its share of the devices and a log of its own. With several, a coordinator stands beside them, a process
of its own, so that the death of no rank takes down the means by which the others learn of it. One rank that ends badly
ends all: what the others say afterwards is only that they lost it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from noonsight.logbook.record import Placement
from noonsight.train.recover.worker import COORDINATOR, FENCE, PARENT, RANK, RANKS, STACKS

EXPLANATION_S = 1.0  # how long a rank that merely crashed waits for one that says more
_SAYS_LITTLE = (1, -signal.SIGABRT)  # what a rank that lost its peers ends with


@dataclass(kw_only=True)
class Gang:
    """The living processes of one attempt."""

    ranks: list[subprocess.Popen[bytes]]
    logs: list[Path]
    log_starts: list[int]  # where in each log this attempt's words begin
    coordinator: subprocess.Popen[bytes] | None = None
    ended: int | None = None  # the rank whose end counts

    def poll(self) -> int | None:
        """None while it works; 0 when every rank is done; else the exit code of the rank whose end explains the others'."""
        codes = [process.poll() for process in self.ranks]
        if not any(codes):
            return 0 if all(code == 0 for code in codes) else None
        deadline = time.monotonic() + EXPLANATION_S
        while all(code in _SAYS_LITTLE for code in codes if code) and None in codes and time.monotonic() < deadline:
            time.sleep(0.02)
            codes = [process.poll() for process in self.ranks]
        self.ended = min(
            (rank for rank, code in enumerate(codes) if code), key=lambda rank: codes[rank] in _SAYS_LITTLE
        )
        self.kill()
        return codes[self.ended]

    def ask(self, number: signal.Signals) -> None:
        """Send a signal to every rank that lives."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def capture_stacks(self, patience_s: float = 1.0) -> None:
        """Let every rank write the stack of its threads to its log; a frozen one cannot, and is not waited for long."""
        before, deadline = [log.stat().st_size for log in self.logs], time.monotonic() + patience_s
        self.ask(STACKS)
        while time.monotonic() < deadline:
            if all(log.stat().st_size > size for log, size in zip(self.logs, before)):
                return
            time.sleep(0.02)

    def end(self, grace_s: float) -> None:
        """Ask every rank to save and end, wait, and kill what is left."""
        self.ask(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for process in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End everything now."""
        for process in [*self.ranks, *([self.coordinator] if self.coordinator else [])]:
            process.kill()
            process.wait()

    def last_words(self, num_bytes: int = 2000) -> str:
        """The end of what the rank that ended (or the first) wrote to its log in this attempt."""
        rank = self.ended or 0
        with self.logs[rank].open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_starts[rank], size - num_bytes))
            return log.read().decode(errors="replace").strip()


def start(command: Sequence[str], out: Path, placement: Placement) -> Gang:
    """Start `command + [out]` once per process of the placement. Raises ValueError when they cannot share its devices."""
    count = placement.num_processes
    if count < 1 or placement.num_devices % count:
        raise ValueError(
            f"the placement shares {placement.num_devices} devices among {count} processes, which leaves a remainder; "
            "give it a number of processes that divides the devices"
        )
    gang = Gang(ranks=[], logs=[], log_starts=[])
    try:
        shared = os.environ | placement.environment | {PARENT: str(os.getpid())}
        shared |= {"XLA_FLAGS": _with_devices(shared.get("XLA_FLAGS", ""), placement.num_devices // count)}
        if count > 1:
            address = f"127.0.0.1:{_free_port()}"
            gang.coordinator = _start_coordinator(address, count, out, shared)
            shared |= {COORDINATOR: address, RANKS: str(count), FENCE: str(_next_fence(out))}
        for rank in range(count):
            log = out / ("worker.log" if rank == 0 else f"worker.{rank}.log")
            process, begins = _open(command, out, log, shared | {RANK: str(rank)})
            gang.ranks.append(process)
            gang.logs.append(log)
            gang.log_starts.append(begins)
    except BaseException:
        gang.kill()
        raise
    return gang


def _open(
    command: Sequence[str], out: Path, log: Path, environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    with log.open("ab") as words:
        begins = words.seek(0, os.SEEK_END)
        # A session of its own: Ctrl-C reaches the supervisor alone, which then asks the worker to save.
        process = subprocess.Popen(
            [*command, str(out)],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env=environment,
            start_new_session=True,
        )
    return process, begins


def _start_coordinator(address: str, count: int, out: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    module = "noonsight.train.recover.coordinator"
    with (out / "coordinator.log").open("ab") as words:
        return subprocess.Popen(
            [sys.executable, "-m", module, address, str(count)],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env=environment,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _next_fence(out: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((out / "worker.fence").read_bytes()) + 1
    return 1


def _with_devices(flags: str, count: int) -> str:
    kept = [flag for flag in flags.split() if "host_platform_device_count" not in flag]
    return " ".join([*kept, f"--xla_force_host_platform_device_count={count}"])
