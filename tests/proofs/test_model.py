"""The proof of the model: a verdict follows from its figure, what was not measured holds nothing, the page is the file."""

import json

import pytest

from proofs import acceptance, arms, miniature, model, optimizers
from proofs.model import summary, table
from proofs.page import line, section_of, with_section

GOOD = {
    "counts": [{"value": 5, "published": 5, "error": 0.0}, {"value": 2.0, "published": 2.00001, "error": 5e-6}],
    "rates": [{"error": 2e-5}],
    "norms": {"steps": 1000, "matrices": 21, "drift": 4e-6, "least_turned": 1.1},
    "balance": {"steps": 200, "first": 2.8, "last": 1.01},
    "histogram": {"cases": 24, "bins_off": 0.97},
    "parity": {
        "exit_code": 0,
        "precisions": {
            "float32": {"comparisons": 9, "error": 6e-7},
            "bfloat16": {"comparisons": 5, "error": 0.01},
            "bfloat16, whole model": {"comparisons": 3, "error": 0.03},
        },
    },
    "exchange": {"sorted": {"float32": 6e-7, "bfloat16": 0.012, "bfloat16 products": 0.008}},
    "segments": {"others": 0.0, "itself": 1.4},
    "pending": {"error": 1e-8, "error_without_bias": 5e-4},
    "bits": {"steps": 30, "hashes": ["a", "a"], "same_losses": True},
}
ARM = {"bits_per_byte": 1.9, "seconds": 300.0, "num_steps": 9, "curve": []}
TRIO = {"seed": 1, "muonh": ARM, "muonh-reach": ARM, "adamw": ARM}
TOTAL = {
    "lower": 3,
    "num_seeds": 3,
    "difference": {"mean": -0.1, "standard_deviation": 0.01},
    "difference_at_equal_steps": {"mean": -0.2, "standard_deviation": 0.01},
}
COMPARISON = {
    "commit": "abc",
    "at": "today",
    "seconds": 300.0,
    "pace": {"before": {"muonh": 0.3, "adamw": 0.2}, "after": {"muonh": 0.6, "adamw": 0.41}},
    "sweep": [],
    "trios": [TRIO],
    "half_rate": {**ARM, "bits_per_byte": 1.95, "arm": {"seed": 1}},
    "summary": {"muonh": TOTAL, "muonh-reach": TOTAL},
}
SPEED = {
    "commit": "abc",
    "at": "today",
    "shapes": {
        name: {"demands": {"ours / theirs": {"value": 1.6, "least": 1.5, "goal": 2.0, "holds": False}}}
        for name in ("d256", "d512")
    },
}
BAD = [  # where, the figure that must not hold
    (("counts",), [{"value": 6, "published": 5, "error": 0.2}, {"value": 2.0, "published": 2.0, "error": 0.0}]),
    (("rates",), [{"error": 2e-4}]),
    (("norms", "drift"), 1.3e-5),
    (("norms", "least_turned"), 0.0),
    (("balance", "last"), 1.06),
    (("histogram", "bins_off"), 1.2),
    (("parity", "exit_code"), 1),
    (("parity", "precisions", "float32", "error"), 2e-5),
    (("parity", "precisions", "bfloat16", "error"), 3e-2),
    (("exchange", "sorted", "bfloat16 products"), 0.03),
    (("exchange", "sorted", "bfloat16"), 0.03),
    (("segments", "others"), 1e-9),
    (("segments", "itself"), 0.0),
    (("pending", "error"), 1e-4),
    (("bits", "hashes"), ["a", "b"]),
    (("bits", "same_losses"), False),
]


def figures(**changes):
    return {"acceptance": GOOD, "speed": SPEED, "optimizers": COMPARISON, **changes}


def broken(lines):
    return [each["demand"] for each in lines if not each["holds"]]


def test_all_of_it_holds_when_every_figure_is_good():
    lines = summary(figures())
    assert broken(lines) == [] and len(lines) == len({each["demand"] for each in lines})


@pytest.mark.parametrize(
    ("where", "figure"), BAD, ids=lambda value: ".".join(value) if isinstance(value, tuple) else ""
)
def test_a_figure_out_of_bounds_is_one_demand_that_does_not_hold(where, figure):
    found = json.loads(json.dumps(GOOD))
    place = found
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = figure
    assert len(broken(summary(figures(acceptance=found)))) == 1


@pytest.mark.parametrize(
    ("change", "demand"),
    [
        (
            {"summary": {"muonh": {**TOTAL, "lower": 2}, "muonh-reach": TOTAL}},
            "MuonH as published: seeds in which it is below AdamW after 300 s",
        ),
        (
            {"trios": [{**TRIO, "muonh-reach": {**ARM, "bits_per_byte": 1.96}}]},
            "MuonH with the hero's reach minus AdamW at half its swept rate, one seed",
        ),
        ({"trios": [{**TRIO, "adamw": {**ARM, "bits_per_byte": arms.DIVERGED}}]}, "runs that diverged"),
        (
            {"pace": {"before": {"muonh": 0.3, "adamw": 0.2}, "after": {"muonh": 0.3, "adamw": 0.18}}},
            "ratio of MuonH's to AdamW's step time: moved during the comparison by",
        ),
        ({"seconds": 200.0}, "seconds of a run, at least"),
    ],
)
def test_a_comparison_that_was_lost_or_unfair_is_told(change, demand):
    found = broken(summary(figures(optimizers={**COMPARISON, **change})))
    assert found == [demand]


def test_what_was_not_measured_holds_nothing():
    assert line("x", None, ">=", 1.0)["holds"] is None
    assert len(broken(summary(figures(speed=None)))) == len(model.SHAPES)
    one = {**SPEED, "shapes": {"d256": SPEED["shapes"]["d256"]}}
    assert broken(summary(figures(speed=one))) == ["d512: training speed against its peers (`make bench-train-step`)"]
    assert len(broken(summary(figures(optimizers=None)))) == 1


def test_every_measurement_is_judged():
    assert (
        {each.__name__ for each in acceptance.MEASUREMENTS} == set(GOOD) == {where[0] for where, _ in BAD} | {"counts"}
    )


def test_the_section_stands_before_the_miniature_and_replaces_itself():
    page = f"# What\n\n| file |\n|---|\n| [miniature.json](miniature.json) |\n\n{miniature.HEADING}\nits table\n"
    about = {"machine": {"cpu": "c", "cores": 2, "python": "3", "jax": "0"}, "commit": "x", "at": "now", "minutes": 1}
    section = table({**about, **figures(), "summary": summary(figures())})
    once = with_section(page, model.HEADING, model.ROW, section)
    assert with_section(once, model.HEADING, model.ROW, section) == once and once.endswith(
        f"{miniature.HEADING}\nits table\n"
    )
    assert section_of(once, model.HEADING) == section
    assert once.count(model.ROW) == 1 and f"(miniature.json) |\n{model.ROW}\n{model.HEADING}" in once
    assert "| norm drift of 21 MuonH and AdamH arrays over 1000 steps, relative | 4e-06 | <= 1e-05 | yes |" in section


def test_the_histogram_is_measured():
    """One of the measurements, run: the others cost more than a test may."""
    assert 0 < acceptance.histogram()["bins_off"] <= 1
    assert acceptance._error([1.0, 2.2], [1.0, 2.0], 0) == pytest.approx(0.1)
    assert acceptance._error([[1.0], [2.2]], [[1.0], [2.0]], 1) == pytest.approx(0.1)


def test_the_announced_seeds_are_those_that_are_run():
    assert optimizers.SEEDS == (1, 2, 3)
