"""A worker without a model: `python -m tests.train.puppet PLAY OUT` acts one part, for the supervisor to judge."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

from noonsight.logbook.record import Artifact
from noonsight.logbook.write import Writer
from noonsight.train import recover
from noonsight.train.recover import skips


class NonFinite(RuntimeError):
    """Says its symptom like the loop's."""

    symptom = "non-finite"


class Spike(RuntimeError):
    """Says its symptom like the loop's."""

    symptom = "spike"


class NoCheckpoint(RuntimeError):
    """Says its symptom like a restore."""

    symptom = "no-checkpoint"


def play(part: str, out: Path, writer: Writer) -> Artifact:
    """`part`-first means: only in the first attempt, well behaved afterwards."""
    first = writer.attempt == 1
    writer.progress(0, 9, phase="compile")
    if part == "slow-compile":
        time.sleep(0.8)  # four times the hang floor of the test
    for step in range(1, 4):
        writer.progress(step, 9, rate=1000.0)
    if part == "hang-first" and first:
        time.sleep(60)
    if part == "stop-first" and first:
        os.kill(os.getpid(), signal.SIGSTOP)
    if part == "crash":
        raise KeyError("the same every time")
    if part == "crash-first" and first:
        raise KeyError("only once")
    if part == "memory-first" and first:
        raise MemoryError
    if part == "segfault-first" and first:
        os.kill(os.getpid(), signal.SIGSEGV)
    if part == "disk-full-first" and first:
        raise OSError(errno.ENOSPC, "No space left on device")
    if part == "no-checkpoint":
        raise NoCheckpoint("none verifies")
    if part == "non-finite":  # a worker that does not pass over what it is told to, or whose every batch is bad
        bad = 3 + len(skips.skips(out))
        writer.event("bad-steps", f"Step {bad} is not finite.", cause="non-finite", step=bad, data={"steps": [bad]})
        raise NonFinite("loss is nan")
    if part == "spike-first" and first:
        writer.event("bad-steps", "The loss of step 4 is 9.", cause="spike", step=3, data={"steps": [3, 4]})
        raise Spike("loss is 9")
    if part == "non-finite-silent":
        raise NonFinite("loss is nan")
    if part == "wait":
        signal.signal(signal.SIGTERM, lambda *_: _leave())
        while True:
            time.sleep(0.05)
    for step in range(4, 10):
        writer.progress(step, 9, rate=1000.0)
    return Artifact(facts={"attempt": writer.attempt})


def _leave() -> None:
    raise recover.Interrupted


if __name__ == "__main__":
    recover.work(
        lambda out, claim, placement: play(sys.argv[1], out, Writer(out, claim, claim.fence)), Path(sys.argv[2])
    )
