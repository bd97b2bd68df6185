"""Freeze a prediction, and hold it against the result.

A prediction is a mixture of normals, so everything that is said of it (interval, median, scores) follows from its
components by formula. Freezing gives it the SHA-256 of its canonical JSON: one changed byte is another prediction. The
verdict scores the result by two proper rules, for which honesty is the best policy: the log score (log density, higher
is better) and the CRPS (in the unit of the metric, lower is better), and never compares runs whose regime differs.

    CRPS(F, y) = E|X - y| - E|X - X'| / 2      closed form for normal mixtures: Grimit et al. 2006
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from noonsight.logbook import chain, read, write
from noonsight.logbook.record import Artifact, Prediction, Run, Verdict, encode, now

Components = Sequence[tuple[float, float, float]]  # (weight, mean, std)
RELATIVE_TOLERANCE = 1e-6  # for numbers in a regime


@dataclass(frozen=True, kw_only=True)
class VerdictConfig:
    """Nothing to choose: the prediction itself says what it is compared with and when the comparison counts."""

    sentence: str = "The result held against the prediction that was frozen before the run."


def verdict(config: VerdictConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage. `inputs`: `prediction` (the forecast's folder), `result` (its facts hold the metric), `run` (the target).

    Where the evaluation is the training run itself, `run` may be left out. Writes `verdict.json`. Raises ValueError
    when the prediction was altered after freezing or the result lacks the metric.
    """
    prediction = load_prediction(Path(inputs["prediction"]) / "prediction.json")
    result = _record_of(inputs["result"], "result")
    run = _record_of(inputs["run"], "run") if "run" in inputs else result
    facts = {**run.facts, **result.facts}
    if prediction.metric not in result.facts:
        raise ValueError(
            f"the result {result.name}@{result.version} has no {prediction.metric!r} among its facts "
            f"({', '.join(sorted(result.facts)) or 'none'}); evaluate the metric that was predicted"
        )
    judged = judge(prediction, float(result.facts[prediction.metric]), facts=facts, run=run)
    write.write_atomic(Path(out) / "verdict.json", encode(judged))
    return Artifact(
        facts={
            "verdict": "inside" if judged.inside else "outside",
            "error_percent": judged.error_percent,
            "comparable": judged.comparable,
            "late": judged.late,
            "log_score": judged.log_score,
            "log_score_baseline": judged.log_score_baseline,
            "sentence": judged.sentence,
        }
    )


def judge(prediction: Prediction, result: float, *, facts: Mapping[str, Any], run: Run) -> Verdict:
    """The verdict on `result`. `facts` are those of the run and its evaluation; `run` says when it started."""
    low, high = prediction.interval
    reasons = regime_breaks(prediction.regime, facts)
    if run.prediction_hash not in (None, prediction.hash):
        reasons.append(f"the run was started under another prediction ({run.prediction_hash[:12]})")
    late = datetime.fromisoformat(prediction.frozen_at) > datetime.fromisoformat(run.started_at)
    inside = bool(low <= result <= high)
    error = 100 * (result / prediction.median - 1)
    mean, std = moments(prediction.components)
    return Verdict(
        prediction_hash=prediction.hash,
        run=prediction.run,
        metric=prediction.metric,
        result=result,
        inside=inside,
        error_percent=error,
        z=(result - mean) / std,
        log_score=log_score(prediction.components, result),
        log_score_baseline=log_score([(1.0, *prediction.baseline)], result),
        crps=crps(prediction.components, result),
        comparable=not reasons,
        reason="; ".join(reasons),
        late=late,
        sentence=_sentence(prediction, result, inside, error, reasons, late),
        at=now(),
    )


