"""The table from symptom to action, and how a worker says by its exit code which line of it applies."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Literal

from noonsight.logbook.claim import Fenced, Held
from noonsight.logbook.write import LogbookError


class Interrupted(BaseException):
    """The process was asked to end."""

    symptom = "interrupted"


class RunStopped(RuntimeError):
    """Training ended for a reason that starting again would only repeat."""


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """One line of the table: how a worker ends, what is done, what a reader is told.

    restart: from the newest checkpoint. skip: the same, and the batches that did it are passed over. pause: wait until
    the storage takes writes again, then restart. stop: say why.
    """

    action: Literal["restart", "skip", "pause", "stop"]
    text: str
    exit_code: int | None = None  # the worker's way of saying it; None: seen from outside


SYMPTOMS: dict[str, Symptom] = {
    "killed": Symptom(action="restart", text="The worker was killed from outside"),
    "crash": Symptom(action="restart", text="The worker crashed"),
    "hang": Symptom(action="restart", text="The worker showed no sign of life and was killed"),
    "out-of-memory": Symptom(action="restart", text="The worker ran out of memory", exit_code=71),
    "interrupted": Symptom(action="restart", text="The worker was asked to end and saved its state", exit_code=75),
    "non-finite": Symptom(action="skip", text="The loss or the gradient is not finite", exit_code=65),
    "bad-state": Symptom(action="restart", text="A state with numbers that are not finite was not kept", exit_code=69),
    "spike": Symptom(action="skip", text="The loss jumped far out of its usual range", exit_code=68),
    "storage": Symptom(action="pause", text="The storage takes no writes; the last checkpoint is kept", exit_code=74),
    "dropped": Symptom(action="stop", text="The placement's exchange dropped what the config's does not", exit_code=67),
    "first-step": Symptom(action="stop", text="The first step is not what the reference computes", exit_code=70),
    "no-checkpoint": Symptom(action="stop", text="Checkpoints exist but none can be trusted", exit_code=66),
    "fenced": Symptom(action="stop", text="Another process owns the folder", exit_code=77),
}

REPEATS = 3
"""The same symptom at the same step this many times in a row, or this many batches in a row passed over: starting again
does not help.
"""

_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


def exit_code(error: BaseException) -> int:
    """How a worker says what ended it: by the error's own `symptom`, or its kind; 1 for what the table does not know."""
    symptom = getattr(error, "symptom", None)
    if isinstance(error, (Fenced, Held)):
        symptom = "fenced"
    elif isinstance(error, KeyboardInterrupt):
        symptom = "interrupted"
    elif isinstance(error, OSError) and error.errno in _STORAGE:
        symptom = symptom or "storage"
    elif isinstance(error, LogbookError) and error.errno is not None:  # it could not be written, for whatever reason
        symptom = "storage"
    elif isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        symptom = "out-of-memory"
    return (SYMPTOMS[symptom].exit_code if symptom else None) or 1


def symptom_of(code: int) -> str:
    """What the exit code of a worker means; "done" for 0."""
    if code == 0:
        return "done"
    if code == -9:
        return "killed"
    return next((name for name, symptom in SYMPTOMS.items() if symptom.exit_code == code), "crash")
