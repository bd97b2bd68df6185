"""Phases: what changes at named steps is in the config, is checked before anything runs, and changes nothing else."""

from dataclasses import replace

import pytest

from noonsight.logbook import read
from noonsight.model.families import miniature
from noonsight.train.config import Phase
from tests.train.test_loop import leave_jax_and_signals_alone, train  # noqa: F401 (a fixture)
from tests.train.toy import optimizer_config, pretrain_config

LATER = optimizer_config(matrix_lr=1e-2, weight_decay=0.1, weight_decay_from=20)


def test_a_run_with_a_phase_is_the_run_in_two_parts(tmp_path):
    phases = (Phase(name="slower", from_step=20, optimizer=LATER),)
    whole = train(tmp_path / "whole", num_steps=30, phases=phases)
    train(tmp_path / "first", num_steps=20, horizon=30)
    second = train(
        tmp_path / "second", parent=tmp_path / "first", num_steps=30, first_step=20, optimizer=LATER, evaluate_every=0
    )
    assert whole["params_hash"] == second["params_hash"] != train(tmp_path / "plain", num_steps=30)["params_hash"]
    told = [event for event in read.events(tmp_path / "whole") if event.kind == "phase"]
    assert [event.step for event in told] == [20]
    assert "Phase slower begins:" in told[0].text and "optimizer.matrix_lr 0.05 -> 0.01" in told[0].text
    assert read.metrics(tmp_path / "whole")["loss"].steps == tuple(range(30))


def test_a_run_killed_in_its_second_phase_goes_on_there(tmp_path):
    phases = (Phase(name="slower", from_step=20, optimizer=LATER),)
    whole = train(tmp_path / "whole", num_steps=30, phases=phases, checkpoint_every=5)
    (tmp_path / "whole" / "checkpoints" / "step_00000030" / "manifest.json").unlink()
    again = train(tmp_path / "whole", num_steps=30, phases=phases, checkpoint_every=5)
    assert again["params_hash"] == whole["params_hash"]
    assert [event.step for event in read.events(tmp_path / "whole") if event.kind == "phase"] == [20, 25]


def test_parts_say_what_holds_when():
    short = replace(miniature(8, 1, 61), sequence_length=8)
    config = pretrain_config(
        model=short,
        num_steps=40,
        phases=(
            Phase(name="longer", from_step=20, model=replace(short, sequence_length=16, qk_mult=1.5), batch_size=8),
            Phase(name="decay", from_step=30, optimizer=LATER),
        ),
    )
    first, longer, last = config.parts()
    assert [(part.first_step, part.num_steps, part.schedule_steps) for part in (first, longer, last)] == [
        (0, 20, 40),
        (20, 30, 40),
        (30, 40, 40),
    ]
    assert (longer.sequence_length, longer.batch_size, longer.model.qk_mult) == (16, 8, 1.5)
    assert last.model == longer.model and last.batch_size == 8 and last.optimizer == LATER
    assert config.tokens_before(40) == 40 * 128 and config.tokens_before(25) == 25 * 128


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"from_step": 40}, r"phase 'x': from_step = 40; it must be after 0 .* before num_steps, 40"),
        ({"from_step": 0}, r"phase 'x': from_step = 0"),
        (
            {"from_step": 20, "model": miniature(16, 1, 61)},
            r"other fields of the model = \['width'.*a phase may change",
        ),
        (
            {"from_step": 20, "optimizer": optimizer_config(kind="adamw")},
            r"optimizer.kind = 'adamw'.*its moments go on",
        ),
    ],
)
def test_a_phase_that_cannot_be_is_refused(phase, message):
    with pytest.raises(ValueError, match=message):
        pretrain_config(phases=(Phase(name="x", **phase),))


def test_a_skipped_step_of_the_config_is_passed_over(tmp_path):
    skipped = train(tmp_path / "a", num_steps=20, skip_steps=(7, 8))
    assert read.metrics(tmp_path / "a")["loss"].steps == tuple(step for step in range(20) if step not in (7, 8))
    assert skipped["params_hash"] != train(tmp_path / "b", num_steps=20)["params_hash"]
    with pytest.raises(ValueError, match="skip_steps = 40; it must be steps of the run, 0 to 39"):
        pretrain_config(skip_steps=(40,))
