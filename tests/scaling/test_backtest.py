"""The calibration table: it follows from its residuals, is honest, and is what the public data give."""

from pathlib import Path

import numpy as np
import pytest

from noonsight.scaling import backtest
from noonsight.scaling.posterior import Points, Prior

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "scaling"


def test_the_committed_calibration_follows_from_its_residuals(tmp_path):
    calibration = backtest.load_calibration()
    assert len({r.data for r in calibration.residuals}) >= 6
    assert 0.85 <= calibration.coverage_90 <= 1.0
    assert backtest.coverage(calibration.residuals)["pooled"] == pytest.approx(calibration.coverage_90, abs=1e-4)
    forged = tmp_path / "calibration.json"
    data = backtest.CALIBRATION.read_text()
    forged.write_text(data.replace(f'"drift": {calibration.drift}', '"drift": 0.0001'))
    with pytest.raises(ValueError, match="does not follow from its residuals"):
        backtest.load_calibration(forged)


def test_drift_is_found_where_it_was_put():
    rng = np.random.default_rng(0)
    residuals = [
        backtest.Residual(data=name, rungs=4, log_distance=d, error=rng.normal() * np.hypot(0.005, 0.02 * d), std=0.005)
        for name in "abcd"
        for d in np.linspace(0.5, 5, 200)
    ]
    assert backtest.best_drift(residuals) == pytest.approx(0.02, rel=0.15)
    assert backtest.coverage(residuals)["pooled"] == pytest.approx(0.9, abs=0.04)


def test_rolling_origin_predicts_only_later_runs():
    flops = np.geomspace(1e15, 1e18, 6)
    unknown = np.full(6, np.nan)
    points = Points(parameters=unknown, tokens=unknown, flops=flops, losses=1.5 + 50 * flops**-0.1)
    residuals = backtest.backtest({"law": points}, Prior(num_draws=512))
    assert sorted(r.rungs for r in residuals) == [3, 3, 3, 4, 4, 5]
    assert all(r.log_distance > 0 and abs(r.error) < 2 * r.std for r in residuals)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public data sets are not on this machine")
def test_the_public_data_give_the_committed_residuals():
    sets = backtest.public_sets(PUBLIC)
    few = {name: sets[name] for name in ("moe_67b", "hero_ladder")}  # one point each
    committed = sorted((r for r in backtest.load_calibration().residuals if r.data in few), key=lambda r: r.data)
    found = sorted(backtest.backtest(few), key=lambda r: r.data)
    assert [r.error for r in found] == pytest.approx([r.error for r in committed], abs=1e-4)
    assert [r.std for r in found] == pytest.approx([r.std for r in committed], abs=1e-4)
