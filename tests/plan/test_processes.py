"""Kill any process at any moment: nothing is orphaned, no second writer starts, the same command goes on."""

import os
import signal

import pytest

from noonsight.logbook import read
from noonsight.logbook.claim import holder
from noonsight.plan import runner
from tests.plan import conftest
from tests.plan.conftest import gone, until

WAIT = 'Stage(name="wait", version="1", function=wait, config=Config())'


@pytest.fixture
def under_way(voyage):
    """A runner in a process of its own whose third stage waits for ever, with a child of its own."""
    voyage.add(WAIT)
    process = voyage.start()
    try:
        yield voyage, process, voyage.pids()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def assert_goes_on(voyage):
    voyage.edit("time.sleep(600)", "pass")
    voyage.edit('["sleep", "600"]', '["true"]')
    code, said = voyage.run()
    assert code == runner.DONE and "2 done" in said and read.run(voyage.out("wait@1")).status == "done"


def test_kill_of_the_runner_takes_everything_below(under_way):
    voyage, process, pids = under_way
    assert read.run(voyage.out("wait@1")).status == "running" and holder(voyage.out("wait@1")).pid == pids[0]
    process.kill()
    until(lambda: all(gone(pid) for pid in pids))
    until(lambda: holder(voyage.out("wait@1")) is None and holder(voyage.root / "toy", "runner") is None)
    assert read.run(voyage.out("wait@1")).status == "interrupted"
    assert read.experiments(voyage.root)[0].status == "interrupted"
    assert_goes_on(voyage)


def test_kill_of_the_worker_ends_the_run_and_its_children(under_way):
    voyage, process, pids = under_way
    os.kill(pids[0], signal.SIGKILL)
    said, _ = process.communicate()
    assert process.returncode == runner.FAILED
    assert "its process was killed (SIGKILL). The same command goes on from here." in said
    assert all(gone(pid) for pid in pids)
    assert_goes_on(voyage)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_sentence_and_leaves_nothing(under_way, kind):
    voyage, process, pids = under_way
    process.send_signal(kind)
    said, _ = process.communicate()
    assert process.returncode == runner.INTERRUPTED
    assert said.splitlines()[-1] == "stopped; the same command goes on from here." and "Traceback" not in said
    assert all(gone(pid) for pid in pids)
    assert read.run(voyage.out("wait@1")).status == "interrupted"


def test_a_stage_that_cleans_up_when_asked_to_stop_did_not_fail(voyage):
    """As the supervisor of training does: it turns the request into SystemExit, to end its worker in order."""
    voyage.edit("import time\n", "import time\nimport signal, sys\n")
    asked = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))"
    voyage.edit("    child = subprocess", f"    {asked}\n    child = subprocess")
    voyage.add(WAIT)
    process = voyage.start()
    try:
        voyage.pids()
        process.send_signal(signal.SIGINT)
        process.communicate()
    finally:
        process.kill()
    assert process.returncode == runner.INTERRUPTED
    run = read.run(voyage.out("wait@1"))
    assert run.status == "interrupted" and run.error is None and run.seconds > 0
    assert not (voyage.out("wait@1") / "error.txt").exists()


def test_a_second_runner_is_refused_and_the_first_goes_on(under_way):
    voyage, process, pids = under_way
    with pytest.raises(runner.Held, match=f"process {process.pid} on "):
        voyage.run()
    assert process.poll() is None and not any(gone(pid) for pid in pids)


def test_a_stage_that_ignores_the_request_is_killed(voyage, monkeypatch):
    voyage.add(WAIT)
    voyage.edit(
        "    child = subprocess",
        "    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    child = subprocess",
    )
    impatient = "import noonsight.plan.child as child; child.GRACE_S = 0.3; "
    monkeypatch.setattr(conftest, "RUN", impatient + conftest.RUN)
    process = voyage.start()
    pids = voyage.pids()
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == runner.INTERRUPTED and all(gone(pid) for pid in pids)
