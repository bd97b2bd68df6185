"""The fixed tables, and what the check says of a ladder that would mislead."""

from dataclasses import replace

import pytest

from noonsight.scaling import ladder


def test_the_miniature_has_no_problem():
    found = ladder.problems(ladder.MINIATURE, ladder.MINIATURE_TARGET, unique_tokens=1_390_000, declared=("beta2",))
    assert found == []


def test_the_miniature_has_the_sizes_of_the_issue():
    target = ladder.MINIATURE_TARGET
    assert (target.width, target.num_layers, target.num_tokens) == (96, 3, 1_380_352)
    assert {rung.batch_tokens for rung in (*ladder.MINIATURE, target)} == {1024}
    assert len(ladder.MINIATURE) >= 4


def test_hero_steps_follow_from_tokens_per_active_parameter():
    active = (60_555_264, 162_004_992, 481_296_384, 1_170_735_104, 22_762_487_808)
    for rung, parameters in zip((*ladder.HERO, ladder.HERO_TARGET), active):
        assert abs(ladder.hero_num_steps(parameters, rung.batch_tokens) - rung.num_steps) <= 1
    assert ladder.HERO_TARGET.num_tokens == 18_005_144_633_344


def test_rungs_of_the_hero_are_the_published_ones():
    """Marin, issue #8435: width, layers, rows, steps."""
    assert [(r.name, r.width, r.num_layers, r.batch_size, r.num_steps) for r in (*ladder.HERO, ladder.HERO_TARGET)] == [
        ("d768", 768, 8, 1_024, 11_420),
        ("d1024", 1024, 12, 2_048, 15_276),
        ("d1536", 1536, 16, 6_144, 15_128),
        ("d2048", 2048, 22, 11_264, 20_072),
        ("d6144", 6144, 48, 11_264, 390_251),
    ]
    assert {rung.sequence_length for rung in ladder.HERO} == {4096}


def test_a_run_without_steps_is_no_rung():
    with pytest.raises(ValueError, match="moe-v1 was published without its number of steps"):
        ladder.published("moe-v1", "rung")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_steps": 60}, "60 steps are too few"),
        ({"width": 32, "num_steps": 166}, "matrix_lr is clamped"),
        ({"num_steps": 2000}, "passes over"),
    ],
)
def test_a_bad_rung_is_named_with_the_reason(change, words):
    bad = replace(ladder.MINIATURE[-1], name="bad", **change)
    found = ladder.problems(
        (*ladder.MINIATURE[:-1], bad), ladder.MINIATURE_TARGET, unique_tokens=1_390_000, declared=("beta2",)
    )
    assert any(problem.startswith("bad") and words in problem for problem in found)


def test_a_ladder_that_does_not_vary_is_refused():
    same = tuple(replace(ladder.MINIATURE[-1], name=f"seed{seed}", seed=seed, num_steps=300) for seed in range(3))
    found = " ".join(ladder.problems(same, ladder.MINIATURE_TARGET, declared=("beta2",)))
    assert "same tokens" in found and "same width" in found and "x the tokens of the longest rung" in found


def test_an_undeclared_beta2_counts():
    assert any("beta2" in problem for problem in ladder.problems(ladder.MINIATURE, ladder.MINIATURE_TARGET))


def test_a_grid_whose_optimum_lies_at_its_edge_is_named():
    falling = [(10.0**k, 5.0 - k * 0.1) for k in range(1, 6)]
    bowl = [(10.0**k, 1 + (k - 3) ** 2) for k in range(1, 6)]
    assert ladder.edge_problems({1e10: bowl}) == []
    assert "1e+11" in ladder.edge_problems({1e10: bowl, 1e11: falling})[0]
