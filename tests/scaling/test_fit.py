"""Point fits against published numbers. Facts are typed in with their source; larger sets are read where present."""

import csv
from pathlib import Path

import numpy as np
import pytest

from noonsight.scaling.fit import (
    fit_power_law,
    fit_power_law_free,
    fit_size_and_data,
    floor_profile,
    isoflop_optimum,
)

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "scaling"
needs_public = pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public data sets are not on this machine")

# Delphi's isoFLOP minima: measured FLOPs, c4-en bits per byte (Marin, Delphi registry).
DELPHI = ((2.9e18, 9.1e18, 1.8e19, 3.1e19, 8.9e19, 1.7e20, 3.1e20), (1.088, 1.028, 0.994, 0.972, 0.925, 0.898, 0.879))
# MoE V1 optima: FLOPs, Paloma macro loss (Marin, issue #4447).
MOE = ((1e18, 3e18, 1e19, 3e19, 1e20, 3e20), (3.5273, 3.3398, 3.1494, 3.0066, 2.8509, 2.7222))
# Snowball's ladder (Marin, issue #6044) and the hero's (plot_scaling_ladder.py, FLOPs without the head).
SNOWBALL = ((2.00e19, 1.31e20, 7.16e20), (3.2373, 2.9538, 2.7515))
HERO = (
    (2.649679880270119e19, 1.7261182741798453e20, 1.3813258500033133e21, 7.741814947656449e21),
    (3.0154, 2.7809, 2.5638, 2.4087081241607664),
)


@pytest.mark.parametrize(
    "points, floor, at, expected",
    [
        (HERO, 1.5, 2.6108941613772703e24, 2.0388),
        (HERO, 1.3, 2.6108941613772703e24, 2.008),
        (SNOWBALL, 1.4, 1.19e23, 2.2692),
        (MOE, 1.6, 1e23, 2.2505),
        (MOE, 1.6, 1e21, 2.605),
        (MOE, 1.2, 1e23, 2.189),
        (MOE, 1.8, 1e23, 2.292),
    ],
)
def test_published_ladders_with_a_pinned_floor(points, floor, at, expected):
    assert fit_power_law(*points, floor=floor)(at) == pytest.approx(expected, abs=0.0005)


def test_hero_exponent_and_the_floor_that_decides():
    assert fit_power_law(*HERO, floor=1.5).exponent == pytest.approx(0.08998, abs=1e-5)
    predictions = [at for _, _, at in floor_profile(*HERO, (1.3, 1.5, 1.7, 2.5), at=2.6108941613772703e24)]
    assert len(predictions) == 3 and predictions == sorted(predictions)  # 2.5 lies above a loss


def test_delphi_with_a_free_floor_and_leave_one_out():
    law = fit_power_law_free(*DELPHI)
    assert law([1e21, 1e22, 1e23]) == pytest.approx([0.8377, 0.7706, 0.7163], abs=0.0005)
    assert (law.floor, law.exponent) == pytest.approx((0.4869, 0.0922), abs=0.0005)
    flops, losses = map(np.array, DELPHI)
    left_out = [float(fit_power_law_free(np.delete(flops, i), np.delete(losses, i))(1e23)) for i in range(7)]
    assert left_out == pytest.approx([0.7189, 0.7165, 0.7125, 0.7237, 0.7160, 0.7205, 0.6998], abs=0.0005)


def test_speedup_of_moe_over_dense():
    dense = fit_power_law([1e21, 1e22, 1e23], [2.75814, 2.53079, 2.3546], floor=1.6)
    assert dense.inverse(float(dense(5e22))) == pytest.approx(5e22)
    assert 1e23 / fit_power_law(*MOE, floor=1.6).inverse(2.3546) == pytest.approx(4.81, abs=0.02)
    with pytest.raises(ValueError, match="not above the floor"):
        dense.inverse(1.6)


def test_variable_projection_recovers_a_law_it_was_given():
    size, data = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e5, 1e8, 5), np.geomspace(1e7, 1e10, 5)))
    law = fit_size_and_data(size, data, 1.7 + 400 * size**-0.34 + 900 * data**-0.31)
    assert (law.size_exponent, law.data_exponent, law.floor) == pytest.approx((0.34, 0.31, 1.7), rel=1e-3)
    assert law(1e9, 1e11) == pytest.approx(1.7 + 400 * 1e9**-0.34 + 900 * 1e11**-0.31, rel=1e-5)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="diverged"):
        fit_power_law_free([1, 2, 3, 4], [3.0, 2.0, float("nan"), 1.0])
    with pytest.raises(ValueError, match="choose a lower floor"):
        fit_power_law(*HERO, floor=2.5)
    with pytest.raises(ValueError, match="cannot be fitted"):
        fit_size_and_data([1, 2, 3], [1, 2, 3], [3, 2, 1])
    with pytest.raises(ValueError, match="outside this budget's grid"):
        isoflop_optimum([1e9, 2e9, 4e9, 8e9], [(x - 11) ** 2 for x in np.log10([1e9, 2e9, 4e9, 8e9])])


@needs_public
def test_llama3_both_approaches():
    with (PUBLIC / "llama3" / "isoflops_points.csv").open() as file:
        rows = [
            [float(r[n]) for n in ("compute_budget", "training_tokens", "validation_loss")]
            for r in csv.DictReader(file)
        ]
    flops, tokens, losses = np.array(rows).T
    budgets = np.unique(flops)
    optima = [isoflop_optimum(tokens[flops == c], losses[flops == c])[0] for c in budgets]
    assert np.polyfit(np.log10(budgets), np.log10(optima), 1) == pytest.approx([0.5368, -0.5238], abs=1e-4)
    law = fit_size_and_data(flops / (6 * tokens), tokens, losses)
    assert (law.size_exponent, law.data_exponent) == pytest.approx((0.310, 0.314), abs=0.002)
    assert (law.floor, law.size_amplitude) == pytest.approx((0.6048, 59.14), rel=0.002)


@needs_public
def test_chinchilla_by_variable_projection():
    """No published number for the squared error: a golden value (Besiroglu's Huber fit gives .348 / .366)."""
    with (PUBLIC / "chinchilla_epoch" / "svg_extracted_data.csv").open() as file:
        names = ("Model Size", "Training FLOP", "loss")
        rows = [[float(r[n]) for n in names] for r in csv.DictReader(file) if all(r[n] for n in names)]
    size, flops, losses = np.array(sorted(rows, key=lambda row: row[2])[:-5]).T
    law = fit_size_and_data(size, flops / (6 * size), losses)
    assert len(losses) == 240
    assert (law.floor, law.size_exponent, law.data_exponent) == pytest.approx((1.8828, 0.3576, 0.4276), abs=0.001)
