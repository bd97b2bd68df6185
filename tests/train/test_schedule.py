"""Schedules: the figures of the hero, the shape of each kind, zero and full warm-up."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.train.schedule import decay_at, num_warmup_steps, share_of_peak
from tests.train.toy import optimizer_config


def test_hero_warms_up_over_3902_steps_from_zero_and_falls_to_five_percent():
    config = optimizer_config(warmup_fraction=0.01)
    assert num_warmup_steps(config, 390_251) == 3_902
    assert share_of_peak(config, 390_251, 0) == 0.0
    assert share_of_peak(config, 390_251, 1951) == pytest.approx(0.5)
    assert share_of_peak(config, 390_251, 3_902) == 1.0
    assert share_of_peak(config, 390_251, 390_251) == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 0.0, 0.29, 0.5])
def test_rises_then_never_rises_again(kind, warmup):
    config = optimizer_config(schedule=kind, warmup_fraction=warmup, decay_fraction=0.3)
    share = share_of_peak(config, 100, np.arange(101))
    n = num_warmup_steps(config, 100)
    assert n == round(100 * warmup)
    assert (np.diff(share[: n + 1]) > 0).all() and (np.diff(share[n:]) <= 0).all()
    assert share[n] == 1.0 and share[-1] == pytest.approx(0.05)
    assert (share[0] == 0.0) == (n > 0)


def test_wsd_is_flat_until_its_decay():
    share = share_of_peak(
        optimizer_config(schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2), 100, np.arange(101)
    )
    assert (share[10:81] == 1.0).all() and share[90] == pytest.approx(1 - 0.95 / 2)


def test_cosine_is_half_way_down_in_the_middle():
    assert share_of_peak(optimizer_config(schedule="cosine", warmup_fraction=0.0), 100, 50) == pytest.approx(0.525)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_only_rises(kind):
    share = share_of_peak(optimizer_config(schedule=kind, warmup_fraction=1.0), 8, np.arange(8))
    np.testing.assert_allclose(share, np.arange(8) / 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmup_fraction": 1.5}, "share of the run"),
        ({"schedule": "wsd", "warmup_fraction": 0.9, "decay_fraction": 0.2}, "before the warm-up ends"),
        ({"beta2": 1.0}, "below 1"),
        ({"weight_decay_from": -1}, "number of steps"),
        ({"adam_lr": float("nan")}, "finite"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        optimizer_config(**change)


def test_the_heros_decay_begins_late_and_falls_to_zero():
    config = optimizer_config(weight_decay=0.02, weight_decay_from=58_014)
    assert decay_at(config, 390_251, 58_013) == 0.0
    assert decay_at(config, 390_251, 58_014) == pytest.approx(0.0170268, abs=5e-8)
    assert decay_at(config, 390_251, 390_251) == 0.0
    assert decay_at(optimizer_config(weight_decay=0.02), 390_251, 0) == 0.02
    assert (decay_at(optimizer_config(kind="adamw", weight_decay=0.05), 100, np.arange(100)) == 0.05).all()


def test_a_rewarmed_rate_rises_once_more_to_the_schedule():
    plain = share_of_peak(optimizer_config(schedule="wsd", decay_fraction=0.4), 100, np.arange(101))
    config = optimizer_config(schedule="wsd", decay_fraction=0.4, rewarm_from=40, rewarm_steps=10)
    share = share_of_peak(config, 100, np.arange(101))
    assert share[40] == 0.0 and share[45] == pytest.approx(0.5)
    np.testing.assert_array_equal(np.delete(share, np.s_[40:50]), np.delete(plain, np.s_[40:50]))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["linear", "cosine", "wsd"]), st.integers(1, 5000), st.data())
def test_device_and_host_agree(kind, num_steps, data):
    step = data.draw(st.integers(0, num_steps))
    config = optimizer_config(schedule=kind, warmup_fraction=0.05)
    device = float(share_of_peak(config, num_steps, jnp.int32(step), jnp))
    assert device == pytest.approx(float(share_of_peak(config, num_steps, step)), abs=2e-6)
