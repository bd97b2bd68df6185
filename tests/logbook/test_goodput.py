"""Where the time went: a partition of the wall clock, held against the clock of a made-up run."""

from datetime import UTC, datetime, timedelta

import pytest

from noonsight.logbook.goodput import UNATTENDED, account
from noonsight.logbook.record import Event, Progress, Run, encode
from noonsight.logbook.write import append_line

START = datetime(2026, 12, 1, tzinfo=UTC)


class Made:
    """A run as its files tell it, on a clock that the test moves."""

    def __init__(self, out):
        self.out, self.now, self.attempt, self.shift, self.boot = out, 0.0, 0, 0.0, 1000.0
        out.mkdir(exist_ok=True)

    def at(self):
        return (START + timedelta(seconds=self.now + self.shift)).isoformat(timespec="milliseconds")

    def wait(self, seconds):
        self.now += seconds
        return self

    def event(self, kind, **fields):
        fields.setdefault("data", {"monotonic": self.boot + self.now})
        append_line(self.out / "events.jsonl", encode(Event(at=self.at(), kind=kind, text=kind, **fields)))
        return self

    def beat(self, step, phase="run"):
        made = Progress(
            step=step, of=100, phase=phase, at=self.at(), monotonic=self.boot + self.now, attempt=self.attempt
        )
        append_line(self.out / "progress.jsonl", encode(made))
        return self

    def measure(self, step, step_s):
        line = {"step": step, "attempt": self.attempt, "at": self.at(), "step_s": step_s}
        append_line(self.out / "metrics.jsonl", encode(line))
        return self

    def live(self, first, last, step_s=1.0):
        """An attempt: two seconds to start, three to compile, then steps, a save after every tenth."""
        self.attempt += 1
        self.beat(0, "start").wait(2).beat(first, "compile").wait(3)
        for step in range(first + 1, last + 1):
            self.wait(step_s).measure(step - 1, step_s).beat(step)
            if step % 10 == 0:
                self.beat(step, "save").wait(0.5).beat(step)
        return self

    def die(self, cause, down_s):
        self.wait(down_s)
        return self.event(cause, cause=cause, data={"attempt": self.attempt})

    def record(self):
        run = Run(
            experiment="e",
            name="r",
            version="1",
            fingerprint="f",
            function="x",
            status="done",
            started_at=START.isoformat(),
            ended_at=self.at(),
        )
        (self.out / "record.json").write_bytes(encode(run))


def test_an_undisturbed_run_is_useful_but_for_starting_and_saving(tmp_path):
    made = Made(tmp_path / "run").event("start").wait(1.5).live(0, 20)
    made.wait(0.25).record()
    found = account(made.out)
    assert found.wall_s == pytest.approx(made.now) and sum(found.parts.values()) == pytest.approx(found.wall_s)
    assert found.parts["start"] == pytest.approx(3.5) and found.parts["compile"] == pytest.approx(3.0)
    assert found.parts["save"] == pytest.approx(1.25) and found.parts["useful"] == pytest.approx(20.0)
    assert found.parts["down"] == found.parts["repeated"] == 0 and found.lost == {}
    assert found.share == pytest.approx(20.0 / made.now)


@pytest.mark.parametrize("jump_s", [0.0, 3600.0, -3600.0])
def test_three_attempts_add_up_whatever_the_date_says(tmp_path, jump_s):
    made = Made(tmp_path / "run").event("start").live(0, 27)
    made.shift = jump_s
    made.wait(5).beat(28)
    made.shift = 0.0
    made.die("hang", 8.0).live(20, 35).die("killed", 0.5).live(30, 40)
    found = account(made.out)
    assert found.wall_s == pytest.approx(made.now, abs=0.01)
    assert found.parts["down"] == pytest.approx(8.5) and found.parts["repeated"] == pytest.approx(8 + 5)
    assert (found.lost["hang"].steps, found.lost["killed"].steps) == (8, 5)
    assert found.lost["hang"].seconds == pytest.approx(8 + 2 + 3 + 8)


def test_time_without_a_supervisor_is_told_apart(tmp_path):
    made = Made(tmp_path / "run").event("start").live(0, 10).wait(600).event("start").wait(1).live(10, 20)
    found = account(made.out)
    assert found.parts[UNATTENDED] == pytest.approx(600) and found.wall_s == pytest.approx(made.now)
    assert found.share == pytest.approx(found.parts["useful"] / (made.now - 600))


def test_another_machine_has_another_monotonic_clock(tmp_path):
    for boot in (2e6, 0.0):
        made = Made(tmp_path / f"{boot}").event("start").live(0, 10).die("killed", 30)
        made.boot = boot
        made.live(10, 20)
        assert account(made.out).wall_s == pytest.approx(made.now, abs=0.01)


def test_torn_and_damaged_lines_are_passed_over_and_nothing_is_nothing(tmp_path):
    assert account(tmp_path) is None
    made = Made(tmp_path / "run").event("start").live(0, 5)
    with (made.out / "progress.jsonl").open("ab") as file:
        file.write(b"{broken\n")
    made.wait(1).beat(6)
    with (made.out / "progress.jsonl").open("ab") as file:
        file.write(b'{"step":7,')
    assert account(made.out).wall_s == pytest.approx(made.now)
