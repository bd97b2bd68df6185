"""The comparison of optimisers: what it shares, what it keeps, how it chooses AdamW's rates, what an arm writes."""

import json
from dataclasses import asdict, replace

import pytest

from noonsight.model.families import delphi
from noonsight.tokens.mixture import MixtureConfig, plan_mixture
from noonsight.tokens.store import StoreConfig, build_store
from proofs import arms as runs
from proofs import optimizers
from proofs.arms import Arm, rates_of
from proofs.optimizers import at_equal_steps, pace_moved, summary, sweep
from tests.tokens.voyage import run_tokenizer, sentence, write_corpus


def result(planned: Arm, bits_per_byte: float, curve=((5, 3.0), (10, 2.5))):
    about = {"arm": asdict(planned), "setting": runs.setting(), "num_steps": 24, "seconds": 1.5}
    return {**about, "bits_per_byte": bits_per_byte, "curve": [list(point) for point in curve]}


@pytest.fixture
def arms(monkeypatch):
    """Arms that are not run: the loss is lowest at a rate and at decay 0.3; returns the names in running order."""
    ran, best = [], {"rate": 4e-3}

    def arm(root, planned):
        ran.append(planned.name)
        if planned.kind != "adamw":
            return result(planned, 1.5)
        octaves = abs(planned.adam_lr / best["rate"] - 1) + abs(best["rate"] / planned.adam_lr - 1)
        return result(planned, 2.0 + octaves + abs(planned.weight_decay - 0.3), curve=((10, 2.4), (20, 2.2)))

    monkeypatch.setattr(optimizers, "arm", arm)
    monkeypatch.setattr(optimizers, "make_corpus", lambda root: None)
    monkeypatch.setattr(
        optimizers, "pace", lambda root, when: {"adamw": 0.25, "muonh": 0.3 if when == "before" else 0.33}
    )
    return ran, best


def test_the_sweep_tries_every_rate_then_the_decays_at_the_best(arms, tmp_path):
    swept = sweep(tmp_path, 10, 0.25)
    assert [each["arm"]["adam_lr"] for each in swept] == [*optimizers.ADAMW_RATES, 4e-3, 4e-3]
    assert [each["arm"]["weight_decay"] for each in swept[-3:]] == [0.1, 0.0, 0.3]
    assert {each["arm"]["seed"] for each in swept} == {optimizers.SWEEP_SEED}
    assert optimizers.SWEEP_SEED not in optimizers.SEEDS


@pytest.mark.parametrize("rate", [2.5e-4, 3.2e-2])
def test_the_sweep_goes_on_while_the_best_rate_is_an_end(arms, tmp_path, rate):
    arms[1]["rate"] = rate
    rates = sorted({each["arm"]["adam_lr"] for each in sweep(tmp_path, 10, 0.25)})
    assert rates[0] < rate < rates[-1] and rate in rates


def test_each_kind_has_the_steps_of_its_pace_and_adamw_the_best_of_its_sweep(arms, tmp_path):
    found = optimizers.compare(tmp_path, 30, 10, (1, 2))
    assert arms[0][-1] == "adamw-seed1-30s-lr0.002-decay0.3" and found["half_rate"]["arm"]["adam_lr"] == 2e-3
    assert [name.split("s-lr")[0].removesuffix("s") for name in arms[0][-7:-1]] == [
        f"{kind}-seed{seed}-30" for seed in (1, 2) for kind in ("muonh", "muonh-reach", "adamw")
    ]
    for each in found["trios"]:
        assert each["adamw"]["arm"]["weight_decay"] == 0.3 and each["adamw"]["arm"]["num_steps"] == 120
        assert each["muonh"]["arm"]["num_steps"] == each["muonh-reach"]["arm"]["num_steps"] == 100
    assert found["summary"]["muonh"]["lower"] == 2 and pace_moved(found["pace"]) == pytest.approx(0.1)
    text = optimizers.table(found)
    assert "lower in 2 of 2" in text and text.count("| sweep |") == 6 and "moved by 10.0%" in text


def test_the_summary_is_computed():
    def trio(muonh, adamw):
        lengths = {"seed": 1, "seconds": 1, "num_steps": 24}
        one, two = Arm(kind="muonh", **lengths), Arm(kind="adamw", adam_lr=0.1, **lengths)
        return {"muonh": result(one, muonh), "adamw": result(two, adamw, curve=((10, 2.6), (15, 2.0)))}

    trios = [trio(2.0, 2.1), trio(2.0, 1.9), trio(2.0, 2.3)]
    assert at_equal_steps(trios[0], "muonh") == {"step": 10, "muonh": 2.5, "adamw": 2.6}
    found = summary(trios, "muonh")
    assert found["lower"] == 2
    assert found["difference"] == {"mean": -0.1, "standard_deviation": 0.2}
    assert found["difference_at_equal_steps"]["mean"] == -0.1


