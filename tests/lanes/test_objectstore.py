"""Checkpoints in an object store: a run keeps them there, loses its machine, and goes on from them.

Run by `.ci/lanes/objectstore.sh`, which installs s3fs and moto, a server that speaks S3; skipped where they are not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Fault, Placement, encode
from noonsight.logbook.write import Writer
from noonsight.train import checkpoint
from noonsight.train.checkpoint import saving
from noonsight.train.recover import supervise

pytestmark = [
    pytest.mark.lane("objectstore"),
    pytest.mark.skipif(
        importlib.util.find_spec("moto") is None or importlib.util.find_spec("s3fs") is None,
        reason="moto and s3fs are not installed",
    ),
]


@pytest.fixture(scope="module")
def address():
    """A bucket on a server of its own, and the variables by which every process finds it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    told = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "noon",
        "AWS_SECRET_ACCESS_KEY": "noon",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir("voyage")
        yield "s3://voyage/kept"
    server.stop()


def root(address, out):
    return checkpoint.root_of(out, Placement(checkpoints=address))


def save(place, owned, step, value=1.0, kind="permanent"):
    slices = checkpoint.to_host({"w": jnp.full((200, 100), value), "step": jnp.int32(step)})
    return checkpoint.write(place, slices, step=step, kind=kind, tokens=0, claim=owned, attempt=1)


def test_kept_there_damaged_there_and_pruned_there(address, tmp_path):
    place = root(address, tmp_path / "a")
    with claim(tmp_path, "worker") as owned:
        assert checkpoint.newest(place) is None and checkpoint.writable(place, 1) is None
        save(place, owned, 10)
        path = save(place, owned, 20, 2.0)
        target = {"w": jnp.zeros((200, 100)), "step": jnp.int32(0)}
        np.testing.assert_array_equal(checkpoint.restore(checkpoint.newest(place).path, target)["w"], 2.0)
        part = next(each for each in path.iterdir() if each.name.startswith("part_"))
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(bytes(data))
        found = checkpoint.newest(place)
        assert found.manifest.step == 10 and "does not match its checksum" in found.rejected[0]
        keeper = checkpoint.Saver(place, owned, attempt=1, on_saved=lambda *_: None)
        for step in (30, 40):
            keeper.save({"w": jnp.ones(3)}, step=step, kind="temporary", tokens=0)
            keeper.join()
        assert [path.name[-2:] for path in checkpoint.folders(place)] == ["10", "20", "40"]


KILLED = """
import os, signal, sys
from pathlib import Path
from noonsight.logbook.claim import claim
from noonsight.train.checkpoint import saving
from tests.lanes.test_objectstore import root, save

out = Path(sys.argv[2])
saving.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with claim(out.parent, "worker", wait_s=5) as owned:
    save(root(sys.argv[1], out), owned, 20)
"""


def test_killed_before_the_mark_it_is_nothing(address, tmp_path):
    out = tmp_path / "b"
    place = root(address, out)
    with claim(tmp_path, "worker") as owned:
        save(place, owned, 10)
    done = subprocess.run([sys.executable, "-c", KILLED, address, str(out)], env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == -signal.SIGKILL
    assert checkpoint.newest(place).manifest.step == 10
    with claim(tmp_path, "worker") as owned:
        path = save(place, owned, 20)
    assert checkpoint.newest(place).manifest.step == 20 and len(list(path.iterdir())) == 2, "nothing torn is left"


def test_two_ranks_write_one_checkpoint(address, tmp_path):
    place = root(address, tmp_path / "c")
    whole = np.arange(8, dtype=np.float32)
    with claim(tmp_path, "worker") as owned:
        for rank in (1, 0):
            slices = [saving.Slice(path="w", start=(4 * rank,), of=(8,), data=whole[4 * rank : 4 * rank + 4])]
            told = {"step": 5, "kind": "permanent", "tokens": 0, "attempt": 1, "claim": owned}
            checkpoint.write(place, slices, rank=rank, num_ranks=2, **told)
    np.testing.assert_array_equal(checkpoint.restore(checkpoint.newest(place).path, {"w": jnp.zeros(8)})["w"], whole)


def test_a_run_goes_on_from_there_on_another_machine(address, tmp_path):
    """It is killed once, then its whole folder is lost but for what says what to run, as with a node."""

    def lived(out, **placement):
        out.mkdir(parents=True, exist_ok=True)
        (out / "toy.json").write_text(json.dumps({"num_steps": 30}))
        (out / "placement.json").write_bytes(encode(Placement(**placement)))
        with claim(out, "stage") as owned:
            return supervise([sys.executable, "-m", "tests.train.toy"], out, writer=Writer(out, owned))

    calm = lived(tmp_path / "calm" / "run")
    out = tmp_path / "storm" / "run"
    killed = lived(out, checkpoints=address, faults=(Fault(kind="kill", at_step=21),))
    assert killed["params_hash"] == calm["params_hash"] and killed["checkpoint"].startswith("s3://")
    assert not (out / "checkpoints").exists()
    last = checkpoint.newest(root(address, out)).path
    checkpoint.remove(last)
    shutil.rmtree(out)
    again = lived(out, checkpoints=address)
    assert again["params_hash"] == calm["params_hash"]
    assert [event.step for event in read.events(out) if event.kind == "restored"] == [20]
