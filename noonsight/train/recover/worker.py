"""What a worker is: it dies with its parent, owns its folder, and says by its exit code why it gave up.

A run has one worker, or several ranks that share its devices. Rank 0 owns the folder's `worker` claim; the others hold
the same fence token and check it before they write.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from noonsight.logbook import read
from noonsight.logbook.claim import Claim, claim
from noonsight.logbook.record import Artifact, Placement, encode
from noonsight.logbook.write import write_atomic
from noonsight.train.recover.symptoms import exit_code

PARENT, FENCE = "NOONSIGHT_PARENT", "NOONSIGHT_FENCE"
RANK, RANKS, COORDINATOR = "NOONSIGHT_RANK", "NOONSIGHT_RANKS", "NOONSIGHT_COORDINATOR"
STACKS = signal.SIGUSR2
"""Asks a worker to write the stack of every thread to its log."""


def work(body: Callable[[Path, Claim, Placement], Artifact], out: Path) -> NoReturn:
    """Be a worker: die with the parent, own `out`, run `body(out, claim, placement)`, exit with a code of the table.

    What `body` returns in rank 0 becomes `result.json`, which the supervisor reads. The exit is abrupt once that is on
    the disk: a stuck thread of a library must keep neither a failed worker alive nor a finished one.
    """
    die_with_parent()
    faulthandler.register(STACKS, all_threads=True, chain=False)
    rank = int(os.environ.get(RANK, "0"))
    try:
        with claim(out, "worker", wait_s=10.0) if rank == 0 else _shared_claim(out) as owned:
            artifact = body(out, owned, read.placement(out))
            owned.check()
            if rank == 0:
                write_atomic(out / "result.json", encode(artifact))
    except BaseException as error:
        code = exit_code(error)
        with contextlib.suppress(OSError):  # a full disk takes no log either
            traceback.print_exc()
    else:
        code = 0
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _shared_claim(out: Path) -> Claim:
    """Rank 0's claim of the same gang: whoever claims the folder after it fences them all."""
    return Claim(out, "worker", int(os.environ[FENCE]), None)


def die_with_parent() -> None:
    """End this process when its parent ends, however that happens.

    The kernel does it on Linux; elsewhere a thread looks once a second.
    """
    expected = int(os.environ.get(PARENT) or os.getppid())
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == expected:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != expected:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=look, name="parent-watch", daemon=True).start()
