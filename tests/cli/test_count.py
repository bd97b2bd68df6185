"""`noon count`: the keys that scripts read, the table of rates, and one message for each wrong use."""

import json
import subprocess
import sys

import pytest

from noonsight.cli.app import run as noon

PROMISED = {  # the keys that scripts are promised
    "total_parameters": 535_477_106_688,
    "active_parameters": 22_762_487_808,
    "forward_flops_per_token": 49_912_086_528,
    "tokens": 18_005_144_633_344,
    "steps": 390_251,
}
FAMILIES = ("snowball", "moe-v1", "delphi-1e23", "marin-8b", "marin-32b", "ladder-768", "ladder-1024", "ladder-1536")
RATES = [  # adam_lr, matrix_lr, epsilon, beta2, unclipped beta2
    ("ladder-768", "47.899", 0.0036505, 0.015819, 1.0340e-15, 0.96849, 0.968491),
    ("ladder-1024", "128.144", 0.0033257, 0.014411, 1.1959e-15, 0.95, 0.937975),
    ("ladder-1536", "380.709", 0.0034360, 0.014889, 1.1901e-15, 0.95, 0.825228),
    ("ladder-2048", "926.069", 0.0030973, 0.013422, 1.3709e-15, 0.95, 0.703156),
    ("hero", "18005.145", 0.00075934, 0.0032905, 6.0446e-15, 0.95, 0.703156),
]


def counted(capsys, *arguments):
    assert noon(["count", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_hero(capsys):
    found = counted(capsys, "hero")
    assert {name: found[name] for name in PROMISED} == PROMISED
    assert f"{found['train_flops']:.5e}" == "2.69602e+24"
    assert sum(found["parts"].values()) == found["total_parameters"]
    assert sum(found["forward_flops_by_part"].values()) == found["forward_flops_per_token"]
    step = found["step_flops"]
    assert step["useful"] + step["attention_mask"] + step["padding"] == 3 * 49_912_086_528 * found["batch_tokens"]


def test_another_number_of_steps(capsys):
    found = counted(capsys, "hero", "--steps", "390139")
    assert (found["steps"], found["tokens"]) == (390_139, 17_999_977_250_816)
    assert f"{found['train_flops']:.5e}" == "2.69525e+24"


@pytest.mark.parametrize("family", [*FAMILIES, "ladder-2048"])
def test_families_have_the_same_keys(capsys, family):
    found = counted(capsys, family)
    assert found["family"] == family and PROMISED.keys() | {"train_flops"} <= found.keys()
    assert found["train_flops"] == 3 * found["forward_flops_per_token"] * found["tokens"]


def test_table_of_rates(capsys):
    rows = counted(capsys, "hero", "--rates")["rates"]
    for row, (family, billions, *expected) in zip(rows, RATES, strict=True):
        assert (row["family"], f"{row['tokens'] / 1e9:.3f}") == (family, billions)
        found = [row[name] for name in ("adam_lr", "matrix_lr", "epsilon", "beta2", "beta2_unclipped")]
        assert found == pytest.approx(expected, rel=1e-4)
    assert [row["warmup_steps"] for row in rows] == [114, 152, 151, 200, 3_902]


def test_rates_of_one_family(capsys):
    (row,) = counted(capsys, "ladder-1536", "--rates")["rates"]
    assert row["matrix_lr"] == pytest.approx(0.014889, rel=1e-4)
    (row,) = counted(capsys, "hero", "--rates", "--steps", "390139")["rates"]
    assert row["steps"] == 390_139 and row["adam_lr"] == pytest.approx(0.00075934, rel=1e-3)


def test_tables_for_people(capsys):
    assert noon(["count", "hero"]) == 0
    said = capsys.readouterr().out
    assert "535,477,106,688" in said and "97.5%" in said and all(len(line) <= 100 for line in said.splitlines())
    assert noon(["count", "hero", "--rates"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and "0.0032905" in lines[-1] and all(len(line) <= 120 for line in lines)
    assert noon(["count", "marin-8b"]) == 0
    assert "not published" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["heros"], "did you mean 'hero'"),
        (["ladder-767"], "did you mean 'ladder-768'"),
        (["hero", "--steps", "0"], "0 steps are no run; give 1 or more"),
        (["hero", "--steps", "-5"], "-5 steps are no run"),
        (["marin-32b", "--rates"], "no transfer rule set the rates of marin-32b"),
    ],
)
def test_wrong_use(capsys, arguments, words):
    assert noon(["count", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_counting_imports_no_jax():
    code = (
        "import sys; from noonsight.cli.app import run\n"
        "assert run(['count', 'hero', '--rates']) == run(['count', 'snowball']) == 0 and 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
