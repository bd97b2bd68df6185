"""The comparison of optimisers: what it shares, what it keeps, how it chooses AdamW's rates, what an arm writes."""

import json
from dataclasses import asdict, replace

import pytest

from noonsight.model.families import delphi
from noonsight.tokens.mixture import MixtureConfig, plan_mixture
from noonsight.tokens.store import StoreConfig, build_store
from proofs import optimizers
from proofs.optimizers import Arm, at_equal_steps, rates_of, summary, sweep
from tests.tokens.voyage import run_tokenizer, sentence, write_corpus


def result(planned: Arm, bits_per_byte: float, curve=((5, 3.0), (10, 2.5))):
    about = {"arm": asdict(planned), "setting": optimizers.setting(), "num_steps": 24, "seconds": 1.5}
    return {**about, "bits_per_byte": bits_per_byte, "curve": [list(point) for point in curve]}


@pytest.fixture
def arms(monkeypatch):
    """Arms that are not run: the loss is lowest at a rate and at decay 0.3; returns the names in running order."""
    ran, best = [], {"rate": 4e-3}

    def arm(root, planned):
        ran.append(planned.name)
        if planned.kind == "muonh":
            return result(planned, 1.5)
        octaves = abs(planned.adam_lr / best["rate"] - 1) + abs(best["rate"] / planned.adam_lr - 1)
        return result(planned, 2.0 + octaves + abs(planned.weight_decay - 0.3), curve=((10, 2.4), (20, 2.2)))

    monkeypatch.setattr(optimizers, "arm", arm)
    monkeypatch.setattr(optimizers, "make_corpus", lambda root: None)
    return ran, best


def test_the_sweep_tries_every_rate_then_the_decays_at_the_best(arms, tmp_path):
    swept = sweep(tmp_path, 10)
    assert [each["arm"]["adam_lr"] for each in swept] == [*optimizers.ADAMW_RATES, 4e-3, 4e-3]
    assert [each["arm"]["weight_decay"] for each in swept[-3:]] == [0.1, 0.0, 0.3]
    assert {each["arm"]["seed"] for each in swept} == {optimizers.SWEEP_SEED}
    assert optimizers.SWEEP_SEED not in optimizers.SEEDS


@pytest.mark.parametrize("rate", [2.5e-4, 3.2e-2])
def test_the_sweep_goes_on_while_the_best_rate_is_an_end(arms, tmp_path, rate):
    arms[1]["rate"] = rate
    rates = sorted({each["arm"]["adam_lr"] for each in sweep(tmp_path, 10)})
    assert rates[0] < rate < rates[-1] and rate in rates


def test_seeds_take_turns_and_adamw_has_the_best_of_its_sweep(arms, tmp_path):
    found = optimizers.compare(tmp_path, 30, 10, (1, 2))
    assert arms[0][-1] == "adamw-seed1-30s-lr0.002-decay0.3" and found["half_rate"]["arm"]["adam_lr"] == 2e-3
    assert [name.split("-lr")[0] for name in arms[0][-5:-1]] == [
        "muonh-seed1-30s",
        "adamw-seed1-30s",
        "adamw-seed2-30s",
        "muonh-seed2-30s",
    ]
    assert all(pair["adamw"]["arm"]["weight_decay"] == 0.3 for pair in found["pairs"])
    assert found["summary"]["muonh_lower"] == 2
    text = optimizers.table(found)
    assert "lower in 2 of 2" in text and text.count("| sweep |") == 6


def test_the_summary_is_computed():
    def pair(muonh, adamw):
        one, two = Arm(kind="muonh", seed=1, seconds=1), Arm(kind="adamw", seed=1, seconds=1, adam_lr=0.1)
        return {"muonh": result(one, muonh), "adamw": result(two, adamw, curve=((10, 2.6), (15, 2.0)))}

    pairs = [pair(2.0, 2.1), pair(2.0, 1.9), pair(2.0, 2.3)]
    assert at_equal_steps(pairs[0]) == {"step": 10, "muonh": 2.5, "adamw": 2.6}
    found = summary(pairs)
    assert found["muonh_lower"] == 2
    assert found["difference"] == {"mean": -0.1, "standard_deviation": 0.2}
    assert found["difference_at_equal_steps"]["mean"] == -0.1


def test_a_finished_arm_is_not_run_again_unless_its_setting_moved(tmp_path, monkeypatch):
    planned = Arm(kind="adamw", seed=4, seconds=2, adam_lr=0.1, weight_decay=0.3)
    file = tmp_path / "arms" / f"{planned.name}.json"
    file.parent.mkdir()
    file.write_text(json.dumps(result(planned, 2.5)))
    monkeypatch.setattr(optimizers.subprocess, "run", lambda *_, **__: pytest.fail("it was run again"))
    assert optimizers.arm(tmp_path, planned)["bits_per_byte"] == 2.5
    monkeypatch.setattr(optimizers, "BATCH_SIZE", 64)
    with pytest.raises(pytest.fail.Exception, match="run again"):
        optimizers.arm(tmp_path, planned)


def test_the_setting_is_large_enough_and_the_rule_holds_there():
    shape = optimizers.model()
    batch_tokens = optimizers.BATCH_SIZE * shape.sequence_length
    assert batch_tokens >= 4096 and shape.is_moe
    rates = rates_of(Arm(kind="muonh", seed=1, seconds=300), shape.width, batch_tokens, num_steps=250)
    assert 0.01 < rates.matrix_lr < 0.05 and rates.matrix_lr == pytest.approx(13 / 3 * rates.adam_lr)
    with pytest.raises(ValueError, match="clamped"):
        rates_of(Arm(kind="muonh", seed=1, seconds=300), shape.width, batch_tokens, num_steps=20)


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
    assert optimizers.steps_in(300, 1.25) == 240 and optimizers.steps_in(300, 1.2501) == 239
    assert optimizers.steps_in(1, 5) == 4


def test_an_arm_trains_the_steps_it_said_and_looks_at_them(root):
    sizes = {"vocab_size": 300, "width": 16, "num_layers": 1, "sequence_length": 32, "num_heads": 2, "dense_width": 16}
    heads = {
        "num_kv_heads_local": 2,
        "num_kv_heads_global": 2,
        "head_width": 8,
        "compute_dtype": "float32",
        "matmul_dtype": "float32",
    }
    shape = replace(delphi(512), **sizes, **heads)
    planned = Arm(kind="adamw", seed=1, seconds=0.1, adam_lr=0.01)
    plan = {"arm": asdict(planned), "setting": {"model": asdict(shape), "batch_size": 4}, "root": str(root)}
    (root / "arm.plan").write_text(json.dumps(plan))
    assert optimizers.run_arm(root / "arm.plan", root / "arm.json") == 0
    found = json.loads((root / "arm.json").read_text())
    assert found["tokens"] == found["num_steps"] * 4 * 32
    assert [step for step, _ in found["curve"]] == list(range(1, found["num_steps"] + 1))
    assert 0 < found["bits_per_byte"] < 8 and found["seconds"] > 0 and found["optimizer"]["adam_lr"] == 0.01
