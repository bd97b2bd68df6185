"""Closed-form FLOPs against the compiler's own count of the real functions.

XLA counts the body of a loop once, so scans are unrolled here and a row is one block of attention. Tolerances: the
forward and backward passes are 2 to 8 % above the closed form, which leaves norms, gates, rotation, convolutions and
sampling of the loss uncounted; the share falls with the width. The optimiser is counted to 1 %, AdamW's root apart; the
hyperball, which Newton-Schulz would hide, is counted alone.
"""

from dataclasses import replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
import pytest

from noonsight.model import attention
from noonsight.model.count.flops import HYPERBALL, forward_flops, optimizer_flops, recompute_flops, step_flops
from noonsight.model.families import hero
from noonsight.model.params import init_params
from noonsight.model.transformer import logits, make_program
from noonsight.tokens.batches import Batch
from noonsight.train.muon import hyperball
from noonsight.train.optim import make_optimizer
from tests.train.toy import optimizer_config

ROWS, LENGTH = 4, attention.BLOCK
MOE = replace(
    hero(),
    vocab_size=512,
    width=256,
    num_layers=2,
    sequence_length=LENGTH,
    window=LENGTH,
    num_heads=4,
    num_kv_heads_local=2,
    num_kv_heads_global=2,  # the code projects the stored heads on global layers too; the closed form only those kept
    head_width=64,
    gated_norm_rank=0,
    num_experts=4,
    num_experts_per_token=3,
    expert_width=128,
    latent_width=128,
    shared_width=128,
    capacity_factor=None,
    exchange="einsum",  # runs every expert on every row: counted by `_idle`
    balance="none",
    compute_dtype="float32",
    matmul_dtype="float32",
)
DENSE = replace(MOE, num_experts=0, num_experts_per_token=0, num_shared_experts=0, dense_width=512, exchange="sorted")


@pytest.fixture
def unrolled(monkeypatch):
    scan = jax.lax.scan
    monkeypatch.setattr(jax.lax, "scan", lambda *args, **kwargs: scan(*args, **{**kwargs, "unroll": True}))
    loop = jax.lax.fori_loop

    def flat(low, high, body, x):
        if not isinstance(high, int):
            return loop(low, high, body, x)
        return reduce(lambda x, i: body(jnp.int32(i), x), range(low, high), x)

    monkeypatch.setattr(jax.lax, "fori_loop", flat)


def _params(config):
    return jax.eval_shape(partial(init_params, config=config), jax.random.key(0))


def _idle(config):
    """FLOPs of a batch on experts that were not chosen, one pass."""
    idle = config.num_experts - config.num_experts_per_token
    return 6 * ROWS * LENGTH * config.num_layers * idle * config.latent_width * config.expert_width


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_forward(unrolled, config):
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    forward = jax.jit(lambda params, tokens: logits(params, {}, tokens, tokens, config))
    compiled = forward.lower(_params(config), tokens).compile().cost_analysis()["flops"]
    expected = sum(forward_flops(config).values()) * ROWS * LENGTH + _idle(config)
    assert 1.0 < compiled / expected < 1.08


@pytest.mark.parametrize("remat", ["none", "block"])
def test_forward_and_backward(unrolled, remat):
    config = replace(MOE, remat=remat)
    whole = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    batch = Batch(whole, whole, jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.float32))
    loss = make_program(config).loss
    step = jax.jit(lambda params, batch: jax.value_and_grad(loss, has_aux=True)(params, {}, batch))
    counted = step.lower(_params(config), batch).cost_analysis()["flops"]
    passes = 3 + (remat == "block")
    flops = step_flops(config, ROWS)
    assert flops.recompute == recompute_flops(config) * ROWS * LENGTH
    assert 1.0 < counted / (flops.model + flops.recompute + passes * _idle(config)) < 1.08


def test_hyperball():
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    turn = jax.jit(lambda weight, u: weight + hyperball(weight, u, jnp.float32(0.01), axes=(-2, -1)))
    counted = turn.lower(matrix, matrix).cost_analysis()["flops"]
    assert counted / 256**2 == pytest.approx(HYPERBALL, abs=0.01)


@pytest.mark.parametrize(("kind", "low", "high"), [("muonh", 0.99, 1.01), ("muon", 0.99, 1.01), ("adamw", 0.8, 1.0)])
def test_optimiser(unrolled, kind, low, high):
    """The compiler counts no root and joins constants: up to 3 of AdamW's 16 elementwise operations."""
    params = _params(MOE)
    config = optimizer_config(kind=kind, newton_schulz="float32")
    optimizer = make_optimizer(config, params, num_steps=10)

    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params, step=1)
        return jax.tree.map(jnp.add, params, updates), state

    lowered = jax.jit(update).lower(params, jax.eval_shape(optimizer.init, params), params)
    assert low < lowered.cost_analysis()["flops"] / optimizer_flops(MOE, kind) < high
