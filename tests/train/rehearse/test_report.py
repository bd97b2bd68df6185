"""The whole rehearsal: one real compilation for eight virtual devices, and what is concluded from what was found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from noonsight.cli.app import run
from noonsight.model.count.devices import carry_bytes
from noonsight.model.families import hero, miniature
from noonsight.model.loss import CHUNK_TOKENS as CHUNK_OF_THE_LOSS
from noonsight.train.rehearse import mistakes, roofline, traffic, what_if
from noonsight.train.rehearse.compile import Found, Leaf, devices_of, leaves_of, parameter_of, program_of
from noonsight.train.rehearse.hlo import Collective, Held
from noonsight.train.rehearse.job import changed, make_job
from noonsight.train.rehearse.report import concluded, page, told
from noonsight.train.rehearse.targets import GIB
from proofs import rehearsal
from tests.train.toy import pretrain_config

KEYS = {
    *("devices", "compile_s", "argument_bytes_per_device", "temp_bytes_per_device", "peak_bytes_per_device"),
    *("compiler_peak_bytes_per_device", "budget_bytes_per_device", "fits", "collectives", "flops"),
    *("executed_over_model_flops", "step_s_estimate", "mfu_estimate", "days_estimate"),
}
EXPERIMENT = """
from dataclasses import replace
from noonsight.logbook.record import Artifact, Placement
from noonsight.model.families import miniature
from noonsight.plan.stage import Experiment, Stage
from noonsight.recipe import pretraining
from proofs import rehearsal
from tests.train.toy import pretrain_config

def experiment():
    model = replace(miniature(16, 2, 32), sequence_length=32, window=16)
    config = pretrain_config(model=model, sequence_length=32, batch_size=64)
    run = Stage(name="run", version="1", function=pretraining.run, config=config, placement=Placement(num_devices=32))
    return Experiment(name="tiny", question="Does it fit?", stages=(run,))
