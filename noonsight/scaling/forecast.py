"""The forecast: from finished rungs to a frozen prediction of a run that does not exist yet.

A stage. It reads what the logbook recorded of each rung, weighs scaling laws by them (`posterior.py`), widens that
by what backtests say the laws do not know (`backtest.py`), and writes a mixture of normals as `prediction.json`, hashed
and chained. The predicted run has this stage as its input, so it cannot start before. The same laws, fitted at each
twentieth of progress, give the band in which the target's training loss should run: rungs and target share the shape of
their schedule, so equal progress means equally annealed.

Assumptions, so that they can be attacked: one family and one recipe whose rates follow the transfer rule; loss is a
floor plus powers of size and tokens near the ladder; one run's noise is a fraction of a per cent to a few per cent and
the same at every size; less than about one pass over the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from noonsight.logbook import chain, read, write
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Artifact, Prediction, Run, encode, now
from noonsight.scaling import register
from noonsight.scaling.backtest import Calibration, load_calibration
from noonsight.scaling.posterior import Points, Posterior, Prior, infer, to_components

BAND_WINDOW = 0.15  # share of the run over which a loss is averaged: a single batch is too noisy
MIN_STEPS_IN_BAND = 50  # before that, warm-up and the first drop of the loss rule, no scaling law does
LEAST_EFFECTIVE_DRAWS = 200
MOST_DRAWS = 131_072
LEAST_BASELINE = 0.01  # relative std of "same as the last rung", so that it is no straw man


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """What is predicted. `regime` is what must hold besides the target's tokens and FLOPs; `regime_from_rungs` names
    facts that all rungs share and the target must share too."""

    run: str  # address "name@version" of the predicted stage
    active_parameters: int
    tokens: int
    train_flops: float
    metric: str = "bits_per_byte"
    unit: str = "bits per byte"
    curve_metric: str | None = "loss"  # for the band of the training loss
    prior: Prior = field(default_factory=Prior)
    floor_at_most: float | None = None
    """In the metric's unit: no law may claim a floor above it. What some public model reaches is no floor of the text."""
    regime: tuple[tuple[str, Any], ...] = ()
    regime_from_rungs: tuple[str, ...] = ("heldout_digest",)
    decision: str = "The recipe scales as predicted if the result lies inside the 90 % interval."


@dataclass(frozen=True, kw_only=True)
class FinishedRung:
    """A rung that has run: what the forecast reads of it. `value` is in the unit of the metric."""

    name: str
    folder: Path
    run: Run
    parameters: float
    tokens: float
    flops: float
    value: float


