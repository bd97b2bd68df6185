"""Training configs refuse what no run can mean; they and their tests need no JAX."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from noonsight.model.families import miniature
from noonsight.train.config import PretrainConfig
from noonsight.train.schedule import share_of_peak
from tests.train.toy import optimizer_config, pretrain_config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "moun"}, "kind is 'moun'; choose one of muonh, adamw, muon .did you mean 'muon'"),
        ({"newton_schulz": "float16"}, "choose one of float32, bfloat16"),
        ({"expert_hyperball": "whole"}, "choose one of pooled, per_matrix"),
        ({"schedule": "WSD"}, "schedule is 'WSD'; choose one of linear, cosine, wsd"),
        ({"schedule": None}, "choose one of"),
        ({"beta1": float("nan")}, "beta1 is nan.*finite"),
        ({"matrix_lr": float("inf")}, "finite"),
        ({"matrix_lr": -0.1}, "matrix_lr = -0.1.*not negative"),
        ({"adam_lr": "1e-3"}, "adam_lr is '1e-3'; it must be a number"),
        ({"weight_decay_from": 2.5}, "weight_decay_from is 2.5; it must be an int"),
        ({"rewarm_steps": True}, "rewarm_steps is True; it must be an int"),
        ({"weight_decay_from": 5}, "0 where weight_decay is 0"),
        ({"rewarm_from": 5}, "0 where rewarm_steps is 0"),
    ],
)
def test_an_optimiser_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        optimizer_config(**change)


def test_a_schedule_without_a_formula_is_no_other_one():
    unknown = SimpleNamespace(warmup_fraction=0.1, min_lr_fraction=0.0, schedule="step", rewarm_steps=0)
    with pytest.raises(ValueError, match="'step' has no formula"):
        share_of_peak(unknown, 10, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "num_steps = 0"),
        ({"num_steps": 40.0}, "num_steps is 40.0; it must be an int"),
        ({"seed": None}, "seed is None"),
        ({"model": None}, "model is None; it must be of type ModelConfig"),
        ({"sequence_length": 16}, "sequence_length = 16; it must be the model's sequence_length, 8"),
        (
            {"optimizer": optimizer_config(weight_decay=0.1, weight_decay_from=40)},
            "a step of the schedule, which has 40",
        ),
        ({"optimizer": optimizer_config(rewarm_from=35, rewarm_steps=6)}, "rewarm_from . rewarm_steps = 41.*at most"),
    ],
)
def test_a_run_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        pretrain_config(**change)


def test_times_at_the_edge_of_the_run_are_in_it():
    last = optimizer_config(weight_decay=0.1, weight_decay_from=39, rewarm_from=35, rewarm_steps=5)
    run = pretrain_config(optimizer=last)
    assert isinstance(run, PretrainConfig)
    with pytest.raises(ValueError, match="which has 39"):
        replace(run, num_steps=39)


def test_a_longer_run_needs_a_longer_model():
    model = miniature(16, 2, 61)
    assert pretrain_config(model=model, sequence_length=256).batch_tokens == 16 * 256
    with pytest.raises(ValueError, match="lengthened"):
        pretrain_config(model=model, sequence_length=512)
