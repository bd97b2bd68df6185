"""The meeting place of a gang's ranks: `python -m noonsight.train.recover.coordinator ADDRESS COUNT`.

JAX would let rank 0 carry it; as a process of its own it outlives any rank (heartbeats of 10 s). A new gang gets a new one.
"""

from __future__ import annotations

import signal
import sys

from jaxlib import _jax

from noonsight.train.recover.worker import die_with_parent

HEARTBEAT_S = 10


def main(address: str, count: int) -> None:
    """Serve until killed."""
    die_with_parent()
    service = _jax.get_distributed_runtime_service(
        address, count, heartbeat_timeout=HEARTBEAT_S, shutdown_timeout=HEARTBEAT_S, recoverable=True
    )
    while service:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
