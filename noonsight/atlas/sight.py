"""The noon sight: where the dead reckoning put the ship, and where she was. Geometry for the drawing, no markup.

A prediction is a mixture of normals; its density is drawn over the horizon, with the central 90 % shaded and the
observed value as the sun. Coordinates are percent of the drawing's width and height.
"""

from __future__ import annotations

import math
from typing import Any

from noonsight.logbook.record import Prediction, Verdict

NUM_POINTS = 80


def sight(prediction: Prediction, verdict: Verdict | None) -> dict[str, Any]:
    """Outline of the density, its shaded part, and the places of median, interval and observed value."""
    low, high = _bounds(prediction, verdict)

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 4)

    xs = sorted({*_grid(low, high), *_grid(*prediction.interval)})  # also a narrow peak far from its result is drawn
    densities = [_density(prediction, x) for x in xs]
    peak = max(densities) or 1.0
    curve = [(place(x), round(100 - 92 * density / peak, 2)) for x, density in zip(xs, densities)]
    inner = [point for point, x in zip(curve, xs) if prediction.interval[0] <= x <= prediction.interval[1]]
    left, right = place(prediction.interval[0]), place(prediction.interval[1])
    return {
        "curve": _path(curve),
        "inner": _path([(left, 100.0), *inner, (right, 100.0)]) if inner else "",
        "left": left,
        "right": right,
        "median": place(prediction.median),
        "observed": place(verdict.result) if verdict else None,
        "ticks": [{"at": place(value), "text": text} for value, text in _ticks(low, high)],
        "low": prediction.interval[0],
        "high": prediction.interval[1],
        "middle": prediction.median,
        "result": verdict.result if verdict else None,
        "inside": verdict.inside if verdict else None,
        "unit": prediction.unit,
    }


def _bounds(prediction: Prediction, verdict: Verdict | None) -> tuple[float, float]:
    low, high = prediction.interval
    width = max(high - low, abs(prediction.median) * 1e-6, 1e-12)
    ends = [low - 0.45 * width, high + 0.45 * width]
    if verdict and math.isfinite(verdict.result):
        ends += [verdict.result - 0.2 * width, verdict.result + 0.2 * width]
    return min(ends), max(ends)


def _grid(low: float, high: float) -> list[float]:
    return [low + (high - low) * index / NUM_POINTS for index in range(NUM_POINTS + 1)]


def _density(prediction: Prediction, x: float) -> float:
    total = 0.0
    for weight, mean, std in prediction.components:
        if std > 0:
            total += weight / std * math.exp(-0.5 * min(((x - mean) / std) ** 2, 1400.0))
    return total


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:.5g} {y:.4g}" for x, y in points)


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round values within the drawing, at most seven, all with the same decimals."""
    power = math.floor(math.log10((high - low) / 3))
    step = 10.0**power * next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * 10.0**power) <= 6)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [
        (index * step, f"{index * step:.{max(0, -math.floor(math.log10(step)))}f}") for index in range(first, last + 1)
    ]
