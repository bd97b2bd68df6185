"""Supervisor and worker as real processes: every line of the table from symptom to action."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from noonsight.logbook import claim as claims
from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.goodput import account
from noonsight.logbook.record import Fault, Placement, Progress, encode
from noonsight.logbook.write import LogbookError, Writer
from noonsight.train import checkpoint, recover
from noonsight.train.checkpoint import storage
from noonsight.train.recover import SYMPTOMS, RunStopped, pause, resumed_bit_identical, skips, supervise
from noonsight.train.recover.watch import Tail


def supervised(out, module, *argv, **placement):
    placement = Placement(**{"hang_floor_s": 0.2, **placement})
    out.mkdir(exist_ok=True)
    (out / "placement.json").write_bytes(encode(placement))
    with claim(out, "stage") as owned:
        return supervise([sys.executable, "-m", f"tests.train.{module}", *argv], out, writer=Writer(out, owned))


def kinds(out):
    return [event.kind for event in read.events(out)]


def test_goodput_adds_up_to_the_wall_clock_of_a_frozen_and_restarted_worker(tmp_path):
    began = time.monotonic()
    with claim(tmp_path, "stage") as owned:
        Writer(tmp_path, owned).event("start", "starts", data={"monotonic": began})
    supervised(tmp_path, "puppet", "stop-first")
    wall_s = time.monotonic() - began
    found = account(tmp_path)
    assert found.wall_s == pytest.approx(wall_s, abs=1.0)
    assert sum(found.parts.values()) == pytest.approx(found.wall_s, abs=0.01)
    assert found.parts["down"] >= 0.2 and list(found.lost) == ["hang"] and found.lost["hang"].times == 1


@pytest.mark.parametrize(
    ("part", "symptom"),
    [
        ("crash-first", "crash"),
        ("segfault-first", "crash"),
        ("memory-first", "out-of-memory"),
        ("hang-first", "hang"),
        ("stop-first", "hang"),
    ],
)
def test_what_a_restart_repairs_is_restarted(tmp_path, part, symptom):
    facts = supervised(tmp_path, "puppet", part)
    assert facts["attempt"] == 2 and facts["restarts"] == 1
    assert kinds(tmp_path) == [symptom, "restart"]
    ending, restart = read.events(tmp_path)
    assert ending.step == 3 and ending.cause == symptom
    assert restart.cause == symptom and restart.steps_lost == 3 and restart.seconds_lost > 0
    if part == "hang-first":
        assert "play" in ending.data["log"], "the stack of the hanging worker is in its log"


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("no-checkpoint", "Checkpoints exist but none can be trusted after 3 steps; training stops"),
        ("non-finite-silent", "the worker did not say which batch it was; training stops"),
    ],
)
def test_what_a_restart_would_repeat_is_stopped(tmp_path, part, sentence):
    with pytest.raises(RunStopped, match=sentence):
        supervised(tmp_path, "puppet", part)
    assert kinds(tmp_path)[-2:] == [part.removesuffix("-silent"), "stop"]


def test_the_batches_of_a_spike_are_passed_over(tmp_path):
    facts = supervised(tmp_path, "puppet", "spike-first")
    assert facts["skipped_steps"] == [3, 4] and facts["restarts"] == 1
    assert kinds(tmp_path) == ["bad-steps", "spike", "skipped", "restart"]
    assert skips.skips(tmp_path) == {3: 1, 4: 1}, "by the fence of the attempt that fell over them"


def test_three_bad_batches_in_a_row_are_not_the_data(tmp_path):
    with pytest.raises(RunStopped, match="the batch after 2 that were passed over, so it is not the data"):
        supervised(tmp_path, "puppet", "non-finite")
    assert sorted(skips.skips(tmp_path)) == [3, 4]


def test_storage_that_takes_no_writes_is_waited_for(tmp_path, monkeypatch, capsys):
    answers = iter([f"{tmp_path} is full: 5 bytes are free and 1048576 are needed", "still full", None, None])
    monkeypatch.setattr(storage, "writable", lambda place, num_bytes: next(answers))
    monkeypatch.setattr(pause, "POLL_S", 0.0)
    facts = supervised(tmp_path, "puppet", "disk-full-first")
    assert facts["attempt"] == 2 and kinds(tmp_path) == ["storage", "paused", "restart"]
    said = capsys.readouterr().err
    assert said.count("Paused:") == 1 and "5 bytes are free and 1048576 are needed" in said


def test_the_same_crash_at_the_same_step_stops_after_three(tmp_path):
    with pytest.raises(RunStopped, match=r"3 times in a row without progress.*the same every time"):
        supervised(tmp_path, "puppet", "crash")
    assert kinds(tmp_path).count("crash") == 3 and kinds(tmp_path)[-1] == "stop"


def test_a_slow_compilation_is_no_hang(tmp_path):
    assert supervised(tmp_path, "puppet", "slow-compile")["restarts"] == 0
    assert kinds(tmp_path) == []


def test_the_worker_dies_with_its_supervisor_and_leaves_the_folder_free(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.train.test_recover import supervised;"
        "supervised(Path(sys.argv[1]), 'puppet', 'wait', hang_floor_s=60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    worker = worker_of(tmp_path)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait(timeout=10)
    wait_until(lambda: claims.holder(tmp_path, "worker") is None)
    wait_until(lambda: not alive(worker))


def test_a_supervisor_that_is_asked_to_end_ends_its_worker_first(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.train.test_recover import supervised;"
        "supervised(Path(sys.argv[1]), 'puppet', 'wait', hang_floor_s=60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    worker = worker_of(tmp_path)
    supervisor.terminate()
    assert supervisor.wait(timeout=10) == 128 + signal.SIGTERM
    assert not alive(worker)
    assert "Interrupted" in (tmp_path / "worker.log").read_text()


def worker_of(out):
    wait_until(lambda: (beat := read.last_progress(out)) is not None and beat.step == 3)
    return claims.holder(out, "worker").pid


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_killed_on_purpose_resumes_bit_for_bit_like_an_undisturbed_run(tmp_path):
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy.json").write_text(json.dumps({"evaluate_every": 10, "num_steps": 30}))
    calm = supervised(tmp_path / "calm", "toy", hang_floor_s=30)
    killed = supervised(tmp_path / "killed", "toy", hang_floor_s=30, faults=(Fault(kind="kill", at_step=21),))
    assert (calm["kills"], killed["kills"], killed["restarts"]) == (0, 1, 1)
    assert calm["resumed_bit_identical"] is None and killed["resumed_bit_identical"] is True
    for fact in ("params_hash", "final_loss", "eval", "tokens"):
        assert calm[fact] == killed[fact], fact
    lived = [read.metrics(tmp_path / name)["loss"] for name in ("calm", "killed")]
    assert lived[0].values == lived[1].values and lived[1].steps == tuple(range(30))
    assert {"kill-injected", "killed", "restored", "restart"} <= set(kinds(tmp_path / "killed"))
    restart = next(event for event in read.events(tmp_path / "killed") if event.kind == "restart")
    assert restart.cause == "injected" and restart.steps_lost == 22 - restart.data["resumed_at"]
    everything = read.metrics(tmp_path / "killed", attempts="all")["loss"]
    assert everything.steps.count(21) == 2, "the step of the kill was logged before it, and replayed"
    assert [name for name in kinds(tmp_path / "calm") if name in SYMPTOMS] == []

    # all checkpoints damaged: never from random weights again
    for path in checkpoint.folders(checkpoint.root_of(tmp_path / "calm")):
        (path / "manifest.json").write_text("{}")
    with pytest.raises(RunStopped, match="none can be trusted"):
        supervised(tmp_path / "calm", "toy", hang_floor_s=30)


@pytest.mark.parametrize("bad_step", [20, 23])
def test_a_bad_batch_is_passed_over_and_leaves_no_trace(tmp_path, bad_step):
    """Also where the checkpoint is right before it, so that the next attempt measures nothing at that step."""
    (tmp_path / "toy.json").write_text(json.dumps({"num_steps": 30, "bad_step": bad_step}))
    facts = supervised(tmp_path, "toy", hang_floor_s=30)
    assert facts["skipped_steps"] == [bad_step] and facts["restarts"] == 1
    lived = read.metrics(tmp_path)
    assert lived["loss"].steps == tuple(step for step in range(30) if step != bad_step)
    assert lived["skipped"].steps == (bad_step,) and np.isfinite(lived["loss"].values).all()
    assert {"bad-steps", "non-finite", "skipped", "restored"} <= set(kinds(tmp_path))


def logged(out, losses, hashes, kill=True):
    for attempt, (values, marks) in enumerate(zip(losses, hashes), start=1):
        with claim(out, "worker") as owned:
            writer = Writer(out, owned, attempt)
            for step, value in values.items():
                writer.metrics(step, {"loss": value})
            for step, mark in marks.items():
                writer.event("params-hash", "", step=step, data={"hash": mark})
            if kill and attempt == 1:
                writer.event("kill-injected", "", step=1)
    return resumed_bit_identical(out)


def test_bit_identity_is_judged_on_losses_and_hashes(tmp_path):
    assert logged(tmp_path / "same", [{0: 0.1, 1: 0.2}, {1: 0.2}], [{1: "a"}, {1: "a"}]) is True
    assert logged(tmp_path / "loss", [{0: 0.1, 1: 0.2}, {1: 0.2 + 1e-16 * 4}], [{1: "a"}, {1: "a"}]) is False
    assert logged(tmp_path / "hash", [{0: 0.1, 1: 0.2}, {1: 0.2}], [{1: "a"}, {1: "b"}]) is False
    assert logged(tmp_path / "no-hash", [{0: 0.1, 1: 0.2}, {1: 0.2}], [{1: "a"}, {}]) is False
    assert logged(tmp_path / "no-loss", [{0: 0.1}, {1: 0.2}], [{1: "a"}, {1: "a"}]) is False
    assert logged(tmp_path / "calm", [{0: 0.1, 1: 0.2}], [{1: "a"}], kill=False) is None


def test_exit_codes_tell_the_symptoms_apart():
    full = LogbookError("cannot write")
    full.errno = 28
    errors = {
        "storage": full,
        "out-of-memory": RuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        "no-checkpoint": checkpoint.NoValidCheckpoint("x"),
        "bad-state": checkpoint.NonFiniteState("x"),
        "fenced": claims.Fenced("x"),
        "interrupted": recover.Interrupted(),
    }
    codes = {name: recover.exit_code(error) for name, error in errors.items()}
    assert codes == {name: SYMPTOMS[name].exit_code for name in errors}
    assert len(set(codes.values())) == len(codes) and recover.exit_code(KeyError("x")) == 1


def test_the_supervisor_needs_no_jax():
    code = "import sys, noonsight.train.recover, noonsight.train.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_damaged_heartbeat_is_passed_over(tmp_path):
    good = b'{"step":3,"of":9,"at":"","monotonic":1.0,"attempt":1}\n'
    (tmp_path / "progress.jsonl").write_bytes(b"{broken\n" + good + b'{"step":')
    assert [beat.step for beat in Tail(path=tmp_path / "progress.jsonl", kind=Progress).read()] == [3]
