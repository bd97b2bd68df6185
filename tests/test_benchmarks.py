"""The benchmark measures what it says: equal work, equal inputs, paired ratios, nobody counted who does not train."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import rounds, train_step
from benchmarks.ceiling import DIRECTIONS, Product, ceiling_flops_per_s, products
from benchmarks.contestants import EQUAL_WITHIN, HOUSE, SHAPES, Contestant, contestants, hero_moe, plain_moe
from benchmarks.report import markdown, shape_report
from benchmarks.rounds import Contest, Score, missing
from benchmarks.worker import token_batches
from noonsight.model.count import count

AMX = {"avx512f", "avx512_bf16", "amx_bf16"}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
@pytest.mark.parametrize("flags", [set(), {"avx512_bf16"}, AMX], ids=["plain", "avx512_bf16", "amx"])
def test_everybody_does_the_same_work(shape, flags):
    field = contestants(shape, flags)
    names = [contestant.name for contestant in field]
    assert len(set(names)) == len(names)
    flops = [contestant.train_flops_per_token for contestant in field]
    assert max(flops) / min(flops) < (1 + EQUAL_WITHIN) / (1 - EQUAL_WITHIN)
    caps = {contestant.environment.get("ONEDNN_MAX_CPU_ISA") for contestant in field}
    assert ("AVX512_CORE" in caps) == ("avx512_bf16" in flags)
    without_amx = {name for name in names if name.startswith("ours-xla") and name.endswith("noamx")}
    assert without_amx == {"ours-xla-f32-noamx"} | (set() if flags == AMX else {"ours-xla-bf16-noamx"})


def test_unequal_work_is_refused(monkeypatch):
    wide = replace(plain_moe(SHAPES["tiny"]), dense_width=0, expert_width=128)
    monkeypatch.setattr("benchmarks.contestants.qwen3_moe", lambda shape: wide)
    with pytest.raises(ValueError, match=r"torch-eager-f32.*at tiny has \+.*equal work"):
        contestants(SHAPES["tiny"], set())


def test_sizes_of_the_issue():
    assert count(plain_moe(SHAPES["d256"])).total_parameters == pytest.approx(25.9e6, rel=0.02)
    assert count(plain_moe(SHAPES["d512"])).total_parameters == pytest.approx(95e6, rel=0.02)
    for name in ("d256", "d512"):
        hero = count(hero_moe(SHAPES[name]))
        assert hero.total_parameters == pytest.approx(count(plain_moe(SHAPES[name])).total_parameters, rel=0.1)


@pytest.mark.parametrize("make", [plain_moe, hero_moe], ids=["plain", "hero"])
@pytest.mark.parametrize("name", ["d256", "d512"])
def test_products_are_the_counted_flops(make, name):
    """All that `count` counts are products, but for the softmax (3 per score)."""
    shape = SHAPES[name]
    config = make(shape)
    softmax = sum(3 * config.span(layer) * config.num_heads for layer in range(config.num_layers))
    counted = (count(config).forward_flops_per_token - softmax) * shape.batch_size * shape.sequence_length
    assert sum(product.flops for product in products(config, shape.batch_size)) == counted


def test_ceiling_weighs_by_flops():
    found = [Product("a", 1, 10, 10, 10, 1), Product("b", 1, 10, 10, 10, 3)]
    rates = {"slow": [[1.0] * 3, [1.0] * 3], "mixed": [[0.5] * 3, [2.0] * 3]}
    ceilings = ceiling_flops_per_s(found, rates)
    assert ceilings["slow"] == pytest.approx(1.0)
    assert ceilings["mixed"] == pytest.approx(4 / (1 / 0.5 + 3 / 2.0))
    assert ceilings["best"] == pytest.approx(4 / (1 / 1.0 + 3 / 2.0))


def test_inputs_are_equal_and_like_words():
    settings = {"vocab_size": 64, "batch_size": 4, "sequence_length": 256, "seed": 3}
    first, again = token_batches(**settings), token_batches(**settings)
    assert all((a == b).all() for a, b in zip(first, again))
    assert not (first[0] == token_batches(**{**settings, "seed": 4})[0]).all()
    assert first[0].shape == (4, 256) and first[0].min() >= 0 and first[0].max() < 64


def test_absent_sides_are_named_with_what_to_do(tmp_path):
    absent = missing(["ours", "torch"], {"ours": Path(sys.executable), "torch": tmp_path / "python"})
    assert list(absent) == ["torch"] and "make bench-envs" in absent["torch"]


def test_unknown_shape_is_a_message():
    with pytest.raises(ValueError, match="no shape named d300; choose of d256"):
        train_step.train_step(shapes="d300")


def fake(name: str, **options) -> Contestant:
    config = plain_moe(SHAPES["tiny"])
    options = {"num_parameters": count(config).total_parameters} | options
    return Contestant(name=name, side="torch", config=config, says=name, options=options)


def contest(monkeypatch, field: list[Contestant], memory_mib: float) -> tuple[list[Score], list[Product], list]:
    """A contest of fakes, whose ruler answers at once."""

    class Ruler:
        def ask(self, request):
            return {"rates": {"way": [[1e9] * len(DIRECTIONS)] * len(products(field[0].config, 4))}}

        def stop(self):
            pass

    worker = rounds.Worker
    monkeypatch.setattr(rounds, "MODULES", {"torch": "tests.fake_contestant"})
    monkeypatch.setattr(rounds, "available_mib", lambda: memory_mib)
    monkeypatch.setattr(rounds, "Worker", lambda *args: Ruler() if args[1] == "benchmarks.rates" else worker(*args))
    return Contest(
        shape=SHAPES["tiny"], field=field, pythons={"torch": Path(sys.executable)}, num_rounds=3, steps_per_turn=2,
        ceiling_s=0.1, seed=0, say=lambda text: None,
    ).run()  # fmt: skip


def test_who_does_not_train_is_out(monkeypatch):
    field = [
        fake("good"), fake("still", learns=0.0), fake("dies", dies_below=3.0), fake("nan", learns=float("nan")),
        fake("other shape", num_parameters=10**6),
    ]  # fmt: skip
    scores, *_ = contest(monkeypatch, field, memory_mib=1e6)
    reasons = {score.contestant.name: score.rejected for score in scores}
    assert reasons["good"] is None
    assert "does not train" in reasons["still"] and "not finite" in reasons["nan"]
    assert "fell over as told" in reasons["dies"] and "another shape" in reasons["other shape"]


def test_a_contestant_that_was_killed_between_its_turns_is_out_and_the_contest_goes_on(tmp_path):
    job = fake("killed").job(SHAPES["tiny"], 0)
    worker = rounds.Worker(Path(sys.executable), "tests.fake_contestant", {}, job, tmp_path)
    worker.process.kill()
    worker.process.wait()
    with pytest.raises(rounds.Died):
        worker.ask({"steps": 1})
    worker.stop()


def test_short_memory_makes_heats_and_the_reference_runs_in_all(monkeypatch):
    field = [fake("reference"), fake("a"), fake("b")]
    together, *_ = contest(monkeypatch, field, memory_mib=1e6)
    assert [sorted(score.rounds) for score in together] == [[(0, 0), (0, 1), (0, 2)]] * 3
    scores, found, rates = contest(monkeypatch, field, memory_mib=0.0)
    assert {heat for heat, _ in scores[0].rounds} == {0, 1}
    assert {heat for heat, _ in scores[1].rounds} == {0} and {heat for heat, _ in scores[2].rounds} == {1}
    scores[0].rounds = {key: [2.0 if key[0] else 1.0] for key in scores[0].rounds}  # the second heat is twice as slow
    scores[1].rounds, scores[2].rounds = ({key: [2.0] for key in score.rounds} for score in scores[1:])
    rows = shape_report(SHAPES["tiny"], scores, found, rates)["contestants"]
    assert rows["a"]["ratio"] == pytest.approx(0.5) and rows["b"]["ratio"] == pytest.approx(1.0)


def test_demands_compare_the_best_that_counts(monkeypatch):
    field = [
        fake("ours-moe-bf16"), fake("ours-moe-f32"), fake("ours-moe-bf16-muonh"), fake("torch-eager-f32-eager"),
        fake("torch-eager-f32-grouped-noamx"), fake("torch-eager-bf16weights-grouped"), fake("ours-xla-f32-noamx"),
    ]  # fmt: skip
    scores, found, rates = contest(monkeypatch, field, memory_mib=1e6)
    speeds = {"ours-moe-f32": 4.0, "ours-moe-bf16-muonh": 9.0, "torch-eager-f32-eager": 2.0, "torch-eager-bf16weights-grouped": 9.0}  # fmt: skip
    for score in scores:
        score.rounds = {key: [1.0 / speeds.get(score.contestant.name, 1.0)] for key in score.rounds}
    demands = shape_report(SHAPES["tiny"], scores, found, rates)["demands"]
    eager = demands["ours / transformers eager, the best of each"]
    assert eager["of"] == ["ours-moe-f32", "torch-eager-f32-eager"]
    assert eager["value"] == pytest.approx(2.0) and eager["holds"]
    capped = demands["without AMX and our kernels, ours / transformers eager"]
    assert capped["of"] == ["ours-xla-f32-noamx", "torch-eager-f32-grouped-noamx"]
    assert demands["ours / torch.compile, the best of each"]["holds"] is None


def test_our_side_runs_and_prints_json():
    """The whole command, with the reference alone."""
    command = [sys.executable, "benchmarks/train_step.py", "--quick", "--json", "--only", "nobody"]
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert {"schema", "commit", "at", "machine", "settings", "absent", "shapes", "versions"} <= set(figures)
    shape = figures["shapes"]["tiny"]
    (name,) = shape["contestants"]
    row = shape["contestants"][name]
    assert name == shape["reference"] and row["rejected"] is None and row["ratio"] == 1.0
    assert row["num_steps"] == 2 and row["tokens_per_s"] > 0 and row["peak_mib"] > 50 and row["compile_s"] > 0
    assert row["last_loss"] < row["first_loss"]
    assert 0 < row["share_of_ceiling"] < 1
    assert shape["ceiling_flops_per_s"]["best"] >= shape["ceiling_flops_per_s"]["xla-float32"]
    measured = {name for name, demand in shape["demands"].items() if demand["holds"] is not None}
    assert measured == {"share of the ceiling"} and len(shape["demands"]) == 6
    assert f"| {name} | " in markdown(figures)


def test_the_table_on_the_page_is_the_one_that_was_measured():
    if not train_step.RESULT.exists():
        pytest.skip("nothing was measured yet")
    figures = json.loads(train_step.RESULT.read_text())
    assert train_step.PAGE.read_text().split(train_step.HEADING)[1] == markdown(figures)
