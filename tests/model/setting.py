"""One small model, with every array away from its symmetric start, and one batch of packed documents with padding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noonsight.model.config import ModelConfig
from noonsight.model.families import miniature
from noonsight.model.params import Params, init_params
from noonsight.model.transformer import logits, make_program, token_losses


class Packed(NamedTuple):
    tokens: jax.Array
    segments: jax.Array
    weights: jax.Array


def tiny_config(**changes) -> ModelConfig:
    """Two layers (local, global), 8 heads over 2 local and 1 global kv heads, window shorter than the documents."""
    return replace(
        miniature(64, 2, 61), window=9, global_every=4, sequence_length=40, expert_width=24, latent_width=40, **changes
    )


def shaken_params(config: ModelConfig, seed: int = 0) -> Params:
    """Initial parameters plus noise on every leaf, so that no gate is half open and no convolution the identity."""
    params = init_params(jax.random.key(seed), config)
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        treedef, [leaf + jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
    )


def packed_batch(config: ModelConfig, seed: int = 0, rows: int = 2) -> Packed:
    """Rows of three documents; the last row ends in padding."""
    rng = np.random.default_rng(seed)
    length = config.sequence_length
    tokens = rng.integers(1, config.vocab_size, (rows, length)).astype(np.int32)
    segments = np.zeros((rows, length), np.int32)
    segments[:, 7:], segments[:, 23:], segments[-1, length - 4 :] = 1, 2, -1
    weights = (segments >= 0).astype(np.float32)
    weights[:, -1] = 0
    return Packed(jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(weights))


def shaken_extra(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed + 1)
    return {
        "pending_beta": jnp.asarray(0.3 * rng.standard_normal((config.num_layers, config.num_experts)), jnp.float32)
    }


@cache
def step_of(config: ModelConfig):
    """(params, extra, batch) -> ((loss, aux), gradient), compiled once for all tests."""
    return jax.jit(jax.value_and_grad(make_program(config).loss, has_aux=True))


@cache
def logits_of(config: ModelConfig):
    return jax.jit(lambda params, extra, tokens, segments: logits(params, extra, tokens, segments, config))


@cache
def token_losses_of(config: ModelConfig):
    return jax.jit(lambda params, extra, batch: token_losses(params, extra, batch, config))
