"""Sentinels: each planted fault is told within fifty steps, and clean steps raise no alarm. On real training: proofs/health.py."""

from dataclasses import replace

import numpy as np
import pytest

from noonsight.logbook.record import Event
from noonsight.model.families import miniature
from noonsight.tokens.batches import Batch
from noonsight.train.health import RULES, Health, measure_batch, spike
from noonsight.train.schedule import share_of_peak
from tests.train.toy import optimizer_config, pretrain_config

STEPS, PLANTED = 1000, 200
FINE = {
    "attention/gate_min": 0.9,
    "router/load_min_over_mean": 0.8,
    "router/grad_min_over_mean": 0.5,
    "router/drop_rate": 0.0,
    "ratio/update/adam": 1e-3,
    "norm/param/muonh": 10.0,
    "data/empty_documents": 0.0,
}
CAPPED = {"model": replace(miniature(8, 1, 61), sequence_length=8, exchange="pooled", capacity_factor=1.5)}
SOURCES = {"poetry": (3.0, 3.0), "code": (1.0, 1.0)}


def watcher(**changes):
    return Health(pretrain_config(num_steps=STEPS, **changes))


def clean(step):
    """What a healthy run measures at a step, with its noise."""
    noise = np.random.default_rng(step)
    share = float(share_of_peak(optimizer_config(), STEPS, step))
    return {
        **FINE,
        "loss": 3 * np.exp(-step / 300) + 2 + 0.1 * noise.standard_normal(),
        "rate/adam": np.float32(1e-2 * share),
        "norm/grad": 1 + 0.5 * np.sin(step),
        "router/bias_min": -1 + 0.01 * noise.standard_normal(),
        "router/bias_max": 1 + 0.01 * noise.standard_normal(),
        "data/documents": float(noise.poisson(3.0)),
    }


def watch(health, changes=lambda step: {}, steps=PLANTED + 60, sources=SOURCES):
    found = []
    for step in range(steps):
        told = sources(step) if callable(sources) else sources
        found += [(step, rule) for rule, _ in health.look(step, {**clean(step), **changes(step)}, told)]
    return found


def test_clean_steps_raise_no_alarm():
    assert watch(watcher(), steps=STEPS) == [] and watch(watcher(**CAPPED), steps=STEPS) == []


FAULTS = {
    "non-finite": ({"loss": float("nan")}, 1),
    "above-start": ({"loss": 11.0}, 30),
    "loss-jump": ({"loss": 9.0}, 1),
    "starved-expert": ({"router/load_min_over_mean": 0.01}, 50),
    "frozen-expert": ({"router/grad_min_over_mean": 0.0}, 10),
    "frozen-bias": ({"router/bias_min": -1.0, "router/bias_max": 1.0}, 20),
    "runaway-bias": ({"router/bias_max": 25.0}, 1),
    "shut-gates": ({"attention/gate_min": 0.01}, 20),
    "drops": ({"router/drop_rate": 0.001}, 1),
    "gradient-jump": ({"norm/grad": 20.0}, 1),
    "rate-off-schedule": ({"rate/adam": 5e-3}, 1),
    "norm-drift": ({"norm/param/muonh": 10.02}, 1),
    "large-update": ({"ratio/update/adam": 0.6}, 1),
    "nothing-moves": ({"ratio/update/adam": 0.0}, 1),
    "document-ends": ({"data/documents": 0.0}, 50),
    "empty-documents": ({"data/empty_documents": 2.0}, 1),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_planted_fault_is_told_once_and_in_time(rule):
    fault, within = FAULTS[rule]
    found = [step for step, name in watch(watcher(), lambda step: fault if step >= PLANTED else {}) if name == rule]
    assert len(found) == 1 and PLANTED <= found[0] < PLANTED + within


def test_drops_are_judged_by_what_the_capacity_allows():
    few = watch(watcher(**CAPPED), lambda step: {"router/drop_rate": 0.04 if step >= PLANTED else 0.0})
    many = watch(watcher(**CAPPED), lambda step: {"router/drop_rate": 0.1 if step >= PLANTED else 0.0})
    assert few == [] and [name for _, name in many] == ["drops"] and many[0][0] < PLANTED + 20


def test_too_many_ends_and_a_source_that_gives_nothing_are_told():
    ends = watch(watcher(), lambda step: {"data/documents": 30.0 if step >= PLANTED else clean(step)["data/documents"]})
    assert [name for _, name in ends] == ["document-ends"]
    dry = watch(
        watcher(), sources=lambda step: SOURCES if step < PLANTED else {"poetry": (4.0, 3.0), "code": (0.0, 1.0)}
    )
    assert [name for _, name in dry] == ["missing-source"] and PLANTED < dry[0][0] < PLANTED + 50


def test_held_out_loss_that_rises_while_training_falls_is_told():
    health, found = watcher(), []
    for step in range(300):
        health.look(step, clean(step), SOURCES)
        if step % 50 == 49:
            found += health.evaluated(step, {"eval/loss": 3.0 if step < 200 else 3.2})
    assert [name for name, _ in found] == ["eval-gap"] and "learns its data by heart" in found[0][1]


def test_every_rule_has_a_planted_fault():
    assert {rule.name for rule in RULES} == {*FAULTS, "missing-source", "eval-gap", "eval-not-finite"}


def test_an_evaluation_that_is_no_number_is_told():
    health = watcher()
    health.look(0, clean(0), SOURCES)
    assert [name for name, _ in health.evaluated(1, {"eval/loss": float("nan")})] == ["eval-not-finite"]
    assert health.evaluated(2, {"eval/loss": 3.0}) == []


def test_the_start_of_an_earlier_attempt_counts():
    health = Health(pretrain_config(num_steps=STEPS), first_loss=2.0)
    found = [rule for step in range(20) for rule, _ in health.look(step, {"loss": 2.1})]
    assert found == ["above-start"]


def test_a_spike_stands_far_out_of_noise():
    noise = list(np.random.default_rng(0).normal(3.0, 0.05, 50))
    assert spike([*noise, 3.2]) is None and spike([*noise, 4.5]) > 8
    assert spike([3.0] * 50 + [3.1]) is None, "without noise every rise is many deviations; a fifth it must be"
    assert spike([*noise[:10], 9.0]) is None, "too early to tell"
    scattered = list(0.006 * np.exp(0.8 * np.random.default_rng(1).standard_normal(50)))
    assert spike([*scattered, 0.045]) is None and spike([*scattered, 900.0]) > 8


def test_the_table_says_green_amber_red_and_unmeasured():
    health = watcher()
    health.look(0, {"loss": float("nan"), "norm/grad": 1.0})
    events = [Event(at="", kind="sentinel", text="", cause="gradient-jump", step=9)]
    states = {row[0]: row[2] for row in health.table(events)["rows"]}
    assert states["non-finite"] == "red" and states["gradient-jump"] == "amber"
    assert states["starved-expert"] == "unmeasured" and states["loss-jump"] == "green"


def test_ends_and_padding_are_read_off_a_batch():
    segments = np.array([[0, 0, 1, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, -1, -1, -1]], np.int32)
    weights = np.ones((2, 8), np.float32)
    weights[1, 4:] = 0
    batch = Batch(np.zeros((2, 8), np.int32), segments, weights)
    assert measure_batch(batch) == {"data/documents": 3.0, "data/empty_documents": 1.0, "data/padding": 0.25}
    assert measure_batch({"x": 1}) == {}
