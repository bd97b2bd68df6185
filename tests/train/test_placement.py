"""Where a run lies: the mesh that devices make, and the one condition under which another exchange may stand in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Placement
from noonsight.logbook.write import Writer
from noonsight.model.families import delphi, hero, miniature
from noonsight.model.layout import ALONE
from noonsight.train.journal import Journal
from noonsight.train.placement import Dropped, layout_of, model_of
from noonsight.train.recover import SYMPTOMS
from tests.train.toy import make_batch, pretrain_config

MODEL = miniature(16, 1, 61)  # 8 experts


@pytest.mark.parametrize(
    ("placement", "model", "sizes"),
    [
        (Placement(num_devices=4), MODEL, {"expert": 4}),
        (Placement(num_devices=6), MODEL, {"expert": 2, "data": 3}),
        (Placement(num_devices=4), delphi(512), {"data": 4}),
        (Placement(num_devices=8, mesh={"replica": 2, "expert": 2, "context": 2}), MODEL, {"replica": 2, "context": 2}),
    ],
)
def test_devices_share_the_experts_and_what_is_left_over_splits_the_batch(placement, model, sizes):
    layout = layout_of(placement, model)
    assert {axis: layout.size(axis) for axis in sizes} == sizes and layout.mesh.size == placement.num_devices


def test_one_device_is_no_mesh_and_missing_devices_are_named():
    assert layout_of(Placement(), MODEL) is ALONE
    with pytest.raises(ValueError, match=r"asks for 704 devices and this process has 8 \(cpu\)"):
        layout_of(Placement(num_devices=704), hero())
    with pytest.raises(ValueError, match="needs 2 devices, got 4"):
        layout_of(Placement(num_devices=4, mesh={"data": 2}), MODEL)


def test_a_substitute_stands_in_only_for_an_exchange_that_drops_nothing():
    substitute = Placement(num_devices=4, exchange="pooled", capacity_factor=1.15)
    assert model_of(Placement(), MODEL) is MODEL
    found = model_of(substitute, MODEL)
    assert found == replace(MODEL, exchange="pooled", capacity_factor=1.15)
    with pytest.raises(ValueError, match=r"'pooled' in the place of 'ragged' with capacity 1\.15.*drops the same"):
        model_of(substitute, hero())


def test_the_run_stops_at_the_first_assignment_a_substitute_drops(tmp_path):
    values = {"finite": 1.0, "loss": 2.0, "norm/grad": 1.0, "router/drop_rate": 0.0}
    with claim(tmp_path, "worker") as owned:
        writer = Writer(tmp_path, owned)
        placed = Placement(num_devices=4, exchange="ragged", capacity_factor=1.15)
        journal = Journal(tmp_path, writer, pretrain_config(), placement=placed)
        journal.take(0, make_batch(0), values)
        journal.write_pending()
        journal.take(1, make_batch(1), values | {"router/drop_rate": 0.004})
        with pytest.raises(
            Dropped, match=r"Step 1: exchange 'ragged' with capacity 1\.15.*dropped 0\.400% .*more capacity"
        ):
            journal.write_pending()
        own = Journal(tmp_path, writer, pretrain_config())  # what a config drops by itself is its own affair
        own.take(2, make_batch(2), values | {"router/drop_rate": 0.004})
        own.write_pending()
    assert read.metrics(tmp_path)["router/drop_rate"].values == (0.0, 0.004, 0.004)
    assert SYMPTOMS[Dropped.symptom].action == "stop"
