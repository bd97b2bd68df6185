"""A rank of a gang without a model: `python -m tests.train.rank_puppet PART OUT`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from noonsight.logbook.record import Artifact, Placement, encode
from noonsight.logbook.write import Writer, write_atomic
from noonsight.train import recover


def play(part: str, out: Path, writer: Writer) -> Artifact:
    """Add over all devices; in the first attempt rank 1 is killed before that; agree on the turn before which all stop."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from noonsight.train.ranks import connect, place_batch, whole

    ranks = connect()
    if ranks.first:
        for step in range(1, 4):
            writer.progress(step, 9, rate=1000.0)
    if writer.attempt == 1 and ranks.rank == 1:
        if part == "killed-and-fewer":
            write_atomic(out / "placement.json", encode(Placement(num_devices=2, hang_floor_s=20.0)))
        os.kill(os.getpid(), signal.SIGKILL)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    placed = place_batch(lambda step, rows=slice(None): np.full((4, 3), 1.0, np.float32)[rows], 4, sharding, ranks)(0)
    add = jax.jit(lambda x: x.sum())
    stopped = 0
    for turn in range(1, 9):
        if "stop" in ranks.next_turn({"stop": ranks.rank == ranks.count - 1 and turn == 3}):
            stopped = turn
            break
        total = float(add(placed))
    assert whole(placed).shape == (4, 3)
    mine = np.full((jax.local_device_count(),), stopped, np.float32)
    every = jax.make_array_from_process_local_data(sharding, mine)
    turns = [int(each) for each in whole(every)]
    if ranks.first:
        writer.progress(4, 9, rate=1000.0)
    return Artifact(
        facts={"total": total, "attempt": writer.attempt, "stopped": turns[::2], "devices": jax.device_count()}
    )


if __name__ == "__main__":
    recover.work(
        lambda out, claim, placement: play(sys.argv[1], out, Writer(out, claim, claim.fence)), Path(sys.argv[2])
    )