"""


def leaf(path: str, size: int, *, parts: int = 8, on_host: bool = False, shape: tuple[int, ...] = (8, 8)) -> Leaf:
    return Leaf(path=path, shape=shape, bytes=size, parts=parts, on_host=on_host)


def found(**fields: object) -> Found:
    sizes = dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "host_temp_bytes"), 0)
    values = {"lower_s": 1.0, "compile_s": 2.0, "host_memory_bytes": GIB, "compiler_peak_bytes": 100 * GIB, **sizes}
    arrays = dict.fromkeys(("leaves", "collectives", "largest", "looped"), ())
    return Found(**{**values, "host_modelled": False, **arrays, **fields})


@pytest.fixture(scope="module")
def job():
    return make_job(
        pretrain_config(batch_size=64, model=hero(), sequence_length=4096), "gb200:1x16x4", rows_per_device=16
    )


def test_the_command_compiles_and_prints_what_scripts_need(tmp_path, capsys):
    file = tmp_path / "tiny.py"
    file.write_text(EXPERIMENT)
    assert run(["rehearse", str(file), "--target", "cpu:8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() >= KEYS and answer["flops"].keys() == {"useful", "recompute", "padding", "mask", "optimizer"}
    assert (answer["devices"], answer["rows_per_device"], answer["batch_rows"]) == (8, 2, 16)
    assert answer["fits"] and not answer["mistakes"] and answer["compile_s"] > 0
    kinds = {(row["kind"], row["axes"]) for row in answer["collectives"]}
    assert {("all-gather", "expert"), ("all-reduce", "expert")} <= kinds
    assert all(row["count"] > 0 and row["bytes_per_device"] > 0 for row in answer["collectives"])
    assert not [row for row in answer["collectives"] if "?" in row["axes"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "gb20:1x1x4"], "did you mean gb200:11x16x4"),
        (["--target", "cpu:8", "--stage", "ran"], "did you mean 'run'"),
        (["--target", "cpu:8", "--what-if", "colour=red"], "exchange, capacity, remat, rows, layers"),
    ],
)
def test_wrong_use_is_answered_before_anything_is_compiled(tmp_path, capsys, arguments, said):
    file = tmp_path / "tiny.py"
    file.write_text(EXPERIMENT)
    assert run(["rehearse", str(file), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_moments_on_the_host_do_not_count_but_those_of_one_leaf_do():
    leaves = (
        leaf("params.layers.wq", GIB),
        leaf("opt.inner_states.muonh.inner_state.0.trace.layers.wq", 10 * GIB, on_host=True),
        leaf("opt.inner_states.adam.inner_state.0.mu.embed", 6 * GIB, on_host=True),
        leaf("opt.inner_states.adam.inner_state.0.nu.embed", 6 * GIB, on_host=True),
    )
    assert parameter_of(leaves[2].path) == parameter_of(leaves[3].path) == "embed"
    dropped = found(leaves=leaves)
    assert (dropped.host_resident_bytes, dropped.streamed_bytes) == (22 * GIB, 12 * GIB)
    assert dropped.peak_bytes == (100 - 22 + 12) * GIB
    assert found(leaves=leaves, host_modelled=True).peak_bytes == 100 * GIB


def test_planted_mistakes_are_named(job):
    carry = carry_bytes(job.training.model, job.device_tokens)
    assert mistakes.CHUNK_TOKENS == CHUNK_OF_THE_LOSS
    stack = Held(shape="bf16[48,16,4096,6144]", dims=(48, 16, 4096, 6144), bytes=carry, opcode="while", source="w")
    logits = Held(shape="f32[65536,128256]", dims=(65536, 128256), bytes=65536 * 128256 * 4, opcode="dot", source="")
    head = Held(shape="f32[6144,128256]", dims=(6144, 128256), bytes=6144 * 128256 * 4, opcode="dot", source="")
    chunk = Held(shape="f32[256,128256]", dims=(256, 128256), bytes=256 * 128256 * 4, opcode="dot", source="")
    bank = {"path": "params.layers.expert_up", "size": 10 * GIB}
    sound = found(leaves=(leaf(**bank, parts=64),), looped=(stack,), largest=(head, chunk))
    assert mistakes.mistakes(job, sound) == []
    whole = mistakes.mistakes(job, found(leaves=(leaf(**bank, parts=1),)))
    assert [each.kind for each in whole] == ["replicated experts"] and "layers.expert_up" in whole[0].name
    lost = mistakes.mistakes(job, found(looped=(stack, stack, stack)))
    assert [each.kind for each in lost] == ["lost remat"] and lost[0].bytes == 2 * carry
    assert [each.kind for each in mistakes.mistakes(job, found(largest=(logits,)))] == ["whole logits"]


def test_advice_is_given_where_it_does_not_fit(job):
    assert mistakes.advice(job, found(), budget=100 * GIB) == []
    big = found(temp_bytes=90 * GIB, leaves=(leaf("params.layers.expert_up", 30 * GIB, parts=64),))
    texts = {each.text: each.bytes for each in mistakes.advice(job, big, budget=99 * GIB)}
    offload = next(text for text in texts if "offload" in text)
    assert texts[offload] == carry_bytes(job.training.model, job.device_tokens) == 38_654_705_664
    assert list(texts.values()) == sorted(texts.values(), reverse=True)
    assert "DOES NOT FIT" in page(concluded(job, replace(big, compiler_peak_bytes=200 * GIB)))


def test_the_page_and_the_json_say_the_same(job):
    row = Collective(kind="all-to-all", axes="expert", group=64, count=288, bytes_per_device=100 * GIB)
    answer = concluded(job, found(collectives=(row,)))
    values = told(answer)
    assert values.keys() >= KEYS and json.loads(json.dumps(values)) == values
    assert values["useful_and_recompute_over_model_flops"] <= 1.36
    assert f"{values['mfu_estimate']:.1%} MFU" in page(answer) and "all-to-all along expert (64)" in page(answer)
    flops = values["flops"]
    model = flops["useful"] + flops["mask"] + flops["padding"]
    assert values["executed_over_model_flops"] == pytest.approx(sum(flops.values()) / model)


def test_time_and_money_follow_from_what_is_assumed(job):
    near = Collective(kind="all-to-all", axes="expert", group=64, count=1, bytes_per_device=64 * 900_000_000)
    far = Collective(kind="all-reduce", axes="replica", group=11, count=1, bytes_per_device=11 * 10**9)
    target, flops = job.machine, concluded(job, found()).flops
    sizes = {"step_tokens": 2**22, "run_tokens": 2**32, "host_bytes": 0}
    none, one, both = (roofline.estimate(target, flops, sent, **sizes) for sent in ((), (near,), (near, far)))
    assert one.step_s - none.step_s == pytest.approx(0.063 * (1 - roofline.HIDDEN))
    assert both.step_s - one.step_s == pytest.approx(2 * 10 * 10**9 / 50e9)
    assert none.step_s * roofline.REACHED == pytest.approx(flops.executed / 64 / 2.5e15)
    assert none.days == pytest.approx(1024 * none.step_s / 86_400)
    assert none.dollars == pytest.approx(none.days * 24 * 64 * 10.5)


def test_changes_are_combined():
    changes = what_if.combinations(["remat=none,block", "rows=2,4", "layers=3"])
    assert len(changes) == 4 and changes[1] == {"remat": "none", "rows": "4", "layers": "3"}
    job = make_job(pretrain_config(model=miniature(16, 2, 32), sequence_length=256, batch_size=8), "cpu:8")
    after = what_if.apply(job, changes[1])
    assert (after.rows, after.training.model.remat, after.training.model.num_layers) == (32, "none", 3)
    assert changed(job, remat="none").training.model.remat == "none"
    with pytest.raises(ValueError, match="choose one of none, block, offload"):
        what_if.apply(job, {"remat": "bloc"})
    with pytest.raises(ValueError, match="'few' is no number"):
        what_if.apply(job, {"rows": "few"})


def test_what_the_hero_sends_is_what_its_contract_says(job):
    """576 transfers of a step: the figures that XLA's program for 64 GB200 was found to have."""
    assert (job.training.model.exchange, job.training.model.capacity_factor) == ("ragged", 1.15)
    row = Collective(kind="ragged-all-to-all", axes="expert", group=64, count=576, bytes_per_device=1_461_148_581_888)
    answer = concluded(job, found(collectives=(row,)))
    assert answer.exchanged.ratio == pytest.approx(1.0, abs=0.01)
    rows = job.device_tokens * 8
    assert answer.exchanged.sent_bytes == 48 * rows * 6 * 3072 * 2
    assert traffic.exchanged(job, ()) is None
    assert traffic.exchanged(changed(job, exchange="sorted", capacity_factor=None), (row,)) is None
    waves = Collective(kind="all-to-all", axes="expert", group=64, count=1026, bytes_per_device=1_247_161_614_336)
    assert traffic.exchanged(changed(job, exchange="pooled"), (waves,)).ratio == pytest.approx(1.0, abs=0.01)


def test_experts_that_every_device_has_are_named():
    with rehearsal.replicated_experts():
        small = rehearsal.small_job()
        _, state, _ = program_of(small, devices_of(small))
        wrong = mistakes.mistakes(small, found(leaves=tuple(leaves_of(small, state))))
    assert {each.name for each in wrong} == {f"params.layers.expert_{name}" for name in ("gate", "up", "down")}
    assert all("split its dim of experts in SPECS" in each.text and each.bytes == 3 * 7 * 16 * 16 * 4 for each in wrong)
    _, state, _ = program_of(small, devices_of(small))
    assert not mistakes.mistakes(small, found(leaves=tuple(leaves_of(small, state))))


@pytest.mark.parametrize(("number", "text"), [(1023, "1,023 bytes"), (2**20, "1.00 MiB"), (5000 * GIB, "5,000.00 GiB")])
def test_bytes_are_told_in_their_unit(number, text):
    assert mistakes.sized(number) == text
