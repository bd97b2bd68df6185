"""Supervisor and worker: what stops a run, seen from outside and from inside.

`supervise` keeps the processes of a run alive and decides by one table (`SYMPTOMS`) what the end of one means; `work` is what such
a process is. None of these modules needs JAX.
"""

from noonsight.train.recover.supervisor import resumed_bit_identical, supervise
from noonsight.train.recover.symptoms import SYMPTOMS, Interrupted, RunStopped, exit_code
from noonsight.train.recover.worker import die_with_parent, work

__all__ = [
    "SYMPTOMS",
    "Interrupted",
    "RunStopped",
    "die_with_parent",
    "exit_code",
    "resumed_bit_identical",
    "supervise",
    "work",
]
