"""Transfer rules against the published tables, and the refusal of clamped values."""

import math

import pytest

from noonsight.model.families import FAMILIES
from noonsight.scaling.transfer import (
    RULES,
    declare,
    delphi_rates,
    family_rates,
    hero_rates,
    may_rates,
    moe_v1_rates,
    require_unclamped,
)

# Marin, issue #8435: width, steps, sequences per step -> adam lr, matrix lr, epsilon, beta2.
HERO_ROWS = [
    (768, 11_420, 1_024, 0.0036505, 0.015819, 1.0340e-15, 0.96849),
    (1024, 15_276, 2_048, 0.0033257, 0.014411, 1.1959e-15, 0.95),
    (1536, 15_128, 6_144, 0.0034360, 0.014889, 1.1901e-15, 0.95),
    (2048, 20_072, 11_264, 0.0030973, 0.013422, 1.3709e-15, 0.95),
    (6144, 390_251, 11_264, 0.00075934, 0.0032905, 6.0446e-15, 0.95),
]
# Marin, Delphi's registry: sequences, steps -> peak lr, peak adam lr, epsilon.
DELPHI_ROWS = [
    (8, 37335, 0.0027599905, 0.00033154736, 3.6604e-08),
    (16, 44317, 0.0030114618, 0.00030431161, 3.9880e-08),
    (16, 54915, 0.0028206104, 0.0002728526, 4.4478e-08),
    (32, 38014, 0.0036221807, 0.00032857141, 3.6936e-08),
    (64, 40163, 0.0040890708, 0.0003191861, 3.8022e-08),
    (64, 56392, 0.0036948762, 0.00026956867, 4.5020e-08),
    (128, 35510, 0.0048782215, 0.00033996076, 3.5698e-08),
    (512, 22057, 0.007425, 0.0004314, 2.81e-08),
    (1024, 38235, 0.0072317973, 0.00032762221, 3.7043e-08),
]


@pytest.mark.parametrize("width, steps, sequences, adam, matrix, epsilon, beta2", HERO_ROWS)
def test_hero_table_to_four_digits(width, steps, sequences, adam, matrix, epsilon, beta2):
    rates = hero_rates(steps * sequences * 4096, width, sequences * 4096)
    for found, expected in zip(
        (rates.adam_lr, rates.matrix_lr, rates.epsilon, rates.beta2), (adam, matrix, epsilon, beta2)
    ):
        assert math.isclose(found, expected, rel_tol=1e-4)
    assert rates.clamped == (() if width == 768 else ("beta2",))
    assert (rates.beta1, rates.momentum, rates.warmup_fraction, rates.min_lr_fraction) == (0.9, 0.95, 0.01, 0.05)


UNCLIPPED = (0.968491, 0.937975, 0.825228, 0.703156, 0.703156)


def test_beta2_before_its_bounds():
    for (width, steps, sequences, *_), unclipped in zip(HERO_ROWS, UNCLIPPED):
        rates = hero_rates(steps * sequences * 4096, width, sequences * 4096)
        assert f"{rates.beta2_unclipped:.6f}" == f"{unclipped:.6f}"
        assert rates.beta2 == max(0.95, rates.beta2_unclipped)


def test_the_published_form_counts_rows_of_8192_tokens():
    assert math.isclose(13 / 3 * 0.087571 * math.sqrt(8192), 34.346, rel_tol=1e-5)
    for width, steps, sequences, *_ in HERO_ROWS:
        tokens, rows = steps * sequences * 4096, sequences / 2  # a row of 8192 is two of 4096
        published = 34.35 * tokens**-0.346 * width**-0.345 * math.sqrt(rows)
        found = hero_rates(tokens, width, sequences * 4096).matrix_lr
        assert math.isclose(found, published, rel_tol=0.005)  # exponents rounded to three digits
        assert not math.isclose(found, published * math.sqrt(2), rel_tol=0.1)  # rows of 4096 in its place


def test_the_first_moe_rule():
    tokens, width, rows = 1_040_000_000_000, 5120, 2048
    rates = moe_v1_rates(tokens, width, rows * 4096)
    published = 1.63 * tokens**-0.2813 * width**-0.3678 * math.sqrt(rows)  # the batch in rows of 4096 tokens
    assert math.isclose(rates.adam_lr, published, rel_tol=1e-4)
    assert math.isclose(rates.matrix_lr, 13 / 3 * rates.adam_lr)
    assert (rates.beta1, rates.beta2, rates.warmup_fraction) == (0.9062, 0.95, 0.1)
    assert math.isclose(moe_v1_rates(1_400_000_000, 512, 131_072).epsilon, 1e-15, rel_tol=1e-4)  # its reference


def test_rates_of_families():
    assert {family.rule for family in FAMILIES.values()} == {*RULES, None}
    snowball = family_rates(FAMILIES["snowball"], FAMILIES["snowball"].tokens)
    assert math.isclose(snowball.matrix_lr, 0.005281, rel_tol=0.001)  # as it resumed with twice the batch
    delphi = FAMILIES["delphi-1e22"]
    assert math.isclose(family_rates(delphi, 160_369_213_440).matrix_lr, 0.0072317973, rel_tol=0.002)
    with pytest.raises(ValueError, match="no transfer rule set the rates of marin-8b") as refused:
        family_rates(FAMILIES["marin-8b"], 1)
    listed = str(refused.value).rstrip(".").partition("have one are ")[2].split(", ")
    assert listed == [name for name, family in FAMILIES.items() if family.rule is not None]


@pytest.mark.parametrize("name", ["miniature", "nucleotide"])
def test_a_family_may_state_its_beta2(name):
    family = FAMILIES[name]
    rates = family_rates(family, family.num_steps * family.batch_size * 256)
    assert (rates.beta2, rates.clamped) == (0.98, ()) and rates.beta2_unclipped > 0.9999


@pytest.mark.parametrize("sequences, steps, matrix, adam, epsilon", DELPHI_ROWS)
def test_delphi_rows_within_a_fifth_of_a_percent(sequences, steps, matrix, adam, epsilon):
    rates = delphi_rates(sequences * steps * 4096, sequences)
    for found, expected in zip((rates.matrix_lr, rates.adam_lr, rates.epsilon), (matrix, adam, epsilon)):
        assert math.isclose(found, expected, rel_tol=0.002)


def test_may_rule_gives_the_rates_of_snowball():
    rates = may_rates(10_000_000_000_000, 2560, 8192 * 4096)
    assert math.isclose(rates.adam_lr, 0.000861, rel_tol=0.005)
    assert math.isclose(rates.matrix_lr, 0.003733, rel_tol=0.005)


def test_a_clamped_rate_is_refused_by_name():
    rates = declare(hero_rates(170_000, 32, 1024), beta2=0.98)
    assert rates.matrix_lr == 0.05
    with pytest.raises(ValueError, match=r"d32: matrix_lr = 0.05 is clamped"):
        require_unclamped(rates, "d32")


def test_a_declared_beta2_is_no_clamp():
    rates = hero_rates(340_000, 64, 1024)
    with pytest.raises(ValueError, match="beta2"):
        require_unclamped(rates, "d64")
    assert require_unclamped(declare(rates, beta2=0.98), "d64").beta2 == 0.98


def test_impossible_sizes_are_refused():
    for rule in (hero_rates, may_rates, moe_v1_rates):
        with pytest.raises(ValueError, match="width must be positive"):
            rule(1000, 0, 10)
