"""Mixtures of normals against numerical integration; freezing; verdicts that are late or must not be compared."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import norm

from noonsight.logbook.record import Prediction, Run, Verdict, encode
from noonsight.scaling import register

positive = st.floats(0.05, 1.0)
mixtures = st.lists(st.tuples(positive, st.floats(-2, 2), positive), min_size=1, max_size=4).map(
    lambda rows: [(w / math.fsum(r[0] for r in rows), m, s) for w, m, s in rows]
)


@settings(max_examples=25, deadline=None)
@given(mixtures, st.floats(-3, 3))
def test_crps_and_log_score_equal_numerical_integration(components, y):
    def cdf(x):
        return sum(w * norm.cdf(x, m, s) for w, m, s in components)

    below = quad(lambda x: cdf(x) ** 2, -12, y, limit=200)[0]
    above = quad(lambda x: (1 - cdf(x)) ** 2, y, 12, limit=200)[0]
    assert register.crps(components, y) == pytest.approx(below + above, abs=1e-6)
    assert register.log_score(components, y) == pytest.approx(
        logsumexp([math.log(w) + norm.logpdf(y, m, s) for w, m, s in components])
    )


@settings(max_examples=25, deadline=None)
@given(mixtures, st.floats(0.01, 0.99))
def test_quantiles_invert_the_distribution(components, level):
    value = register.quantile(components, level)
    assert sum(w * norm.cdf(value, m, s) for w, m, s in components) == pytest.approx(level, abs=1e-9)
    low, high = register.interval(components, 0.5)
    assert low < register.median(components) < high


def test_a_far_result_has_a_finite_score_and_a_broken_mixture_is_refused():
    assert register.log_score([(1.0, 2.0, 0.001)], 9.0) == pytest.approx(-0.5 * 7000**2, rel=1e-4)
    for broken in ([(0.5, 0.0, 1.0)], [(1.0, 0.0, 0.0)], [(1.0, float("nan"), 1.0)], []):
        with pytest.raises(ValueError):
            register.crps(broken, 0.0)


def _prediction(**change) -> Prediction:
    fields = {
        "experiment": "voyage",
        "run": "pretrain@1",
        "metric": "bits_per_byte",
        "unit": "bits per byte",
        "components": ((0.5, 2.0, 0.04), (0.5, 2.04, 0.05)),
        "median": 2.02,
        "interval": (1.94, 2.11),
        "baseline": (2.4, 0.1),
        "regime": {"tokens": 1_380_352, "train_flops": 6.7e12, "heldout_digest": "abc"},
        "frozen_at": "2026-11-30T10:00:00.000+00:00",
    }
    return register.freeze(Prediction(**{**fields, **change}))


def _run(**change) -> Run:
    fields = {
        "experiment": "voyage",
        "name": "pretrain",
        "version": "1",
        "fingerprint": "f",
        "function": "x",
        "status": "done",
        "started_at": "2026-11-30T10:00:01.000+00:00",
        "facts": {"tokens": 1_380_352, "train_flops": 6.7e12, "heldout_digest": "abc", "bits_per_byte": 2.031},
    }
    return Run(**{**fields, **change})


def test_the_same_prediction_has_the_same_hash_and_any_other_another():
    prediction = _prediction()
    assert prediction.hash == _prediction().hash == register.freeze(prediction).hash
    assert len({prediction.hash, _prediction(median=2.0200001).hash, _prediction(decision="other").hash}) == 3


def test_any_changed_byte_of_a_frozen_prediction_is_detected(tmp_path):
    path = tmp_path / "prediction.json"
    data = encode(_prediction())
    path.write_bytes(data)
    assert register.load_prediction(path) == _prediction()
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] = ord("8") if changed[position] != ord("8") else ord("7")
        path.write_bytes(bytes(changed))
        with pytest.raises((ValueError, msgspec.MsgspecError)):
            register.load_prediction(path)


def test_a_verdict_inside():
    run = _run()
    judged = register.judge(_prediction(), 2.031, facts=run.facts, run=run)
    assert judged.inside and judged.comparable and not judged.late
    assert judged.sentence == "2.031 bits per byte: inside the predicted 1.940 to 2.110, 0.5 % above the median."
    assert judged.log_score > judged.log_score_baseline
    mean, std = register.moments(_prediction().components)
    assert judged.z == pytest.approx((2.031 - mean) / std)


def test_a_verdict_that_is_late_outside_and_of_another_regime():
    run = _run(started_at="2026-11-30T09:00:00+00:00", facts={"tokens": 700_000, "train_flops": 6.7e12})
    judged = register.judge(_prediction(), 2.3, facts=run.facts, run=run)
    assert judged.late and not judged.inside and not judged.comparable
    assert "tokens is 700000, the prediction was for 1380352" in judged.reason
    assert "heldout_digest was not recorded" in judged.reason
    assert "outside" in judged.sentence and "Late" in judged.sentence and "Not comparable" in judged.sentence


def test_a_run_started_under_another_prediction_is_not_comparable():
    run = _run(prediction_hash="0" * 64)
    assert not register.judge(_prediction(), 2.0, facts=run.facts, run=run).comparable
    run = _run(prediction_hash=_prediction().hash)
    assert register.judge(_prediction(), 2.0, facts=run.facts, run=run).comparable


def test_the_stage_writes_the_verdict_of_an_evaluation_and_its_run(tmp_path):
    folders = {name: tmp_path / name for name in ("prediction", "result", "run", "out")}
    for folder in folders.values():
        folder.mkdir()
    (folders["prediction"] / "prediction.json").write_bytes(encode(_prediction()))
    (folders["run"] / "record.json").write_bytes(encode(_run(facts={"tokens": 1_380_352, "train_flops": 6.7e12})))
    evaluation = _run(name="evaluate", facts={"bits_per_byte": 2.0, "heldout_digest": "abc"})
    (folders["result"] / "record.json").write_bytes(encode(evaluation))
    out = folders.pop("out")
    artifact = register.verdict(register.VerdictConfig(), folders, out)
    written = msgspec.json.decode((out / "verdict.json").read_bytes(), type=Verdict)
    assert artifact.facts["verdict"] == "inside" and artifact.facts["comparable"] is True
    assert written.error_percent == pytest.approx(artifact.facts["error_percent"])
    (folders["result"] / "record.json").write_bytes(encode(_run(name="evaluate", facts={})))
    with pytest.raises(ValueError, match="no 'bits_per_byte' among its facts"):
        register.verdict(register.VerdictConfig(), folders, out)
