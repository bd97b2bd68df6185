"""The posterior over laws and the stage around it: coverage by simulation, invariances, the chain, refusals."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from noonsight.logbook import chain
from noonsight.logbook.record import Run, encode
from noonsight.scaling import backtest, ladder, register
from noonsight.scaling.forecast import ForecastConfig, forecast
from noonsight.scaling.posterior import Points, Prior, infer, to_components

FAST = Prior(num_draws=1024)
RUNGS = ladder.MINIATURE
TARGET = ladder.MINIATURE_TARGET


def _sizes(rungs, losses=None) -> Points:
    """Layers of 10 d^2 parameters, a head of 4096 d: about the miniature's counts."""
    parameters = np.array([10.0 * r.num_layers * r.width**2 for r in rungs])
    tokens = np.array([float(r.num_tokens) for r in rungs])
    flops = 6 * tokens * (parameters + np.array([4096.0 * r.width for r in rungs]))
    return Points(
        parameters=parameters, tokens=tokens, flops=flops, losses=np.ones(len(rungs)) if losses is None else losses
    )


def _truth(rng):
    """A random law L = E + A/N^a + B/D^b with shares and exponents across what is plausible for small models."""
    floor, split = rng.uniform(0.2, 0.65), rng.uniform(0.2, 0.8)
    size, data = rng.uniform(0.25, 0.5), rng.uniform(0.25, 0.5)
    anchor = _sizes(RUNGS[-1:])

    def law(points):
        of_size = split * (points.parameters / anchor.parameters) ** -size
        return 2.6 * (floor + (1 - floor) * (of_size + (1 - split) * (points.tokens / anchor.tokens) ** -data))

    return law


def test_intervals_cover_and_are_narrow_enough():
    """40 random laws with 0.5 % of noise a run: 90 % intervals hold most results and stay useful."""
    rng = np.random.default_rng(11)
    inside, widths, gains = [], [], []
    for _ in range(40):
        law = _truth(rng)
        rungs, target = _sizes(RUNGS), _sizes([TARGET])
        losses = law(rungs) * np.exp(0.005 * rng.normal(size=len(RUNGS)))
        result = float(law(target)[0] * np.exp(0.005 * rng.normal()))
        components = to_components(infer(_sizes(RUNGS, losses), target, FAST, drift=0.004))
        low, high = register.interval(components)
        inside.append(low <= result <= high)
        widths.append((high - low) / register.median(components))
        last, previous = losses[np.argsort(rungs.flops)[-1]], losses[np.argsort(rungs.flops)[-2]]
        baseline = [(1.0, last, max(abs(last - previous), 0.01 * last))]
        gains.append(register.log_score(components, result) - register.log_score(baseline, result))
    assert np.mean(inside) >= 0.8
    assert np.median(widths) < 0.10
    assert np.mean(np.array(gains) > 0) >= 0.9


def test_the_unit_of_the_loss_does_not_matter_and_the_answer_is_deterministic():
    losses = _truth(np.random.default_rng(3))(_sizes(RUNGS))
    once, again, scaled = (
        infer(_sizes(RUNGS, factor * losses), _sizes([TARGET]), FAST).moments() for factor in (1.0, 1.0, 0.693)
    )
    assert once == again
    assert scaled[0] - once[0] == pytest.approx(np.log(0.693)) and scaled[1] == pytest.approx(once[1])


def test_noise_and_drift_widen_the_forecast():
    """On a grid of nine runs the noise shows; four rungs hardly tell it from the law."""
    grid = [replace(RUNGS[0], width=width, num_steps=steps) for width in (32, 48, 64) for steps in (200, 400, 800)]
    losses = _truth(np.random.default_rng(3))(_sizes(grid))
    noise = 0.02 * np.random.default_rng(0).normal(size=len(grid))
    plain, drifting = (infer(_sizes(grid, losses), _sizes([TARGET]), FAST, drift=d).moments()[1] for d in (0.0, 0.02))
    noisy = infer(_sizes(grid, losses * np.exp(noise)), _sizes([TARGET]), FAST).moments()[1]
    assert noisy > 1.5 * plain and drifting > plain


def test_components_keep_mean_and_variance():
    losses = _truth(np.random.default_rng(4))(_sizes(RUNGS))
    posterior = infer(_sizes(RUNGS, losses), _sizes([TARGET]), FAST)
    means = np.exp(posterior.log_loss)
    mean = posterior.weights @ means
    std = np.sqrt(posterior.weights @ ((means * posterior.std) ** 2 + (means - mean) ** 2))
    assert register.moments(to_components(posterior)) == pytest.approx((mean, std), rel=1e-9)


