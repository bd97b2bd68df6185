"""A model over a mesh of virtual devices, beside the same model on one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from noonsight.model.config import ModelConfig
from noonsight.model.families import miniature
from noonsight.model.layout import ALONE, Layout, make_mesh
from noonsight.model.params import leaf_name
from noonsight.model.transformer import make_program
from tests.model.nearness import precision_of, relative_error
from tests.model.setting import Packed, compiled, shaken_extra, shaken_params


def over(**sizes: int) -> Layout:
    """The layout of the first of the virtual devices."""
    return Layout(make_mesh(sizes, jax.devices()[: math.prod(sizes.values())]))


def small_config(**changes) -> ModelConfig:
    """Three layers, the last one global; every dim that a mesh splits is a multiple of 8."""
    sizes = {"sequence_length": 48, "window": 9, "num_kv_heads_local": 2, "num_kv_heads_global": 1, "remat": "none"}
    return replace(miniature(32, 3, 61), **(sizes | changes))


def documents(config: ModelConfig, rows: int, seed: int = 0) -> Packed:
    """Rows of documents of 1 to 20 tokens with weights of their own; one row ends in padding, the last one is nothing
    else, so that a device may have no token at all.
    """
    rng, shape = np.random.default_rng(seed), (rows, config.sequence_length)
    tokens = rng.integers(1, config.vocab_size, shape).astype(np.int32)
    segments = np.zeros(shape, np.int32)
    for row in segments:
        ends = np.cumsum(rng.integers(1, 21, config.sequence_length))
        row[:] = np.searchsorted(ends, np.arange(config.sequence_length), side="right")
    segments[1, -11:], segments[-1] = -1, -1
    weights = (rng.uniform(0.5, 1.5, shape) * (segments >= 0)).astype(np.float32)
    weights[:, -1] = 0
    return Packed(jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(weights))


@cache
def step_over(config: ModelConfig, layout: Layout = ALONE):
    """(params, extra, batch) -> ((loss, aux), gradient)."""
    return compiled(jax.value_and_grad(make_program(config, layout).loss, has_aux=True))


def arrays_of(config: ModelConfig):
    """Parameters, and pending quantiles; in bfloat16 so far apart that every token chooses the first two experts,
    whatever rounds.
    """
    extra = shaken_extra(config)
    if extra and precision_of(config) == "bfloat16":
        extra["pending_beta"] += jnp.asarray(50.0 * (np.arange(config.num_experts) > 1), jnp.float32)
    return shaken_params(config), extra


@cache
def alone(config: ModelConfig, rows: int):
    """What one device computes of `documents`."""
    return step_over(config)(*arrays_of(config), documents(config, rows))


def spread(config: ModelConfig, layout: Layout, rows: int, accumulation: int = 1):
    """What a mesh computes of the same, in parts of equal size whose loss, metrics and gradients are joined by weight."""
    batch, joined = documents(config, rows), None
    for part in range(accumulation):
        piece = jax.tree.map(lambda x, part=part: jnp.split(x, accumulation)[part], batch)
        share = piece.weights.sum() / batch.weights.sum() if accumulation > 1 else 1.0
        (loss, aux), gradient = step_over(config, layout)(*arrays_of(config), piece)
        one = jax.tree.map(lambda x, share=share: x * share, (loss, aux["metrics"], gradient))
        joined = one if joined is None else jax.tree.map(jnp.add, joined, one)
    loss, metrics, gradient = joined
    return (loss, {**aux, "metrics": metrics}), gradient


OF_ONE_BATCH = ("router/", "attention/")  # what the metrics of two halves do not say about the whole


def errors(found, expected, config: ModelConfig, accumulation: int = 1) -> dict[str, float]:
    """Relative errors by name: the loss, each metric, the gradient of each array (each expert's for itself)."""
    ((loss, aux), gradient), ((true_loss, true_aux), true_gradient) = found, expected
    precision, named = precision_of(config), {"loss": (loss, true_loss, 0)}
    for name, metric in true_aux["metrics"].items():
        if accumulation == 1 or not name.startswith(OF_ONE_BATCH):
            named[name] = (aux["metrics"][name], metric, 0)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(gradient), jax.tree.leaves(true_gradient), strict=True):
        name = leaf_name(path)
        named[f"gradient of {name}"] = (leaf, other, leaf.ndim - 2 if "expert" in name else 0)
    return {name: relative_error(one, other, precision, lead) for name, (one, other, lead) in named.items()}