def test_a_finished_arm_is_not_run_again_unless_its_setting_moved(tmp_path, monkeypatch):
    planned = Arm(kind="adamw", seed=4, seconds=2, num_steps=8, adam_lr=0.1, weight_decay=0.3)
    file = tmp_path / "arms" / f"{planned.name}.json"
    file.parent.mkdir()
    file.write_text(json.dumps(result(planned, 2.5)))
    monkeypatch.setattr(runs.subprocess, "run", lambda *_, **__: pytest.fail("it was run again"))
    assert runs.arm(tmp_path, planned)["bits_per_byte"] == 2.5
    monkeypatch.setattr(runs, "BATCH_SIZE", 64)
    with pytest.raises(pytest.fail.Exception, match="run again"):
        runs.arm(tmp_path, planned)


def test_the_setting_is_large_enough_and_the_rule_holds_there():
    shape = runs.model()
    batch_tokens = runs.BATCH_SIZE * shape.sequence_length
    assert batch_tokens >= 4096 and shape.is_moe
    rates = rates_of(Arm(kind="muonh", seed=1, seconds=300, num_steps=250), shape.width, batch_tokens)
    assert 0.01 < rates.matrix_lr < 0.05 and rates.matrix_lr == pytest.approx(13 / 3 * rates.adam_lr)
    with pytest.raises(ValueError, match="clamped"):
        rates_of(Arm(kind="muonh", seed=1, seconds=300, num_steps=20), shape.width, batch_tokens)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A tiny corpus under the names that an arm expects."""
    import numpy as np

    root, rng = tmp_path_factory.mktemp("optimizers"), np.random.default_rng(0)
    write_corpus(root, [sentence(rng, 60) for _ in range(40)], splits=["train"] * 36 + ["heldout"] * 4)
    inputs = {"documents": root / "documents", "select": root / "select", "tokenizer": run_tokenizer(root)}
    for name in ("store@1", "mixture@1"):
        (root / "corpus" / name).mkdir(parents=True)
    build_store(StoreConfig(), inputs, root / "corpus" / "store@1")
    plan_mixture(MixtureConfig(), {"store": root / "corpus" / "store@1"}, root / "corpus" / "mixture@1")
    return root


def test_steps_fill_the_time_and_no_more():
    assert runs.steps_in(300, 1.25) == 240 and runs.steps_in(300, 1.2501) == 239
    assert runs.steps_in(1, 5) == 4


def plan(root, **about):
    sizes = {"vocab_size": 300, "width": 16, "num_layers": 1, "sequence_length": 32, "num_heads": 2, "dense_width": 16}
    heads = {"num_kv_heads_local": 2, "num_kv_heads_global": 2, "head_width": 8}
    exact = {"compute_dtype": "float32", "matmul_dtype": "float32"}
    shape = replace(delphi(512), **sizes, **heads, **exact)
    return {"setting": {"model": asdict(shape), "batch_size": 4}, "root": str(root), **about}


def test_an_arm_trains_the_steps_it_was_given_and_looks_at_them(root):
    planned = Arm(kind="adamw", seed=1, seconds=3, num_steps=5, adam_lr=0.01)
    found = runs.run_arm(plan(root, arm=asdict(planned)))
    assert found["num_steps"] == 5 and found["tokens"] == 5 * 4 * 32
    assert [step for step, _ in found["curve"]] == [1, 2, 3, 4, 5]
    assert 0 < found["bits_per_byte"] < 8 and found["seconds"] > 0 and found["optimizer"]["adam_lr"] == 0.01


def test_the_pace_is_that_of_both_in_turns_and_the_reach_is_of_its_arm_only(root, monkeypatch):
    monkeypatch.setattr(runs, "PACE_TURNS", 2)
    found = runs.run_pace(plan(root))
    assert set(found["step_s"]) == {"adamw", "muonh"} and all(each > 0 for each in found["step_s"].values())
    assert {len(each) for each in found["steps_s"].values()} == {runs.PACE_STEPS - 1}
    lengths = {"seed": 0, "seconds": 0, "num_steps": 1000}
    scales = [
        runs._Run(plan(root), Arm(kind=kind, **lengths)).shape.head_init_scale for kind in ("muonh", "muonh-reach")
    ]
    assert scales == [0.5, pytest.approx(0.5 * (6144 / 16) ** 0.5)]
