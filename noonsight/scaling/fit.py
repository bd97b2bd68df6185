"""Scaling laws as point fits: power laws in compute, L(N, D) by variable projection, isoFLOP parabolas.

These are the fits that others publish, kept so that their numbers can be reproduced. A forecast of ours does not rest
on one of them (`forecast.py` weighs many laws); a point fit is the summary a reader expects and the check on it.

    power law with floor     L = E + A C^-alpha
    variable projection      L = E + A N^-alpha + B D^-beta: the best (E, A, B) >= 0 for given exponents is a linear
                             problem, so only two numbers are searched (Held et al. 2026, arXiv 2603.22339)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize, minimize_scalar, nnls


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """L = floor + amplitude * x^-exponent. `residual` is the root mean square of log(L - floor)."""

    floor: float
    amplitude: float
    exponent: float
    residual: float

    def __call__(self, x):
        return self.floor + self.amplitude * np.asarray(x, float) ** -self.exponent

    def inverse(self, loss: float) -> float:
        """The x at which the law reaches `loss`. Raises ValueError at or below the floor."""
        if loss <= self.floor:
            raise ValueError(f"loss {loss} is not above the floor {self.floor} of this law: no x reaches it")
        return float((self.amplitude / (loss - self.floor)) ** (1 / self.exponent))


@dataclass(frozen=True, kw_only=True)
class SizeDataLaw:
    """L = floor + size_amplitude N^-size_exponent + data_amplitude D^-data_exponent; `residual`: root mean square."""

    floor: float
    size_amplitude: float
    data_amplitude: float
    size_exponent: float
    data_exponent: float
    residual: float

    def __call__(self, parameters, tokens):
        size = self.size_amplitude * np.asarray(parameters, float) ** -self.size_exponent
        return self.floor + size + self.data_amplitude * np.asarray(tokens, float) ** -self.data_exponent


def fit_power_law(x, losses, *, floor: float) -> PowerLaw:
    """Least squares of log(L - floor) on log x with the floor pinned. Raises ValueError for a floor above a loss."""
    x, losses = _positive(x, "x"), _positive(losses, "losses")
    if floor >= losses.min():
        raise ValueError(f"floor {floor} is not below the smallest loss {losses.min()}; choose a lower floor")
    slope, intercept = np.polyfit(np.log(x), np.log(losses - floor), 1)
    residual = np.log(losses - floor) - intercept - slope * np.log(x)
    return PowerLaw(
        floor=float(floor),
        amplitude=float(np.exp(intercept)),
        exponent=float(-slope),
        residual=float(np.sqrt(np.mean(residual**2))),
    )


def fit_power_law_free(x, losses) -> PowerLaw:
    """Least squares of L itself in all three numbers: the floor is searched, amplitude and exponent follow.

    With few points the floor is hardly identified: look at `floor_profile` before using it.
    """
    x, losses = _positive(x, "x"), _positive(losses, "losses")
    log_x = np.log(x / np.exp(np.mean(np.log(x))))

    def solve(exponent):
        design = np.stack([np.ones_like(log_x), np.exp(-exponent * log_x)], axis=1)
        return nnls(design, losses)

    grid = np.geomspace(0.005, 3.0, 120)
    best = int(np.argmin([solve(value)[1] for value in grid]))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    exponent = minimize_scalar(lambda v: solve(v)[1], bounds=bounds, method="bounded", options={"xatol": 1e-10}).x
    (floor, amplitude), _ = solve(exponent)
    amplitude = amplitude * np.exp(np.mean(np.log(x))) ** exponent
    law = PowerLaw(floor=float(floor), amplitude=float(amplitude), exponent=float(exponent), residual=0.0)
    reducible = np.log(np.maximum(losses - floor, 1e-12)) - np.log(law(x) - floor)
    return PowerLaw(
        floor=law.floor,
        amplitude=law.amplitude,
        exponent=law.exponent,
        residual=float(np.sqrt(np.mean(reducible**2))),
    )


def floor_profile(x, losses, floors, *, at: float) -> list[tuple[float, float, float]]:
    """(floor, residual, prediction at `at`) for each floor below the smallest loss: how much the floor decides."""
    laws = [fit_power_law(x, losses, floor=floor) for floor in floors if floor < np.min(losses)]
    return [(law.floor, law.residual, float(law(at))) for law in laws]


def fit_size_and_data(parameters, tokens, losses) -> SizeDataLaw:
    """Variable projection for L = E + A/N^a + B/D^b with squared error. Needs more than five points.

    The exponents are searched on a grid and refined by Nelder-Mead; amplitudes and floor stay non-negative. The
    amplitudes follow the exponents and are not identified by themselves: compare exponents and predictions.
    """
    parameters, tokens = _positive(parameters, "parameters"), _positive(tokens, "tokens")
    losses = _positive(losses, "losses")
    if len(losses) <= 5:
        raise ValueError(f"five numbers cannot be fitted to {len(losses)} points; use fit_power_law or add runs")
    sizes = parameters / np.exp(np.mean(np.log(parameters)))
    datas = tokens / np.exp(np.mean(np.log(tokens)))

    def solve(exponents):
        if min(exponents) <= 0 or max(exponents) > 5:
            return np.zeros(3), np.inf
        columns = [np.ones_like(losses), sizes ** -exponents[0], datas ** -exponents[1]]
        return nnls(np.stack(columns, axis=1), losses)

    grid = np.arange(0.05, 1.0 + 1e-9, 0.06)
    start = min(((a, b) for a in grid for b in grid), key=lambda pair: solve(pair)[1])
    options = {"xatol": 1e-7, "fatol": 1e-14, "maxiter": 4000}
    found = minimize(lambda pair: solve(pair)[1] ** 2, start, method="Nelder-Mead", options=options)
    (floor, size, data), norm = solve(found.x)
    return SizeDataLaw(
        floor=float(floor),
        size_amplitude=float(size * np.exp(np.mean(np.log(parameters))) ** found.x[0]),
        data_amplitude=float(data * np.exp(np.mean(np.log(tokens))) ** found.x[1]),
        size_exponent=float(found.x[0]),
        data_exponent=float(found.x[1]),
        residual=float(norm / np.sqrt(len(losses))),
    )


def isoflop_optimum(tokens, losses) -> tuple[float, float]:
    """(tokens, loss) at the vertex of a parabola of the loss in log10 tokens: the best split of one budget.

    Raises ValueError with fewer than four points, without positive curvature, or when the vertex lies outside the
    measured tokens: such a grid does not hold its optimum.
    """
    tokens, losses = _positive(tokens, "tokens"), _positive(losses, "losses")
    if len(tokens) < 4:
        raise ValueError(f"a parabola wants at least four runs of a budget, got {len(tokens)}")
    curvature, slope, intercept = np.polyfit(np.log10(tokens), losses, 2)
    if curvature <= 0:
        raise ValueError("the losses of this budget have no minimum in tokens; widen the grid")
    vertex = -slope / (2 * curvature)
    if not np.log10(tokens.min()) <= vertex <= np.log10(tokens.max()):
        raise ValueError(f"the optimum 10^{vertex:.2f} tokens lies outside this budget's grid; widen the grid")
    return float(10**vertex), float(intercept - slope**2 / (4 * curvature))


def _positive(values, name: str) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1 or not np.all(np.isfinite(array)) or np.any(array <= 0):
        raise ValueError(f"{name} must be a list of positive finite numbers; a diverged run has no place in a fit")
    return array
