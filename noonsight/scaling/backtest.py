"""How far off were we where the answer is known: rolling-origin backtests, and the calibration they leave.

Every data set is a ladder ordered by compute. For each k >= 3 the forecast sees the first k runs and predicts every
later one. What its own laws do not explain is put into one number, the drift: extra standard deviation of log loss per
factor e of compute beyond the largest rung, the value that nine data sets in ten do not exceed. The derived residuals
are kept in `calibration.json`; its hash enters every prediction. No raw data of others is kept.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

from noonsight.scaling.fit import isoflop_optimum
from noonsight.scaling.posterior import Points, Prior, infer

CALIBRATION = Path(__file__).with_name("calibration.json")
BACKTEST_PRIOR = Prior(num_draws=2048)  # hundreds of forecasts: fewer draws each
FURTHEST = np.log(400.0)  # predictions beyond 400 x the compute of the ladder say nothing about ours


@dataclass(frozen=True, kw_only=True)
class Residual:
    """One backtested prediction. Logs are natural; `std` is the forecast's own, before any drift."""

    data: str
    rungs: int
    log_distance: float  # of compute, target over largest rung
    error: float  # log(observed) - mean of the predicted log
    std: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the backtests taught. `digest` identifies the file it was read from."""

    version: int
    drift: float
    coverage_90: float  # of the residuals, each set scored with the drift of the others
    residuals: tuple[Residual, ...]
    digest: str = ""


def load_calibration(path: Path = CALIBRATION) -> Calibration:
    """The committed table. Raises ValueError when its drift is not the one its residuals give."""
    data = path.read_bytes()
    table = json.loads(data)
    residuals = tuple(Residual(**dict(zip(table["columns"], row))) for row in table["rows"])
    found = Calibration(
        version=table["version"],
        drift=table["drift"],
        coverage_90=table["coverage_90"],
        residuals=residuals,
        digest=hashlib.sha256(data).hexdigest(),
    )
    if abs(best_drift(residuals) - found.drift) > 1e-3:
        raise ValueError(f"{path}: the drift {found.drift} does not follow from its residuals; run the backtest again")
    return found


def backtest(sets: Mapping[str, Points], prior: Prior = BACKTEST_PRIOR) -> list[Residual]:
    """Rolling origin over each set, ordered by compute: fit the first k >= 3 runs, predict each later one."""
    residuals = []
    for name, points in sets.items():
        ladder = points.take(np.argsort(points.flops, kind="stable"))
        for k in range(3, len(ladder.flops)):
            for j in range(k, len(ladder.flops)):
                distance = float(np.log(ladder.flops[j] / ladder.flops[k - 1]))
                if not 0.1 < distance <= FURTHEST:
                    continue
                mean, std = infer(ladder.take(slice(0, k)), ladder.take(slice(j, j + 1)), prior).moments()
                error = float(np.log(ladder.losses[j])) - mean
                residuals.append(Residual(data=name, rungs=k, log_distance=distance, error=error, std=std))
    return residuals


def best_drift(residuals: Sequence[Residual]) -> float:
    """The drift that nine data sets in ten do not exceed, each set with its own drift of highest likelihood.

    A pooled likelihood would be ruled by smooth frontiers, which need none, and leave raw small runs too narrow.
    """
    own = [_own_drift([r for r in residuals if r.data == name]) for name in {r.data for r in residuals}]
    return float(np.quantile(own, 0.9))


def _own_drift(residuals: Sequence[Residual]) -> float:
    error, own, distance = (np.array([getattr(r, n) for r in residuals]) for n in ("error", "std", "log_distance"))

    def cost(drift):
        variance = own**2 + (drift * distance) ** 2
        return float(np.sum(np.log(variance) / 2 + error**2 / (2 * variance)))

    return float(minimize_scalar(cost, bounds=(0.0, 0.1), method="bounded", options={"xatol": 1e-6}).x)


def coverage(residuals: Sequence[Residual], *, drift: float | None = None) -> dict[str, float]:
    """Share inside the 90 % interval, per data set, and `pooled` over sets with equal weight.

    Without `drift`, each set is scored with the drift that the other sets give: it did not see itself.
    """
    shares = {}
    for name in sorted({r.data for r in residuals}):
        here = [r for r in residuals if r.data == name]
        width = best_drift([r for r in residuals if r.data != name]) if drift is None else drift
        z = [abs(r.error) / np.hypot(r.std, width * r.log_distance) for r in here]
        shares[name] = float(np.mean(np.array(z) <= 1.6449))
    return {**shares, "pooled": float(np.mean(list(shares.values())))}


def write_calibration(residuals: Sequence[Residual], path: Path = CALIBRATION) -> Calibration:
    """Writes the table that `load_calibration` reads: method, sources, drift, residuals to six decimals."""
    rounded = [
        Residual(
            data=r.data,
            rungs=r.rungs,
            log_distance=round(r.log_distance, 6),
            error=round(r.error, 6),
            std=round(r.std, 6),
        )
        for r in residuals
    ]
    shares = coverage(rounded)
    table = {
        "version": 2,
        "method": "rolling origin, k >= 3; drift: upper decile of the data sets' own maximum-likelihood drifts",
        "sources": SOURCES,
        "drift": round(best_drift(rounded), 6),
        "coverage_90": round(shares["pooled"], 4),
        "coverage_by_set": {name: round(share, 4) for name, share in shares.items() if name != "pooled"},
        "columns": ["data", "rungs", "log_distance", "error", "std"],
    }
    head = json.dumps(table, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps([r.data, r.rungs, r.log_distance, r.error, r.std]) for r in rounded)
    path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')
    return load_calibration(path)


SOURCES = {
    "delphi": "isoFLOP minima and held-out runs, c4-en bits per byte (Marin, Delphi registry; Open Athena's analysis)",
    "moe_v16": "MoE V1 optima, Paloma macro loss (Marin, issues #4447 and #4697)",
    "moe_67b": "overtrained ladder of Snowball, Paloma macro loss (Marin, issue #6044)",
    "hero_ladder": "hero ladder, dropless Paloma macro loss (Marin, plot_scaling_ladder.py)",
    "august_sweep": "widths x tokens per parameter, Paloma macro loss (Marin, issue #8003)",
    "llama3": "isoFLOP optima read from the Llama 3 paper's figure (eric-czech/llama3_isoflop_extraction)",
    "mini_cpu": "byte-level models of 7 to 115 thousand parameters on Python source, measured for this project",
    "others": "isoFLOP optima of public grids collected in Open-Athena/scaling-law-analysis",
}

# Losses of Marin issue #8003: width, active parameters, losses at 30, 60, 150, 300, 600 tokens per active parameter.
_AUGUST_MULTIPLES = (30, 60, 150, 300, 600)
_AUGUST = (
    (512, 20_840_448, (3.844, 3.666, 3.502, 3.409, 3.336)),
    (768, 60_555_264, (3.467, 3.325, 3.185, 3.104, 3.048)),
    (1024, 162_004_992, (3.153, 3.046, 2.938, 2.868, 2.813)),
    (1536, 481_296_384, (2.874, 2.790, 2.695, 2.636)),
    (2048, 1_170_735_104, (2.730, 2.651)),
)


def public_sets(folder: Path) -> dict[str, Points]:
    """The public ladders found in `folder` (its layout is described in the data's own README), by name."""
    august = [(n, m * n, 6 * m * n * n, y) for _, n, ys in _AUGUST for m, y in zip(_AUGUST_MULTIPLES, ys)]
    sets = {"august_sweep": _points(august)}
    measured = (2.9e18, 9.1e18, 1.8e19, 3.1e19, 8.9e19, 1.7e20, 3.1e20, 1e21, 1e22, 1e23)
    delphi = _rows(folder / "delphi_public_points.csv")
    sets["delphi"] = _points([(r["params"], r["tokens"], c, r["c4en_bpb"]) for r, c in zip(delphi, measured)])
    marin = _rows(folder / "marin_moe_points.csv")
    for name, family in (("moe_v16", "moe_v1_v16"), ("moe_67b", "moe_67b_overtrained")):
        rows = [r for r in marin if r["family"] == family]
        sets[name] = _points([(r["active_params"], r["tokens"], r["budget_flops"], r["macro_loss"]) for r in rows])
    hero = [r for r in _rows(folder / "hero_ladder_points.csv") if r["rung"] != "d6144"]
    sets["hero_ladder"] = _points(
        [(r["active_params"], r["tokens"], r["flops_no_lmhead"], r["dropless_paloma_macro"]) for r in hero]
    )
    mini = _rows(folder / "mini_ladder_cpu.csv")
    sets["mini_cpu"] = _points([(r["N"], r["D"], r["C"], r["val"]) for r in mini])
    grids = _rows(folder / "openathena" / "transform__isoflops.csv")
    for name in sorted({r["experiment"] for r in grids if "exp_loss" not in r["experiment"]}):
        here = [r for r in grids if r["experiment"] == name and r["outlier"] != "True"]
        sets["llama3" if name.startswith("llama_3") else name.replace("__", "/")] = _frontier(here)
    return {name: points for name, points in sets.items() if len(points.flops) > 3}


def _frontier(rows) -> Points:
    """The best split of every budget of an isoFLOP grid that holds its optimum."""
    found = []
    for budget in sorted({float(r["budget"]) for r in rows}):
        here = [r for r in rows if float(r["budget"]) == budget]
        try:
            tokens, loss = isoflop_optimum([float(r["tokens"]) for r in here], [float(r["loss"]) for r in here])
        except ValueError:
            continue  # this budget's grid does not hold its optimum: there is no frontier point to learn from
        found.append((budget / (6 * tokens), tokens, budget, loss))
    return _points(found)


def _points(rows) -> Points:
    table = np.array([[float(v) if v not in ("", None) else np.nan for v in row] for row in rows], float).reshape(-1, 4)
    return Points(parameters=table[:, 0], tokens=table[:, 1], flops=table[:, 2], losses=table[:, 3])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
