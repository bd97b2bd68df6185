"""One small model, with every array away from its symmetric start, one batch of packed documents with padding, and
the pieces of the model under one signature each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noonsight.model import attention, elementary, transformer
from noonsight.model.config import ModelConfig
from noonsight.model.families import miniature
from noonsight.model.moe import moe
from noonsight.model.params import Params, shapes
from noonsight.model.transformer import logits, make_program, token_losses

# A third of the compile time; the arrays of the tests are too small to miss what it leaves out.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


# What a config may round to, and the name of its bound in test_parity.
PRECISIONS = {
    "float32": {"compute_dtype": "float32", "matmul_dtype": "float32"},
    "bfloat16": {"compute_dtype": "bfloat16", "matmul_dtype": "bfloat16"},
    "bfloat16 products": {
        "compute_dtype": "float32",
        "matmul_dtype": "bfloat16",
    },  # the C++ kernels where there are any
}


class Packed(NamedTuple):
    tokens: jax.Array
    segments: jax.Array
    weights: jax.Array


def compiled(function):
    return jax.jit(function, compiler_options=QUICK)


def tiny_config(**changes) -> ModelConfig:
    """Two layers (local, global), 8 heads over 2 local and 1 global kv heads, window shorter than the documents."""
    sizes = {"window": 9, "global_every": 4, "sequence_length": 40, "expert_width": 24, "latent_width": 40}
    return replace(miniature(64, 2, 61), **(sizes | changes))


def dense_config(family: ModelConfig, **changes) -> ModelConfig:
    """A dense family at the size of the tests: 4 heads over 2 kv heads."""
    sizes = {"vocab_size": 61, "width": 32, "num_layers": 2, "sequence_length": 40, "num_heads": 4, "head_width": 8}
    heads = {"num_kv_heads_local": 2, "num_kv_heads_global": 2, "dense_width": 48, **PRECISIONS["float32"]}
    return replace(family, **(sizes | heads | changes))


def shaken_params(config: ModelConfig, seed: int = 0) -> Params:
    """Matrices of initial size plus noise on every leaf, so that no gate is half open and no convolution the
    identity. Drawn in NumPy: compiling `init_params` for one small config takes longer than its tests.
    """
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        start = (
            1.0 if path[-1].name.endswith("norm") else config.init_scale / config.width**0.5 * rng.normal(size=shape)
        )
        if path[-1].name.startswith("sconv"):
            start = np.eye(shape[1], 1)[None]
        return jnp.asarray(start + 0.1 * rng.normal(size=shape), jnp.float32)

    return jax.tree.map_with_path(draw, shapes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))


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
    if config.balance == "none":
        return {}
    return {
        "pending_beta": jnp.asarray(0.3 * rng.standard_normal((config.num_layers, config.num_experts)), jnp.float32)
    }


def moe_piece(m, layer, is_global, segments, config):
    return moe(m, segments >= 0, layer, config)[0]


def block_piece(x, layer, is_global, segments, config):
    wide = attention.lower_bounds(segments, config.global_window or segments.shape[1])
    lower = jnp.where(is_global, wide, attention.lower_bounds(segments, config.window))
    reach = transformer.Reach(
        lambda site, x, taps: x if taps is None else elementary.short_convolution(x, taps, segments),
        lambda q, k, v: attention.attend(q, k, v, lower, config.matmul_dtype),
    )
    positions = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    angles = elementary.rotation(positions, config.rotated_width, config.rope_theta)
    kind = transformer.Kind(is_global, ~is_global | config.rope_on_global)
    return transformer.block(x, layer, kind, reach, angles, segments >= 0, config)[0]


@cache
def step_of(config: ModelConfig):
    """(params, extra, batch) -> ((loss, aux), gradient), compiled once for all tests."""
    return compiled(jax.value_and_grad(make_program(config).loss, has_aux=True))


@cache
def logits_of(config: ModelConfig):
    return compiled(lambda params, extra, tokens, segments: logits(params, extra, tokens, segments, config))


@cache
def token_losses_of(config: ModelConfig):
    return compiled(lambda params, extra, batch: token_losses(params, extra, batch, config))