def forecast(config: ForecastConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage. `inputs`: rung name -> its folder. Writes `prediction.json`, tables, and an entry in the root's chain.

    Raises ValueError when a rung is unfinished, lacks a fact, or does not share the regime, and below three rungs.
    """
    out = Path(out)
    rungs = read_rungs(config, inputs)
    calibration = load_calibration()
    target = _target(config)
    posterior = infer_enough(_points(rungs), target, _prior(config, rungs), calibration.drift)
    prediction = register.freeze(_prediction(config, rungs, posterior, calibration, out))
    _write_table(out, "rungs", _rung_table(config, rungs))
    _write_table(out, "forecast", _forecast_table(prediction))
    band = predict_curve(config, rungs, target, calibration.drift)
    if band:
        _write_table(out, "band", _band_table(config, band))
    write.write_atomic(out / "prediction.json", encode(prediction))
    entry = chain.append(out.parents[1] / "predictions.jsonl", prediction)
    low, high = prediction.interval
    cautions = prediction.method["cautions"]
    said = "; ".join([f"{prediction.median:.3f} {config.unit}, 90 % between {low:.3f} and {high:.3f}", *cautions])
    with claim(out, "stage") as owned:
        write.Writer(out, owned).progress(1, 1, unit="forecasts", phase="done", text=said)
    return Artifact(
        facts={
            "median": prediction.median,
            "interval": [low, high],
            "width_percent": 100 * (high - low) / prediction.median,
            "hash": prediction.hash,
            "frozen_at": prediction.frozen_at,
            "cautions": cautions,
            "chain_index": entry.index,
            "forms": posterior.forms,
            "floor": list(posterior.floor),
            "effective_draws": posterior.effective_draws,
        }
    )


def infer_enough(rungs: Points, target: Points, prior: Prior, drift: float) -> Posterior:
    """`infer`, with four times the draws until at least 200 of them count or 131,072 a form are spent.

    Rungs that pin a law sharply along a curved ridge leave few draws with weight; the number ends up in the record.
    """
    while True:
        posterior = infer(rungs, target, prior, drift=drift)
        if posterior.effective_draws >= LEAST_EFFECTIVE_DRAWS or prior.num_draws >= MOST_DRAWS:
            return posterior
        prior = replace(prior, num_draws=min(4 * prior.num_draws, MOST_DRAWS))


def read_rungs(config: ForecastConfig, inputs: Mapping[str, Path]) -> list[FinishedRung]:
    """The rungs in order of compute, each finished and with the facts that the forecast reads."""
    rungs = []
    for name, folder in inputs.items():
        run = read.run(Path(folder))
        needed = ("active_parameters", "tokens", "train_flops", config.metric, *config.regime_from_rungs)
        if run is None:
            raise ValueError(f"rung {name!r} at {folder} has no record.json: it has not run")
        missing = [fact for fact in needed if fact not in run.facts]
        if missing:
            raise ValueError(
                f"rung {name!r} ({run.status}) did not record {', '.join(missing)}; no forecast without it"
            )
        rungs.append(
            FinishedRung(
                name=name,
                folder=Path(folder),
                run=run,
                parameters=float(run.facts["active_parameters"]),
                tokens=float(run.facts["tokens"]),
                flops=float(run.facts["train_flops"]),
                value=float(run.facts[config.metric]),
            )
        )
    for fact in config.regime_from_rungs:
        values = {json.dumps(rung.run.facts[fact], sort_keys=True) for rung in rungs}
        if len(values) > 1:
            raise ValueError(f"the rungs differ in {fact} ({', '.join(sorted(values))}): they are not one ladder")
    return sorted(rungs, key=lambda rung: rung.flops)


def predict_curve(
    config: ForecastConfig, rungs: list[FinishedRung], target: Points, drift: float
) -> list[tuple[float, float, float, float]]:
    """(progress, low, median, high) of the target's training loss, averaged over the 15 % before, or [].

    At each twentieth the rungs' averages are one more ladder, with tokens and FLOPs scaled by the progress. Points at
    which the shortest rung has done fewer than 50 steps are left out.
    """
    if config.curve_metric is None:
        return []
    curves = [read.metrics(rung.folder).get(config.curve_metric) for rung in rungs]
    if any(curve is None or len(curve.steps) < 2 for curve in curves):
        return []
    prior = replace(_prior(config, rungs), num_draws=min(2048, config.prior.num_draws))
    shortest = min(max(curve.steps) for curve in curves)
    band = []
    for twentieth in range(1, 21):
        end = twentieth / 20
        start = end - BAND_WINDOW
        if start * shortest < MIN_STEPS_IN_BAND:
            continue
        points = _points(rungs, losses=[_average(curve, start, end) for curve in curves], progress=end)
        if not np.all(np.isfinite(points.losses)):
            continue
        here = infer(points, _target(config, progress=end), prior, drift=drift)
        components = to_components(here)
        low, high = register.interval(components)
        band.append((end, low, register.median(components), high))
    return band


def _average(curve, start: float, end: float) -> float:
    steps, values = np.array(curve.steps, float), np.array(curve.values, float)
    progress = (steps - steps.min() + 0.5) / (steps.max() - steps.min() + 1)
    inside = (progress > start) & (progress <= end)
    return float(values[inside].mean()) if inside.any() else float("nan")


def _prior(config: ForecastConfig, rungs: list[FinishedRung]) -> Prior:
    """The config's prior, with the share of the largest rung's loss that may be floor cut at `floor_at_most`."""
    if config.floor_at_most is None:
        return config.prior
    low, high = config.prior.floor_share
    return replace(config.prior, floor_share=(low, max(low, min(high, config.floor_at_most / rungs[-1].value))))


def _cautions(config: ForecastConfig, rungs: list[FinishedRung]) -> list[str]:
    """What the laws do not cover. A rung that does not say how much text there was is not judged."""
    unique = [float(rung.run.facts["unique_tokens"]) for rung in rungs if "unique_tokens" in rung.run.facts]
    if not unique or config.tokens <= min(unique):
        return []
    return [f"caution: {config.tokens / min(unique):.1f} passes over the text, and the laws know of one"]


def _points(rungs: list[FinishedRung], *, losses=None, progress: float = 1.0) -> Points:
    return Points(
        parameters=np.array([rung.parameters for rung in rungs]),
        tokens=progress * np.array([rung.tokens for rung in rungs]),
        flops=progress * np.array([rung.flops for rung in rungs]),
        losses=np.array([rung.value for rung in rungs] if losses is None else losses),
    )


def _target(config: ForecastConfig, *, progress: float = 1.0) -> Points:
    return Points(
        parameters=np.array([float(config.active_parameters)]),
        tokens=np.array([progress * config.tokens]),
        flops=np.array([progress * config.train_flops]),
        losses=np.array([np.nan]),
    )


def _prediction(
    config: ForecastConfig, rungs: list[FinishedRung], posterior: Posterior, calibration: Calibration, out: Path
) -> Prediction:
    components = to_components(posterior)
    last, previous = rungs[-1].value, rungs[-2].value
    shared = {fact: rungs[-1].run.facts[fact] for fact in config.regime_from_rungs}
    own = read.run(out)
    return Prediction(
        experiment=out.parent.name,
        run=config.run,
        metric=config.metric,
        unit=config.unit,
        components=components,
        median=register.median(components),
        interval=register.interval(components),
        baseline=(last, max(abs(last - previous), LEAST_BASELINE * last)),
        regime={"tokens": config.tokens, "train_flops": config.train_flops, **shared, **dict(config.regime)},
        inputs={f"{rung.run.name}@{rung.run.version}": rung.run.fingerprint for rung in rungs},
        method={
            "cautions": _cautions(config, rungs),
            "laws": posterior.forms,
            "prior": asdict(config.prior),
            "floor_5_50_95": list(posterior.floor),
            "drift": calibration.drift,
            "calibration": calibration.digest,
            "effective_draws": posterior.effective_draws,
        },
        code=hashlib.sha256(encode(own.code)).hexdigest() if own else "",
        decision=config.decision,
        frozen_at=now(),
    )


def _write_table(out: Path, name: str, table: dict[str, Any]) -> None:
    (out / "tables").mkdir(exist_ok=True)
    write.write_atomic(out / "tables" / f"{name}.json", encode(table))


def _rung_table(config: ForecastConfig, rungs: list[FinishedRung]) -> dict[str, Any]:
    return {
        "title": "The rungs",
        "columns": ["rung", "active parameters", "tokens", "train FLOPs", config.metric],
        "rows": [[rung.name, rung.parameters, rung.tokens, rung.flops, rung.value] for rung in rungs],
        "text": "What the forecast was made from, in order of compute.",
    }


def _forecast_table(prediction: Prediction) -> dict[str, Any]:
    levels = (0.05, 0.25, 0.5, 0.75, 0.95)
    return {
        "title": "The forecast",
        "columns": ["quantile", prediction.metric],
        "rows": [[level, register.quantile(prediction.components, level)] for level in levels],
        "text": f"For {prediction.run}, frozen at {prediction.frozen_at} with hash {prediction.hash[:12]}.",
    }


def _band_table(config: ForecastConfig, band) -> dict[str, Any]:
    return {
        "title": "The band of the training loss",
        "columns": ["progress", "step_tokens", "low", "median", "high", "window"],
        "rows": [[end, end * config.tokens, low, middle, high, BAND_WINDOW] for end, low, middle, high in band],
        "text": "90 % band for the training loss averaged over the 15 % of the run before `progress`, from "
        "the rungs' own curves at equal progress. A single step's loss scatters more widely.",
    }
