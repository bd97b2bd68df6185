"""One owner per folder: a live one keeps others out, a dead one holds nothing, an old one is refused."""

import os
import signal
import subprocess
import sys

import pytest

from noonsight.logbook import read, record
from noonsight.logbook.claim import Fenced, Held, claim, holder
from noonsight.logbook.write import Writer

HOLD = (
    "import sys; from noonsight.logbook.claim import claim; c = claim(sys.argv[1]); print('held', flush=True); input()"
)


@pytest.fixture
def owner(tmp_path):
    """A living process that owns `tmp_path` as stage."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_second_owner_is_refused_by_name_and_a_dead_one_is_not_an_owner(tmp_path, owner):
    with pytest.raises(Held, match=f"process {owner.pid} on "):
        claim(tmp_path)
    assert holder(tmp_path).pid == owner.pid
    with claim(tmp_path, "worker") as other_role:
        assert other_role.fence == 1
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert holder(tmp_path) is None
    with claim(tmp_path) as mine:
        assert mine.fence == 2


def test_running_without_a_process_is_read_as_interrupted(tmp_path, owner):
    run = record.Run(
        experiment="e", name="n", version="1", fingerprint="f", function="m:f", status="running", started_at="t"
    )
    (tmp_path / "record.json").write_bytes(record.encode(run))
    assert read.run(tmp_path).status == "running"
    owner.kill()
    owner.wait()
    assert read.run(tmp_path).status == "interrupted"


def test_the_fence_refuses_every_write_of_the_old_owner(tmp_path):
    old = claim(tmp_path)
    writer = Writer(tmp_path, old)
    writer.event("start", "first owner")
    old.release()  # as when a frozen host loses its lock without the process noticing
    new = claim(tmp_path)
    run = record.Run(
        experiment="e", name="n", version="1", fingerprint="f", function="m:f", status="done", started_at="t"
    )
    for write in (
        lambda: writer.event("late", "must not appear"),
        lambda: writer.metrics(1, {"loss": 1.0}),
        lambda: writer.progress(1, 2),
        lambda: writer.record(run),
    ):
        with pytest.raises(Fenced, match="number 2 owns it"):
            write()
    assert [event.kind for event in read.events(tmp_path)] == ["start"]
    assert not (tmp_path / "record.json").exists() and not (tmp_path / "metrics.jsonl").exists()
    Writer(tmp_path, new).event("start", "second owner")
    new.release()


def test_a_lent_claim_is_shared_inside_the_process_only(tmp_path):
    with claim(tmp_path, lend=True) as lender:
        with claim(tmp_path) as borrowed:
            assert borrowed.fence == lender.fence
        assert holder(tmp_path).pid == os.getpid()  # leaving the borrowed claim gave nothing back
        refused = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True)
        assert refused.returncode != 0 and "Held" in refused.stderr
    assert holder(tmp_path) is None
