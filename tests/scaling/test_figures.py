"""Figures of the hero that are no counts, each from the code that a run uses (Marin, #8435)."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from noonsight.model.families import hero
from noonsight.tokens.mixture import apportion, boundary_steps
from noonsight.train.config import OptimizerConfig
from noonsight.train.optim import Rule, make_optimizer
from noonsight.train.schedule import num_warmup_steps, share_of_peak

STEPS = 390_251
TRAINING = OptimizerConfig(adam_lr=0.00075934, matrix_lr=0.0032905, beta2=0.95, epsilon=6.0446e-15, weight_decay=0.02)


def test_scale_of_the_weights_and_bound_of_the_scores():
    config = hero()
    assert f"{config.init_scale / math.sqrt(config.width):.7f}" == "0.0063789"
    assert f"{config.qk_mult * math.sqrt(config.head_width):.3f}" == "14.708"


def test_layers_by_kind():
    kinds = [hero().is_global(layer) for layer in range(48)]
    assert (sum(kinds), len(kinds) - sum(kinds)) == (12, 36)


def test_warm_up_and_last_rate():
    assert num_warmup_steps(TRAINING, STEPS) == 3_902
    shares = [float(share_of_peak(TRAINING, STEPS, step)) for step in (0, 3_902, STEPS)]
    assert shares == pytest.approx([0.0, 1.0, 0.05])


def test_decay_of_gates_and_router_where_the_hero_switched_it_on():
    weight = {"router": jnp.full((1, 2, 3), 4.0)}
    table = {"router": Rule(group="adam", decays=True)}
    optimizer = make_optimizer(TRAINING, weight, num_steps=STEPS, table=table)
    state = optax.tree.set(optimizer.init(weight), count=jnp.int32(58_014))
    updates, _ = optimizer.update({"router": jnp.zeros((1, 2, 3))}, state, weight, step=58_014)
    rate = float(optimizer.rates(58_014)["adam"])
    np.testing.assert_allclose(-updates["router"] / (rate * weight["router"]), 0.0170268, rtol=1e-5)


def test_boundaries_of_the_mixture():
    every = boundary_steps(11_264, 49_152)
    assert every == 48
    assert [divmod(step, every) for step in (108_000, 312_192)] == [(2_250, 0), (6_504, 0)]
    assert all((step * 11_264) % 49_152 for step in range(1, every))
    rows = apportion(np.array([1e-9, 1.0]), 49_152)
    assert rows[0] == 1 and f"{rows[0] / rows.sum():.4e}" == "2.0345e-05"


def test_the_hero_carries_its_context_in_its_config():
    assert replace(hero(), sequence_length=8192).span(3) == 8192  # global layers see all of it
    assert replace(hero(), sequence_length=8192).span(0) == 2048