def test_a_ladder_known_only_by_compute_is_forecast_by_compute():
    flops, unknown = np.geomspace(1e18, 1e20, 5), np.full(5, np.nan)
    rungs = Points(parameters=unknown, tokens=unknown, flops=flops, losses=1.6 + 95.18 * flops**-0.0941)
    target = Points(parameters=unknown[:1], tokens=unknown[:1], flops=np.array([1e21]), losses=unknown[:1])
    posterior = infer(rungs, target, FAST)
    assert list(posterior.forms) == ["compute"]
    assert np.exp(posterior.moments()[0]) == pytest.approx(1.6 + 95.18 * 1e21**-0.0941, rel=0.01)


def _write_rung(root, rung, loss, **facts):
    sizes = _sizes([rung])
    folder = root / "voyage" / f"rung_{rung.name}@1"
    folder.mkdir(parents=True)
    record = Run(
        experiment="voyage",
        name=f"rung_{rung.name}",
        version="1",
        fingerprint=rung.name,
        function="pretrain",
        status="done",
        started_at="2026-11-30T10:00:00+00:00",
        facts={
            "active_parameters": float(sizes.parameters[0]),
            "tokens": rung.num_tokens,
            "train_flops": float(sizes.flops[0]),
            "bits_per_byte": loss,
            "heldout_digest": "abc",
            **facts,
        },
    )
    (folder / "record.json").write_bytes(encode(record))
    steps = range(rung.num_steps)
    lines = [{"step": s, "attempt": 0, "at": "x", "loss": 2 * loss * (1.4 - 0.4 * s / rung.num_steps)} for s in steps]
    (folder / "metrics.jsonl").write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    return folder


@pytest.fixture
def voyage(tmp_path):
    losses = _truth(np.random.default_rng(5))(_sizes(RUNGS))
    inputs = {rung.name: _write_rung(tmp_path, rung, float(loss)) for rung, loss in zip(RUNGS, losses)}
    out = tmp_path / "voyage" / "forecast@1"
    out.mkdir()
    target = _sizes([TARGET])
    config = ForecastConfig(
        run="pretrain@1",
        active_parameters=int(target.parameters[0]),
        tokens=TARGET.num_tokens,
        train_flops=float(target.flops[0]),
        prior=FAST,
    )
    return config, inputs, out, losses


def test_the_stage_freezes_chains_and_shows_its_forecast(voyage):
    config, inputs, out, losses = voyage
    artifact = forecast(config, inputs, out)
    prediction = register.load_prediction(out / "prediction.json")
    entries = chain.verify(out.parents[1] / "predictions.jsonl")
    assert [entry.prediction for entry in entries] == [prediction.hash] == [artifact.facts["hash"]]
    assert prediction.interval[0] < prediction.median < prediction.interval[1] < losses.max()
    assert prediction.regime == {"tokens": config.tokens, "train_flops": config.train_flops, "heldout_digest": "abc"}
    assert prediction.method["calibration"] == backtest.load_calibration().digest
    assert set(prediction.inputs.values()) == {rung.name for rung in RUNGS}
    band = json.loads((out / "tables" / "band.json").read_bytes())["rows"]
    assert band[-1][0] == 1.0 and all(low < middle < high for _, _, low, middle, high, _ in band)
    assert band[0][3] > band[-1][3]
    assert band[0][0] * min(r.num_steps for r in RUNGS) >= 50
    json.loads((out / "tables" / "rungs.json").read_bytes())


def test_rungs_that_cannot_carry_a_forecast_are_refused(voyage, tmp_path):
    config, inputs, out, _ = voyage
    first, second, *_ = inputs.values()
    with pytest.raises(ValueError, match="at least three rungs"):
        forecast(config, {"a": first, "b": second}, out)
    with pytest.raises(ValueError, match="has not run"):
        forecast(config, {**inputs, "missing": tmp_path / "nowhere"}, out)
    record = msgspec.json.decode((first / "record.json").read_bytes())
    record["facts"]["heldout_digest"] = "other"
    (first / "record.json").write_bytes(msgspec.json.encode(record))
    with pytest.raises(ValueError, match="differ in heldout_digest"):
        forecast(config, inputs, out)
    del record["facts"]["bits_per_byte"]
    (first / "record.json").write_bytes(msgspec.json.encode(record))
    with pytest.raises(ValueError, match="did not record bits_per_byte"):
        forecast(config, inputs, out)
    assert not (out / "prediction.json").exists() and not (out.parents[1] / "predictions.jsonl").exists()
