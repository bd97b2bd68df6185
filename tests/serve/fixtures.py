"""A tiny hero-family model whose weights hide nothing: wide matrices, biased router, gains and taps off identity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from noonsight.model.config import ModelConfig
from noonsight.model.families import miniature
from noonsight.model.params import Params, shapes
from noonsight.tokens import tokenizer

VOCABULARY = 300


def tiny_config(**changes) -> ModelConfig:
    """Three local layers and a global one, unequal kv heads, window 24 in a context of 64."""
    small = replace(miniature(32, 4, VOCABULARY), sequence_length=64, window=24, num_heads=4, num_kv_heads_local=2)
    return replace(small, num_kv_heads_global=1, latent_width=24, expert_width=12, shared_width=20, **changes)


def random_model(config: ModelConfig, seed: int = 0, bias_scale: float = 0.3) -> tuple[Params, dict[str, np.ndarray]]:
    """Float32 parameters: nothing zero, nothing one, nothing symmetric; pending quantile of the given scale."""
    generator = np.random.default_rng(seed)

    def leaf(path, shape):
        noise = generator.normal(size=shape).astype(np.float32)
        name = path[-1].name
        if name.endswith("norm"):
            return 1 + np.float32(0.2) * noise
        if name.startswith("sconv"):
            identity = (np.arange(shape[-2]) == 0).astype(np.float32)[:, None]
            return identity + np.float32(0.3) * noise
        return (
            np.float32(0.3 if name in ("router", "head_gate") else shape[-2] ** -0.5 if len(shape) > 1 else 0.1) * noise
        )

    params = jax.tree.map_with_path(leaf, shapes(config), is_leaf=lambda node: isinstance(node, tuple))
    pending = bias_scale * generator.normal(size=(config.num_layers, config.num_experts)) + 0.7
    return params, {"pending_beta": pending.astype(np.float32)}


def tiny_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer of 264 tokens plus a few merges, in `folder`."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(tokenizer.SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(["the sea and the ship and the stars at noon, héllo wörld"] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
