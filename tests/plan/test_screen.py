"""Few lines, none too wide, each with what is left to wait for."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noonsight.logbook.record import Progress
from noonsight.plan import screen


def beat(**fields):
    return Progress(**{"step": 240, "of": 1350, "at": "t", "monotonic": 0.0, **fields})


@given(st.floats(0, 58 * 86400) | st.floats(59, 61))
def test_durations_are_short_and_never_carry_a_sixty(seconds):
    text = screen.duration(seconds)
    assert len(text) <= 11 and " 60" not in text and not text.startswith("60")


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.21, "4.2 s"), (185, "3 min 05 s"), (7805, "2 h 10 min"), (270000, "3 d 03 h")]
)
def test_durations_read_as_people_say_them(seconds, text):
    assert screen.duration(seconds) == text


def test_a_heartbeat_says_rate_and_time_left():
    assert (
        screen.describe(beat(rate=2.0, text="loss 4.2"), 60) == "240/1,350 steps, 2 steps/s, 9 min 15 s left, loss 4.2"
    )
    assert screen.describe(beat(step=120, of=240), 60) == "120/240 steps, 2 steps/s, 1 min 00 s left"
    assert screen.describe(beat(step=0, phase="compile"), 7) == "compile, 0/1,350 steps"
    assert screen.describe(None, 7) == "running for 7.0 s"


@pytest.mark.parametrize(("seconds", "most"), [(9, 0), (29, 2), (200, 5), (420, 6), (86400, 160)])
def test_a_long_stage_speaks_seldom(monkeypatch, seconds, most):
    clock = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = screen.Screen(stream)
    shown.begin()
    while clock[0] < seconds:
        clock[0] += 1
        shown.progress("[ 1/18] target", beat(text="x" * 200))
    said = stream.getvalue().splitlines()
    assert len(said) <= most and (seconds < 10 or said) and all(len(line) <= 100 for line in said)