def regime_breaks(regime: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What of the declared regime does not hold in `facts`, in words. Empty when the comparison counts."""
    breaks = []
    for name, expected in regime.items():
        if name not in facts:
            breaks.append(f"{name} was not recorded (predicted for {expected})")
        elif not _same(expected, facts[name]):
            breaks.append(f"{name} is {facts[name]}, the prediction was for {expected}")
    return breaks


def freeze(prediction: Prediction) -> Prediction:
    """The prediction with `hash` = SHA-256 of its canonical JSON without the hash."""
    return msgspec.structs.replace(prediction, hash=chain.content_hash(prediction))


def load_prediction(path: Path) -> Prediction:
    """Reads a frozen prediction. Raises ValueError when its hash does not match its content."""
    prediction = msgspec.json.decode(path.read_bytes(), type=Prediction)
    if prediction.hash != chain.content_hash(prediction):
        raise ValueError(
            f"{path}: the prediction does not match its hash {prediction.hash[:12] or '(none)'}: it was altered after "
            "it was frozen. Restore the file; a revised forecast is a new prediction, not an edited one."
        )
    return prediction


def moments(components: Components) -> tuple[float, float]:
    """Mean and standard deviation of the mixture."""
    weights, means, stds = _columns(components)
    mean = float(weights @ means)
    return mean, math.sqrt(float(weights @ (stds**2 + (means - mean) ** 2)))


def interval(components: Components, probability: float = 0.90) -> tuple[float, float]:
    """Central interval that holds `probability`."""
    tail = (1 - probability) / 2
    return quantile(components, tail), quantile(components, 1 - tail)


def median(components: Components) -> float:
    """The value below which half of the mixture lies."""
    return quantile(components, 0.5)


def quantile(components: Components, level: float) -> float:
    """The value below which a share `level` (0..1, exclusive) of the mixture lies."""
    weights, means, stds = _columns(components)
    if not 0 < level < 1:
        raise ValueError(f"a quantile's level lies between 0 and 1, got {level}")
    low, high = float(np.min(means - 40 * stds)), float(np.max(means + 40 * stds))
    return float(brentq(lambda y: weights @ ndtr((y - means) / stds) - level, low, high, xtol=1e-13, rtol=1e-13))


def log_score(components: Components, y: float) -> float:
    """log density of the mixture at y, in nats. Higher is better; far tails stay finite."""
    weights, means, stds = _columns(components)
    with np.errstate(divide="ignore"):
        terms = np.log(weights) - np.log(stds) - 0.5 * math.log(2 * math.pi) - 0.5 * ((y - means) / stds) ** 2
    return float(np.logaddexp.reduce(terms))


def crps(components: Components, y: float) -> float:
    """Continuous ranked probability score of the mixture at y, in the unit of y. Lower is better."""
    weights, means, stds = _columns(components)
    pair_stds = np.sqrt(stds[:, None] ** 2 + stds[None, :] ** 2)
    spread = weights @ _mean_absolute(means[:, None] - means[None, :], pair_stds) @ weights
    return float(weights @ _mean_absolute(y - means, stds) - 0.5 * spread)


def _mean_absolute(mean, std):
    """E|Z| for Z ~ Normal(mean, std)."""
    z = mean / std
    return mean * (2 * ndtr(z) - 1) + 2 * std * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)


def _columns(components: Components):
    table = np.asarray(components, dtype=float)
    if table.ndim != 2 or table.shape[1] != 3 or not np.all(np.isfinite(table)):
        raise ValueError("a mixture is a list of finite (weight, mean, std)")
    weights, means, stds = table.T
    if np.any(weights < 0) or abs(weights.sum() - 1) > 1e-9 or np.any(stds <= 0):
        raise ValueError("a mixture's weights are not negative and sum to 1, and its stds are positive")
    return weights, means, stds


def _same(expected, found) -> bool:
    numbers = (int, float)
    if isinstance(expected, numbers) and isinstance(found, numbers) and not isinstance(expected, bool):
        return math.isclose(expected, found, rel_tol=RELATIVE_TOLERANCE)
    return json.dumps(expected, sort_keys=True) == json.dumps(found, sort_keys=True)


def _record_of(folder, role: str) -> Run:
    run = read.run(Path(folder))
    if run is None:
        raise ValueError(f"the input {role!r} at {folder} holds no record.json: that stage has not run")
    return run


def _sentence(prediction, result, inside, error, reasons, late) -> str:
    low, high = prediction.interval
    where = "inside" if inside else "outside"
    side = "at" if abs(error) < 0.05 else f"{abs(error):.1f} % {'above' if error > 0 else 'below'}"
    text = f"{result:.3f} {prediction.unit}: {where} the predicted {low:.3f} to {high:.3f}, {side} the median."
    if reasons:
        text += f" Not comparable: {'; '.join(reasons)}."
    if late:
        text += " Late: the prediction was frozen after the run had started."
    return text
