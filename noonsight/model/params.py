"""The parameter tree: names, shapes, initialisation.

One frozen dataclass per level, registered as a pytree; the fields of `Layers` are stacked over layers on a leading L,
so that a scan runs over them. A component that the config switches off is `None`. The invariant: `shapes(config)` is
the one table that initialisation, layout and tests read.

Initialisation: 0.5/sqrt(d) (`init_scale`; of the head `head_init_scale`) times a standard normal truncated to (-3, 3)
for every matrix whatever its fan-in; gains 1; head gates and router bias 0; short convolutions the identity (Marin,
#8435).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from noonsight.model.config import ModelConfig

Leaf: TypeAlias = Any  # an array; in derived trees a shape, a spec or a group
PRECISE = ("norm", "sconv", "router_bias")  # leaves with these in their name stay float32 whatever the compute dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Gate:
    """The two matrices of a gated norm: down [.., D, R], up [.., R, D]."""

    down: Leaf
    up: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Layers:
    """The stack of layers; `shapes` gives each field's dims."""

    attn_norm: Leaf
    attn_gate: Gate | Leaf = None
    wq: Leaf
    wk: Leaf
    wv: Leaf
    wo: Leaf
    q_norm: Leaf = None
    k_norm: Leaf = None
    head_gate: Leaf = None
    sconv_k: Leaf = None
    sconv_attn: Leaf = None
    sconv_moe: Leaf = None
    moe_norm: Leaf
    moe_gate: Gate | Leaf = None
    router: Leaf = None
    router_bias: Leaf = None
    latent_down: Leaf = None
    latent_norm: Leaf = None
    latent_up: Leaf = None
    expert_gate: Leaf = None
    expert_up: Leaf = None
    expert_down: Leaf = None
    shared_gate: Leaf = None
    shared_up: Leaf = None
    shared_down: Leaf = None
    mlp_gate: Leaf = None
    mlp_up: Leaf = None
    mlp_down: Leaf = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Params:
    """All trained arrays of a model. `head` is None when it is tied to the embedding."""

    embed: Leaf
    embed_norm: Leaf = None
    embed_gate: Gate | Leaf = None
    layers: Layers
    final_norm: Leaf
    final_gate: Gate | Leaf = None
    head: Leaf = None


def shapes(config: ModelConfig) -> Params:
    """The tree with a tuple of sizes in place of each array."""
    d, rank = config.width, config.gated_norm_rank
    gated = {"embed_norm": (d,), "embed_gate": _gate((), d, rank), "final_gate": _gate((), d, rank)} if rank else {}
    return Params(
        embed=(config.vocab_size, d),
        layers=Layers(**_attention_shapes(config), **_mlp_shapes(config)),
        final_norm=(d,),
        head=None if config.tie_embeddings else (d, config.vocab_size),
        **gated,
    )


def init_params(key: Array, config: ModelConfig) -> Params:
    """Fresh float32 parameters. Each leaf draws from its own key, numbered in the order of the tree."""
    flat, treedef = jax.tree.flatten_with_path(shapes(config), is_leaf=_is_shape)
    leaves = [
        _init_leaf(path[-1].name, shape, jax.random.fold_in(key, index), config)
        for index, (path, shape) in enumerate(flat)
    ]
    return jax.tree.unflatten(treedef, leaves)


def leaf_name(path: tuple[Any, ...]) -> str:
    """The dotted name of a leaf from its tree path, for example "layers.attn_gate.down"."""
    return ".".join(part.name for part in path)


def is_precise(path: tuple[Any, ...]) -> bool:
    """Whether the leaf at a tree path (gain, convolution, router bias) stays float32."""
    return any(word in path[-1].name for word in PRECISE)


def _attention_shapes(config: ModelConfig) -> dict[str, Leaf]:
    layers, d, width = config.num_layers, config.width, config.head_width
    query, stored = config.num_heads * width, config.num_kv_heads_local * width
    taps = config.sconv_kernel
    found: dict[str, Leaf] = {
        "attn_norm": (layers, d),
        "wq": (layers, d, query),
        "wk": (layers, d, stored),
        "wv": (layers, d, stored),
        "wo": (layers, query, d),
    }
    if config.gated_norm_rank:
        found["attn_gate"] = _gate((layers,), d, config.gated_norm_rank)
    if config.qk_norm == "gain":
        found |= {"q_norm": (layers, width), "k_norm": (layers, width)}
    if config.head_gate:
        found["head_gate"] = (layers, d, config.num_heads)
    if taps:
        found |= {"sconv_k": (layers, taps, stored), "sconv_attn": (layers, taps, d), "sconv_moe": (layers, taps, d)}
    return found


def _mlp_shapes(config: ModelConfig) -> dict[str, Leaf]:
    layers, d, experts = config.num_layers, config.width, config.num_experts
    found: dict[str, Leaf] = {"moe_norm": (layers, d)}
    if config.gated_norm_rank:
        found["moe_gate"] = _gate((layers,), d, config.gated_norm_rank)
    if not config.is_moe:
        inner = config.dense_width
        return found | {"mlp_gate": (layers, d, inner), "mlp_up": (layers, d, inner), "mlp_down": (layers, inner, d)}
    rows, inner = config.expert_input_width, config.expert_width
    found |= {"router": (layers, d, experts), "router_bias": (layers, experts)}
    found |= {"expert_gate": (layers, experts, rows, inner), "expert_up": (layers, experts, rows, inner)}
    found["expert_down"] = (layers, experts, inner, rows)
    if config.latent_width:
        found |= {"latent_down": (layers, d, rows), "latent_norm": (layers, rows), "latent_up": (layers, rows, d)}
    if config.num_shared_experts:
        shared, inner = config.num_shared_experts, config.shared_width
        found |= {"shared_gate": (layers, shared, d, inner), "shared_up": (layers, shared, d, inner)}
        found["shared_down"] = (layers, shared, inner, d)
    return found


def _gate(lead: tuple[int, ...], width: int, rank: int) -> Gate:
    return Gate(down=(*lead, width, rank), up=(*lead, rank, width))


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def _init_leaf(name: str, shape: tuple[int, ...], key: Array, config: ModelConfig) -> Array:
    if name in ("head_gate", "router_bias"):
        return jnp.zeros(shape, jnp.float32)
    if name.endswith("norm"):
        return jnp.ones(shape, jnp.float32)
    if name.startswith("sconv"):
        return jnp.zeros(shape, jnp.float32).at[:, 0].set(1.0)
    scale = (config.head_init_scale if name == "head" else config.init_scale) / config.width**0.5
    return scale * jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32)
