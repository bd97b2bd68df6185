"""Figures, sentences and drawings: what the atlas says in words and where it puts things."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.atlas import story
from noonsight.atlas.graph import HEIGHT, WIDTH, lay_out
from noonsight.atlas.pages import predictions
from noonsight.atlas.sight import sight
from noonsight.logbook.record import Event, Run
from tests.atlas.sample import _prediction, _verdict, write_sample


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0314, "2.031"), (1348, "1,348"), (-0.25, "−0.2500"), (2.4e-6, "2.40e−6"), (math.nan, "not a number"), (True, "yes"), (None, "–"), (0.0, "0")],
)  # fmt: skip
def test_numbers(value: object, text: str):
    assert story.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.12, "4.1 s"), (59.7, "1 min"), (200.4, "3 min 20 s"), (7260, "2 h 1 min"), (None, "–")]
)
def test_durations(seconds: float | None, text: str):
    assert story.duration(seconds) == text


def test_ends_of_an_interval_have_the_same_decimals():
    assert story.span(1.9823, 2.0941) == "1.982 to 2.094"
    assert story.span(0.5, 12.0) == "0.5 to 12.0"


def run(**changes: object) -> Run:
    record = Run(
        experiment="e",
        name="n",
        version="1",
        fingerprint="f",
        function="m:f",
        status="done",
        started_at="",
        seconds=61.0,
    )
    return msgspec.structs.replace(record, **changes)


def event(kind: str, **fields: object) -> Event:
    return Event(at="", kind=kind, text=kind, **fields)


def test_the_status_sentence_tells_faults_from_drills():
    facts = {"num_steps": 10, "bits_per_byte": 2.5}
    plain = story.status_sentence(run(facts=facts), None, [])
    assert plain == "Trained 10 steps in 1 min 1 s, without an interruption; 2.500 bits per byte."
    faults = [event("crash", cause="crash", step=3), event("restart", cause="crash"), event("restart", cause="hang")]
    told = story.status_sentence(run(facts={**facts, "resumed_bit_identical": False}), None, faults)
    assert "stopped twice by a fault and resumed, not bit-identically" in told
    prediction = _prediction("e")
    missed = msgspec.structs.replace(_verdict(prediction), result=2.3, inside=False)
    assert "2.300 bits per byte, above the predicted 1.982 to 2.094." in story.status_sentence(
        run(facts=facts), None, [], prediction, missed
    )
    assert story.status_sentence(run(status="failed", error="Traceback\nValueError: no"), None, []).endswith(
        "ValueError: no"
    )


@settings(max_examples=40)
@given(st.floats(-50, 50), st.floats(1e-4, 20), st.floats(-60, 60))
def test_a_sight_stays_inside_its_drawing_and_in_order(mean: float, std: float, z: float):
    prediction = msgspec.structs.replace(
        _prediction("e"),
        components=((1.0, mean, std),),
        median=mean,
        interval=(mean - 1.645 * std, mean + 1.645 * std),
    )
    result = mean + z * std
    verdict = msgspec.structs.replace(_verdict(prediction), result=result)
    found = sight(prediction, verdict)
    assert 0 <= found["left"] < found["median"] < found["right"] <= 100
    assert 0 <= found["observed"] <= 100
    if abs(abs(z) - 1.645) > 0.01:
        assert (found["left"] <= found["observed"] <= found["right"]) == (abs(z) < 1.645)
    heights = [float(point.split()[1]) for point in found["curve"][1:].split(" L")]
    assert min(heights) == pytest.approx(8, abs=1)  # the peak is drawn, however narrow
    assert 1 <= len(found["ticks"]) <= 7 and all(-0.01 <= tick["at"] <= 100.01 for tick in found["ticks"])


@st.composite
def graphs(draw) -> tuple[list[str], list[tuple[str, str]]]:
    stages = [f"s{place}@1" for place in range(draw(st.integers(1, 12)))]
    pairs = [(start, end) for place, end in enumerate(stages) for start in stages[:place]]
    return stages, draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []


@settings(max_examples=60)
@given(graphs())
def test_edges_go_right_and_no_two_boxes_touch(graph: tuple[list[str], list[tuple[str, str]]]):
    stages, edges = graph
    drawing = lay_out(stages, edges)
    box = {node["stage"]: (node["x"], node["y"]) for node in drawing["nodes"]}
    assert set(box) == set(stages)
    assert all(box[start][0] + WIDTH <= box[end][0] for start, end in edges)
    places = list(box.values())
    for place, (x, y) in enumerate(places):
        assert 0 <= x <= drawing["width"] - WIDTH and 0 <= y <= drawing["height"] - HEIGHT + 1
        assert all(abs(x - x1) >= WIDTH or abs(y - y1) >= HEIGHT for x1, y1 in places[place + 1 :])


def test_the_ledger_holds_and_a_changed_word_is_seen(tmp_path: Path):
    write_sample(tmp_path, steps=40)
    data = predictions.collect(tmp_path)
    assert data["sentence"] == (
        "One prediction frozen, one scored, one of one inside the 90 % interval; the chain of hashes holds."
    )
    assert data["summary"]["gain"] == pytest.approx(2.31 - 0.72)
    frozen = tmp_path / "miniature/forecast@1/prediction.json"
    frozen.write_text(frozen.read_text().replace('"median":2.036', '"median":2.03'))
    assert predictions.collect(tmp_path)["sentence"].endswith("one prediction changed since it was hashed.")
    ledger = tmp_path / "predictions.jsonl"
    ledger.write_text(ledger.read_text().replace('"index":0', '"index":1'))
    broken = predictions.collect(tmp_path)
    assert "chain is broken" in broken["sentence"] and predictions.render(broken)


def test_a_prediction_outside_the_chain_is_reported(tmp_path: Path):
    write_sample(tmp_path, steps=40)
    (tmp_path / "predictions.jsonl").unlink()
    data = predictions.collect(tmp_path)
    assert data["loose"] == ["target@1"]
    assert data["sentence"] == "No predictions frozen, none scored; one prediction missing from the chain."
