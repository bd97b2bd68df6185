"""`noon count`: the keys that scripts read, the table of rates, and one message for each wrong use."""

import json
import subprocess
import sys

import pytest

from noonsight.cli.app import run as noon
from noonsight.model.families import FAMILIES

PROMISED = {  # the keys that scripts are promised
    "total_parameters": 535_477_106_688,
    "active_parameters": 22_762_487_808,
    "forward_flops_per_token": 49_912_086_528,
    "tokens": 18_005_144_633_344,
    "steps": 390_251,
}
WITH_RUN = ("snowball", "moe-v1", "delphi-1e23", "marin-8b", "marin-32b", "ladder-768", "ladder-1024", "ladder-1536")
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
    assert found == counted(capsys, "hero", "--steps", "390_139")
    assert (found["steps"], found["tokens"]) == (390_139, 17_999_977_250_816)
    assert f"{found['train_flops']:.5e}" == "2.69525e+24"


@pytest.mark.parametrize("family", [*WITH_RUN, "ladder-2048"])
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
    (row,) = counted(capsys, "moe-v1", "--rates")["rates"]
    assert (row["steps"], row["computed"]) == (123_977, ["steps", "warmup_steps"])


def test_another_length_of_the_hero_keeps_its_ladder(capsys):
    *ladder, row = counted(capsys, "hero", "--rates", "--steps", "390139")["rates"]
    assert row["steps"] == 390_139 and row["adam_lr"] == pytest.approx(0.00075934, rel=1e-3)
    assert ladder == counted(capsys, "hero", "--rates")["rates"][:-1] and row["computed"] == []


@pytest.mark.parametrize("family", ["miniature", "nucleotide"])
def test_a_declared_beta2_is_shown(capsys, family):
    (row,) = counted(capsys, family, "--rates")["rates"]
    assert (row["beta2"], row["declared"], row["clamped"]) == (0.98, ["beta2"], [])


def test_marks_of_the_table(capsys):
    def said(*arguments):
        assert noon(["count", *arguments, "--rates"]) == 0
        return capsys.readouterr().out

    hero = said("hero")
    assert hero.count("0.95000*") == 4 and "0.96849*" not in hero and "\n* clamped" in hero and "+" not in hero
    assert "0.98000+" in said("miniature") and "\n+ declared" in said("miniature")
    assert "123,977~" in said("moe-v1") and "\n~ computed" in said("moe-v1")
    assert "\n\n" not in said("ladder-768")  # nothing to explain


def test_without_a_family_it_lists_them(capsys):
    assert [row["family"] for row in json_of(capsys)] == list(FAMILIES)
    assert noon(["count"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(FAMILIES)]] == list(FAMILIES)
    assert all(len(line) <= 100 for line in lines)


def json_of(capsys):
    assert noon(["count", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_active_and_touched_are_told_apart(capsys):
    assert noon(["count", "hero"]) == 0
    labels = {
        line.split()[0]: line.split("  ")[-1] for line in capsys.readouterr().out.splitlines() if "_param" in line
    }
    assert "router" in labels["active_parameters"] and "embedding" in labels["touched_parameters"]
    assert noon(["count", "--help"]) == 0
    told = capsys.readouterr().out
    assert "Active parameters:" in told and "Touched parameters:" in told


def test_tables_for_people(capsys):
    assert noon(["count", "hero"]) == 0
    said = capsys.readouterr().out
    assert "535,477,106,688" in said and "97.5%" in said and all(len(line) <= 100 for line in said.splitlines())
    assert noon(["count", "hero", "--rates"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "0.0032905" in lines[5] and lines[6] == "" and all(len(line) <= 120 for line in lines)
    assert noon(["count", "marin-8b"]) == 0
    assert "not published" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["heros"], "did you mean 'hero'"),
        (["ladder-767"], "did you mean 'ladder-768'"),
        (["hero", "--steps", "0"], "0 steps are no run; give 1 or more"),
        (["hero", "--steps", "-5"], "-5 steps are no run"),
        (["hero", "--steps", "1.5"], "--steps 1.5 is no whole number; give 1 or more"),
        (["hero", "--steps", "0.9"], "--steps 0.9 is no whole number"),
        (["hero", "--steps", "many"], "--steps many is no whole number"),
        (["ladder-1280"], "model of width 1280, but no run of it was published"),
        (["zzz"], "there is no family named 'zzz'. The families are hero, ladder-512,"),
        (["--rates"], "--steps and --rates need a family. The families are hero,"),
        (["marin-8b", "--rates"], "have one are hero, ladder-512, ladder-768,"),
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
