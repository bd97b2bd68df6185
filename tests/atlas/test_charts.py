"""What the charts of a run page hold: every metric once, every point, the history of rewinds, the band and its sights."""

from __future__ import annotations

import base64
import math
import shutil
import subprocess
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.atlas import charts
from noonsight.atlas.page import HERE
from noonsight.atlas.voyage import Table, open_folder
from noonsight.logbook.record import Event, encode


def write_metrics(folder: Path, rows: list[tuple[int, int, dict[str, float]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        encode(
            {
                "step": step,
                "attempt": attempt,
                "at": f"2026-12-01T12:{place // 60:02d}:{place % 60:02d}+00:00",
                **values,
            }
        )
        for place, (step, attempt, values) in enumerate(rows)
    ]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def unpack(points: dict) -> list[tuple[int, float]]:
    values = array("f", base64.b64decode(points["values"]))
    steps = points["steps"]
    if "base64" in steps:
        return list(zip(array("i", base64.b64decode(steps["base64"])), values))
    return [(steps["first"] + place * steps["stride"], value) for place, value in enumerate(values)]


def test_every_metric_is_drawn_once_and_an_unknown_one_too(tmp_path: Path):
    names = [
        "loss",
        "norm/grad",
        "norm/grad/adam",
        "rate/adam",
        "router/load_max_over_mean",
        "eval/bits_per_byte",
        "strange",
    ]
    write_metrics(tmp_path, [(step, 0, dict.fromkeys(names, 1.0)) for step in range(3)])
    lines = charts.read_lines(open_folder(tmp_path))
    drawn = charts.panel_charts(lines)
    assert sum(len(chart["series"]) for chart in drawn) == len(names)
    labels = {chart["id"]: [series["label"] for series in chart["series"]] for chart in drawn}
    assert labels["gradient"] == ["all", "adam"]
    assert labels["other"] == ["strange"]


def test_a_rewound_stretch_is_kept_as_a_ghost_beside_the_surviving_line(tmp_path: Path):
    first = [(step, 0, {"loss": 9.0 - step}) for step in range(6)]
    second = [(step, 1, {"loss": 5.0 - step}) for step in range(4, 8)]
    write_metrics(tmp_path, first + second)
    (series,) = charts.panel_charts(charts.read_lines(open_folder(tmp_path)))[0]["series"]
    assert unpack(series) == [(0, 9.0), (1, 8.0), (2, 7.0), (3, 6.0), (4, 1.0), (5, 0.0), (6, -1.0), (7, -2.0)]
    assert [unpack(ghost) for ghost in series["ghosts"]] == [[(4, 5.0), (5, 4.0)]]


def test_values_that_are_not_finite_stay_and_are_counted(tmp_path: Path):
    write_metrics(tmp_path, [(0, 0, {"loss": 2.0}), (1, 0, {"loss": math.nan}), (2, 0, {"loss": math.inf})])
    (series,) = charts.panel_charts(charts.read_lines(open_folder(tmp_path)))[0]["series"]
    assert series["count"] == 3 and series["not_finite"] == 2
    assert series["summary"] == {"first": 2.0, "last": 2.0, "low": 2.0, "high": 2.0}


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**30), st.floats(width=32, allow_nan=False)), max_size=40, unique_by=lambda p: p[0]
    )
)
def test_points_survive_their_journey(points: list[tuple[int, float]]):
    points.sort()
    steps, values = [step for step, _ in points], [value for _, value in points]
    assert unpack(charts._points(steps, values)) == points


def test_the_band_is_held_against_the_same_means(tmp_path: Path):
    write_metrics(tmp_path, [(step, 0, {"loss": float(step), "tokens": 8.0 * (step + 1)}) for step in range(100)])
    rows = [[0.5, 0.1, 40.0, 45.0, 50.0], [1.0, 0.1, 90.0, 95.0, 99.0]]
    band = Table(columns=["progress", "window", "low", "median", "high"], rows=rows)
    chart = charts.course_chart(lines := charts.read_lines(open_folder(tmp_path)), [], band)
    assert chart["band"]["steps"] == [49, 99]
    assert chart["band"]["seen"] == [sum(range(40, 50)) / 10, sum(range(90, 100)) / 10]
    assert lines.axes["tokens_per_step"] == 8.0 and lines.axes["time"]["seconds"][-1] == 99.0
    write_metrics(tmp_path / "young", [(step, 0, {"loss": 1.0}) for step in range(60)])
    (tmp_path / "young/progress.jsonl").write_bytes(
        encode({"step": 60, "of": 100, "at": "2026-12-01T12:00:00+00:00", "monotonic": 1.0}) + b"\n"
    )
    young = charts.course_chart(charts.read_lines(open_folder(tmp_path / "young")), [], band)
    assert young["band"]["seen"] == [1.0, None]


def test_what_happens_between_a_fault_and_its_restart_is_one_incident(tmp_path: Path):
    def event(kind: str, **fields) -> bytes:
        return encode(Event(at="2026-12-01T12:00:00+00:00", kind=kind, text=kind, **fields)) + b"\n"

    (tmp_path / "events.jsonl").write_bytes(
        event("checkpoint", step=3)
        + event("kill-injected", cause="injected", step=5)
        + event("killed", cause="injected", step=6)
        + event("restart", cause="injected", step=6, steps_lost=2, seconds_lost=1.5)
        + event("sentinel", cause="gradient-jump", step=7)
        + event("hang", cause="hang", step=9)
    )
    kill, hang = charts.incidents(open_folder(tmp_path))
    assert (kill["step"], kill["planned"], kill["recovered"], kill["steps_lost"], kill["seconds_lost"]) == (
        5,
        True,
        True,
        2,
        1.5,
    )
    assert (hang["kind"], hang["planned"], hang["recovered"], hang["steps_lost"]) == ("hang", False, False, None)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node; the browser lane runs the same script")
def test_thinning_keeps_every_spike_and_zoom_shows_every_point():
    script = (
        (HERE / "assets" / "points.js").read_text()
        + """
      const n = 1000000, xs = Float64Array.from({ length: n }, (_, i) => i), ys = new Float32Array(n);
      ys[123457] = 7; ys[123999] = -3; ys[500000] = NaN;
      const [x, y] = noonPoints.thin(xs, ys, 0, n, 800);
      const at = (v) => x[y.indexOf(v)];
      const near = noonPoints.thin(xs, ys, 123000, 124500, 800);
      console.log(JSON.stringify([x.length <= 1602, at(7), at(-3), near[0].length, x.every((v, i) => !i || v > x[i - 1])]));
    """
    )
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[true,123457,123999,1500,true]"
