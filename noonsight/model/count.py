"""How large a model is and what it costs, in closed form, from the config alone. JAX is not imported.

Parameters: every array of the tree in `params.py`. Active parameters: Marin's rule, the matrices a token passes
outside embedding, head and gated norms. FLOPs: two per multiply-add of the matrices, the spans of attention taken in
full (no halving for causality), three per score for the softmax; convolutions, gates and gated norms are not counted
(Marin, #8435). Training costs three forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from noonsight.model.config import ModelConfig
from noonsight.model.families import FAMILIES


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Exact counts of one config. FLOPs are per token of one forward pass."""

    total_parameters: int
    active_parameters: int
    touched_parameters: int  # everything a token passes, embedding, head and gains included
    forward_flops_per_token: int
    parts: dict[str, int]  # parameters by part, summing to the total

    def train_flops(self, tokens: int) -> int:
        """FLOPs of training on `tokens` tokens, recomputation not credited."""
        return 3 * self.forward_flops_per_token * tokens


def count(config: ModelConfig) -> Counts:
    """Counts of any config."""
    parts = _parts(config)
    total = sum(parts.values())
    idle_experts = config.num_experts - config.num_experts_per_token
    return Counts(
        total_parameters=total,
        active_parameters=config.num_layers * _active_per_layer(config),
        touched_parameters=total - config.num_layers * idle_experts * _expert(config),
        forward_flops_per_token=_forward_flops(config),
        parts=parts,
    )


def count_family(name: str, *, steps: int | None = None) -> dict[str, Any]:
    """Counts of a family by name with the tokens and FLOPs of its published run, or of `steps` steps of its batch.

    `steps` of the result is None where only the tokens of the run were published. Raises ValueError for an unknown
    name.
    """
    if name not in FAMILIES:
        raise ValueError(f"count: no family named {name!r}; choose one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    config = family.config()
    counts = count(config)
    batch_tokens = family.batch_size * config.sequence_length
    num_steps = family.num_steps if steps is None else steps
    published = family.tokens if steps is None else None
    tokens = published if published is not None else num_steps * batch_tokens
    return {
        "family": name,
        "width": config.width,
        "num_layers": config.num_layers,
        "total_parameters": counts.total_parameters,
        "active_parameters": counts.active_parameters,
        "touched_parameters": counts.touched_parameters,
        "forward_flops_per_token": counts.forward_flops_per_token,
        "batch_tokens": batch_tokens,
        "steps": num_steps,
        "tokens": tokens,
        "train_flops": counts.train_flops(tokens),
        "parts": counts.parts,
    }


def _parts(config: ModelConfig) -> dict[str, int]:
    d, layers = config.width, config.num_layers
    query, stored = config.num_heads * config.head_width, config.num_kv_heads_local * config.head_width
    experts = config.num_experts
    gated_norm = 2 * d * config.gated_norm_rank
    qk_gains = 2 * config.head_width if config.qk_norm == "gain" else 0
    parts = {
        "embedding": config.vocab_size * d,
        "head": 0 if config.tie_embeddings else config.vocab_size * d,
        "attention": layers * (2 * d * query + 2 * d * stored),
        "head_gates": layers * d * config.num_heads if config.head_gate else 0,
        "gated_norms": (2 * layers + 2) * gated_norm if config.gated_norm_rank else 0,
        "convolutions": layers * config.sconv_kernel * (stored + 2 * d),
        "router": layers * (d * experts + experts),
        "latent": layers * 2 * d * config.latent_width,
        "experts": layers * experts * _expert(config),
        "shared_experts": layers * config.num_shared_experts * 3 * d * config.shared_width,
        "dense": layers * 3 * d * config.dense_width,
        "gains": layers * (2 * d + config.latent_width + qk_gains) + d,
    }
    if config.gated_norm_rank:  # the norm of the embedding exists only with its gate
        parts["gains"] += d
    return parts


def _expert(config: ModelConfig) -> int:
    return 3 * config.expert_input_width * config.expert_width


def _active_per_layer(config: ModelConfig) -> int:
    d = config.width
    heads = 2 * config.num_heads + 2 * config.num_kv_heads_local
    routed = d * config.num_experts + config.num_experts_per_token * _expert(config) + 2 * d * config.latent_width
    return (
        d * heads * config.head_width
        + routed
        + 3 * d * (config.num_shared_experts * config.shared_width + config.dense_width)
    )


def _forward_flops(config: ModelConfig) -> int:
    d, query = config.width, config.num_heads * config.head_width
    routed = (
        2 * config.num_experts_per_token * _expert(config) + 4 * d * config.latent_width + 2 * d * config.num_experts
    )
    full_width = 6 * d * (config.num_shared_experts * config.shared_width + config.dense_width)
    flops = config.num_layers * (routed + full_width + 2 * query * d) + 2 * d * config.vocab_size
    for layer in range(config.num_layers):
        kv_heads = config.num_kv_heads_global if config.is_global(layer) else config.num_kv_heads_local
        span = config.span(layer)
        flops += 2 * d * (query + 2 * kv_heads * config.head_width) + 4 * span * query + 3 * span * config.num_heads
    return flops
