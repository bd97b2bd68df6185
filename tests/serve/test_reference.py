"""The arbiter against values worked out by hand, and against the JAX model, which shares no line with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from noonsight.model import transformer
from noonsight.model.families import snowball
from noonsight.serve import reference
from tests.serve.fixtures import VOCABULARY, random_model, tiny_config


def some_tokens(rows=2, length=64, seed=1):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (rows, length), dtype=np.int32)


def tiny_snowball():
    """A relative unlike the hero: rotated global layers with a window, no latent space, no convolutions."""
    tiny = tiny_config()
    sizes = ("vocab_size", "width", "num_layers", "sequence_length", "num_heads", "head_width", "window")
    kept = {name: getattr(tiny, name) for name in (*sizes, "num_experts", "num_experts_per_token", "expert_width")}
    changes = {"num_kv_heads_local": 2, "num_kv_heads_global": 2, "global_window": 40, "shared_width": 20}
    return replace(
        snowball(), **kept, **changes, gated_norm_rank=4, compute_dtype="float32", matmul_dtype="float32", remat="none"
    )


@pytest.mark.parametrize(
    "config, bias_scale",
    [(tiny_config(), 0.3), (tiny_config(), 30.0), (tiny_snowball(), 0.3)],
    ids=["hero", "large bias", "snowball"],
)
def test_jax_model_agrees(config, bias_scale):
    params, extra = random_model(config, bias_scale=bias_scale)
    tokens = some_tokens()
    segments = np.repeat([[0, 1, 2]], 2, axis=0).repeat([13, 30, 21], axis=1)
    run = jax.jit(partial(transformer.logits, config=config))
    for given in (np.zeros_like(tokens), segments):
        found = reference.log_softmax(np.asarray(run(params, extra, tokens, given)))
        wanted = reference.log_softmax(reference.forward(params, extra, config, tokens, given))
        assert np.abs(found - wanted).max() < 1e-5


def test_negative_router_logits_still_sum_to_the_combine_sum():
    """With every score at -8 the small sigmoids are renormalised: the output is that of scores at 0."""
    config = tiny_config()
    params, _ = random_model(config)
    layer = reference._slice(reference.as_tree(params)["layers"], 0)
    bias, ones = np.linspace(0, 1, config.num_experts), np.ones((1, 1, config.width))
    found = {}
    for score in (-8, 0):
        layer["router"] = np.full((config.width, config.num_experts), score / config.width)
        found[score], chosen, margin = reference._experts(ones, layer, config, bias)
        assert chosen.tolist() == [[[7, 6]]] and margin[0, 0] == pytest.approx(1 / 7)
    assert found[-8] == pytest.approx(found[0], abs=1e-5)


def test_short_convolution_stops_at_documents():
    x = np.arange(1.0, 6.0).reshape(1, 5, 1)
    weight = np.array([[1.0], [10.0], [100.0], [1000.0]])
    out = reference._sconv(x, weight, np.array([[0, 0, 0, 1, 1]]))
    assert out.ravel().tolist() == [1, 12, 123, 4, 45]


def test_rotation_turns_adjacent_pairs():
    config = replace(tiny_config(), head_width=4, rope_fraction=0.5)
    x = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4).repeat(2, axis=1)
    turned = reference._rotate(x, config)
    assert turned[0, 0, 0].tolist() == [1, 2, 3, 4]
    assert turned[0, 1, 0] == pytest.approx([np.cos(1) - 2 * np.sin(1), 2 * np.cos(1) + np.sin(1), 3, 4])


def test_segments_are_sealed():
    """Changing one document of a packed row leaves the other as it was."""
    config = tiny_config()
    params, extra = random_model(config)
    tokens = some_tokens(1, 40)
    segments = np.array([[0, 1]]).repeat([22, 18], axis=1)
    other = tokens.copy()
    other[:, :22] = (other[:, :22] + 1) % VOCABULARY
    before, after = (reference.forward(params, extra, config, rows, segments) for rows in (tokens, other))
    assert np.abs(before[:, 22:] - after[:, 22:]).max() < 1e-12 and np.abs(before[:, :22] - after[:, :22]).max() > 0.1
