"""Machines by name, and the step that is cut to them."""

from __future__ import annotations

import pytest

from noonsight.model.families import hero, miniature
from noonsight.train.rehearse.job import make_job
from noonsight.train.rehearse.targets import CHIPS, EXAMPLES, GIB, environment, mesh_sizes, parse
from tests.train.toy import pretrain_config


@pytest.mark.parametrize(
    ("text", "devices", "slices"),
    [("gb200:11x16x4", 704, 11), ("h100:1x1x8", 8, 1), ("v5p:4x4x4", 64, 1), ("tpu7x:4x4x4", 128, 1), ("cpu:8", 8, 1)],
)
def test_targets_are_read(text, devices, slices):
    target = parse(text)
    assert (target.num_devices, target.num_slices, target.name) == (devices, slices, text)


def test_every_chip_has_an_example_and_stated_facts():
    assert EXAMPLES.keys() == CHIPS.keys()
    for name, chip in CHIPS.items():
        assert parse(EXAMPLES[name]).chip is chip
        assert 0 < chip.budget <= chip.memory and chip.peak > 0 and chip.link >= chip.network
    assert CHIPS["gb200"].budget == int(138.2 * GIB)


@pytest.mark.parametrize(
    ("text", "said"),
    [("gb20:1x1x4", "did you mean gb200"), ("gb200:64", "slices x hosts x devices"), ("v5p", "sides of its torus"),
     ("cpu:0", "such as cpu:8"), ("abacus:3", "Targets look like gb200:11x16x4")],
)  # fmt: skip
def test_what_is_no_target_is_answered(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_slices_are_replicas_and_experts_are_split_where_links_are_fast():
    assert mesh_sizes(parse("gb200:11x16x4"), hero()) == dict(replica=11, data=1, expert=64, model=1, context=1)
    assert mesh_sizes(parse("gb200:1x16x4"), hero(), context=4)["expert"] == 16
    assert mesh_sizes(parse("h100:2x4x8"), hero()) == dict(replica=2, data=4, expert=8, model=1, context=1)
    assert (parse("h100:2x4x8").island, parse("gb200:2x4x4").island, parse("tpu7x:2x2x2").island) == (8, 16, 16)
    assert mesh_sizes(parse("cpu:16"), miniature(16, 2, 32)) == dict(replica=1, data=2, expert=8, model=1, context=1)
    with pytest.raises(ValueError, match="context 3 does not divide the 64 devices that"):
        mesh_sizes(parse("gb200:1x16x4"), hero(), context=3)


def test_a_step_is_cut_to_the_machine():
    training = pretrain_config(batch_size=64)
    alike = make_job(training, "cpu:8", planned_devices=16)
    assert (alike.rows, alike.rows_per_device) == (32, 4), "a part of the plan's devices, each with its own rows"
    assert make_job(training, "cpu:8").rows == 64, "a plan of one device: the whole batch"
    assert make_job(training, "cpu:8", rows_per_device=3).rows == 24
    assert make_job(training, "gb200:11x16x4", planned_devices=4).rows_per_device == 1
    assert not alike.moments_on_host and make_job(training, "v5p:2x2x1").moments_on_host
    with pytest.raises(ValueError, match="0 rows per device"):
        make_job(training, "cpu:8", rows_per_device=0)


def test_variables_are_set_for_the_process_that_compiles():
    assert environment(parse("cpu:12"))["XLA_FLAGS"].endswith("=12")
    assert environment(parse("v5p:2x2x1"))["TPU_SKIP_MDS_QUERY"] == "1"
    assert environment(parse("gb200:1x1x4"))["JAX_PLATFORMS"] == "cpu"
