"""The forward pass: embedding, a scan over stacked layers, final norm, logits; and the `Program` that trains it.

Every layer runs the same code; two booleans per layer (global? rotated?) select what differs. A layer is

    x += SConv(Attention(GN(RMS(x)))) ;  x += SConv(MoE(GN(RMS(x))) + SharedExperts(...))

with x in the compute dtype (Marin, #8435). How a layer reaches other positions (its convolutions and its attention)
is handed in as a `Reach`, so that decoding with a cache (`decode.py`) runs this same block. Parameters are seen through
`Ready` alone, a layer at a time. Over a mesh this is the code of one device (`layout.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from noonsight.model import attention
from noonsight.model.config import ModelConfig
from noonsight.model.elementary import (
    NO_DOCUMENT,
    gated_norm,
    matmul,
    product,
    rotation,
    short_convolution,
    swiglu,
)
from noonsight.model.layout import ALONE, BATCH, Layout
from noonsight.model.loss import token_cross_entropy, weighted_loss
from noonsight.model.moe import RouterStatistics, moe
from noonsight.model.params import Layers, Params, init_params
from noonsight.model.program import Program
from noonsight.model.ready import Ready, prepare

DROPLESS = ("sorted", "einsum")  # exchanges without a capacity


@runtime_checkable
class Batch(Protocol):
    """What the model reads of a batch; `tokens.batches.Batch` is one."""

    @property
    def tokens(self) -> Int[Array, "B S"]: ...
    @property
    def segments(self) -> Int[Array, "B S"]: ...
    @property
    def weights(self) -> Float[Array, "B S"]: ...


class Kind(NamedTuple):
    """What tells layers apart, one entry per layer."""

    is_global: Bool[Array, "*L"]
    rotated: Bool[Array, "*L"]


class Reach(NamedTuple):
    """How one layer reaches other positions: convolve(site, x, taps) and attend(q, k, v)."""

    convolve: Callable[[str, Array, Array], Array]
    attend: Callable[[Array, Array, Array], Array]


class Sites(NamedTuple):
    """What a cache must remember of one layer: inputs of the three convolutions, keys and values."""

    k: Float[Array, "B S C"]
    attn: Float[Array, "B S D"]
    moe: Float[Array, "B S D"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]


class LayerStatistics(NamedTuple):
    """What is measured in one layer. `router` is None in a dense model."""

    gate_mean: Float[Array, ""]
    router: RouterStatistics | None


def make_program(config: ModelConfig, layout: Layout = ALONE) -> Program:
    """The model as `train` runs it, over the mesh of `layout`. `extra` is {"pending_beta": f32[L, E]} where the load is
    balanced, else {}.

    Raises ValueError when the mesh cannot hold the model, and `loss` when it cannot hold the batch.
    """

    def init(key: Array) -> tuple[Params, dict[str, Array]]:
        return init_params(key, config), init_extra(config)

    def loss(params: Params, extra: dict[str, Array], batch: Batch) -> tuple[Array, dict[str, Any]]:
        ready = prepare(params, extra, config, layout)
        h, statistics = _states(ready, batch.tokens, batch.segments)
        targets, weights = _targets(batch.tokens, layout), batch.weights.reshape(-1)
        rounding = config.z_loss_weight, config.matmul_dtype
        parts = layout.total(weighted_loss(_rows(h), head(ready), targets, weights, *rounding, layout))
        metrics = {"cross_entropy": parts.cross_entropy, "z_loss": parts.z_loss, **_metrics(ready, statistics)}
        following = {"pending_beta": statistics.router.beta} if extra else {}
        return parts.total, {"metrics": metrics, "next": following}

    def after_step(extra: dict[str, Array], aux: dict[str, Any]) -> dict[str, Array]:
        return {**extra, **aux["next"]}

    return Program(init, layout.spread(loss, config), after_step)


def init_extra(config: ModelConfig) -> dict[str, Array]:
    """State without gradient at step 0."""
    balanced = config.balance != "none"
    return {"pending_beta": jnp.zeros((config.num_layers, config.num_experts), jnp.float32)} if balanced else {}


def hidden_states(
    params: Params, extra: dict[str, Array], tokens: Int[Array, "B S"], segments: Int[Array, "B S"], config: ModelConfig
) -> Float[Array, "B S D"]:
    """States after the final norm, in the compute dtype. Any S; `segments` is -1 on padding."""
    return _states(prepare(params, extra, dropless(config)), tokens, segments)[0]


def logits(
    params: Params, extra: dict[str, Array], tokens: Int[Array, "B S"], segments: Int[Array, "B S"], config: ModelConfig
) -> Float[Array, "B S V"]:
    """Logits of every position, float32, pending bias applied, nothing dropped."""
    ready = prepare(params, extra, dropless(config))
    h, _ = _states(ready, tokens, segments)
    found = product(_rows(h), head(ready), config.matmul_dtype)
    return found.reshape(*tokens.shape, config.vocab_size)


def token_losses(
    params: Params, extra: dict[str, Array], batch: Batch, config: ModelConfig, layout: Layout = ALONE
) -> Float[Array, "B S"]:
    """Cross-entropy in nats of predicting tokens[t + 1] at t; the last column, which has no target, is 0. Weights are
    ignored, nothing is dropped. Raises ValueError when the mesh of `layout` cannot hold model or batch.
    """
    config, length = dropless(config), batch.tokens.shape[1]

    def losses(params: Params, extra: dict[str, Array], batch: Batch) -> Float[Array, "B S"]:
        ready = prepare(params, extra, config, layout)
        h, _ = _states(ready, batch.tokens, batch.segments)
        found = token_cross_entropy(_rows(h), head(ready), _targets(batch.tokens, layout), config.matmul_dtype)
        has_target = layout.positions(batch.tokens.shape[1]) < length - 1
        return jnp.where(has_target, found.reshape(batch.tokens.shape), 0.0)

    return layout.spread(losses, config, BATCH)(params, extra, batch)


def dropless(config: ModelConfig) -> ModelConfig:
    """`config` with an exchange that has room for everything: what one token gets must not depend on the others, and an
    evaluation must not share the limited exchange's executable (F8: Marin, #8861).
    """
    return config if config.exchange in DROPLESS else replace(config, exchange="sorted", capacity_factor=None)


def head(ready: Ready) -> Float[Array, "D V"]:
    """The output projection; the embedding's transpose where the two are tied."""
    return ready.part("embed").T if ready.config.tie_embeddings else ready.part("head")


def embed(ready: Ready, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Rows of the embedding, normed and gated where the config has gated norms."""
    x, gain = ready.part("embed")[tokens], ready.part("embed_norm")
    return x if gain is None else gated_norm(x, gain, ready.part("embed_gate"), ready.config)


def final(ready: Ready, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """The final norm."""
    return gated_norm(x, ready.part("final_norm"), ready.part("final_gate"), ready.config)


def kinds(config: ModelConfig) -> Kind:
    """The two booleans of each layer, stacked."""
    is_global = np.array([config.is_global(layer) for layer in range(config.num_layers)])
    return Kind(jnp.asarray(is_global), jnp.asarray(~is_global | config.rope_on_global))


def block(
    x: Float[Array, "B S D"],
    layer: Layers,
    kind: Kind,
    reach: Reach,
    angles: Float[Array, "B S 2 h"],
    valid: Bool[Array, "B S"],
    config: ModelConfig,
    layout: Layout = ALONE,
) -> tuple[Float[Array, "B S D"], Sites, LayerStatistics]:
    """One layer."""
    a = gated_norm(x, layer.attn_norm, layer.attn_gate, config)
    k_input, v_input = matmul(a, layer.wk, config.matmul_dtype), matmul(a, layer.wv, config.matmul_dtype)
    k = reach.convolve("k", k_input, layer.sconv_k)
    k, v = attention.key_value(k, v_input, layer, angles, kind.rotated, kind.is_global, config)
    y = reach.attend(attention.query(a, layer, angles, kind.rotated, config), k, v)
    attn_out, gate_mean = attention.finish(y, v, a, layer, config)
    x = x + reach.convolve("attn", attn_out, layer.sconv_attn)
    m = gated_norm(x, layer.moe_norm, layer.moe_gate, config)
    if config.is_moe:
        mlp_out, router = moe(m, valid, layer, config, layout)
    else:
        mlp_out, router = swiglu(m, layer.mlp_gate, layer.mlp_up, layer.mlp_down, config.matmul_dtype), None
    x = x + reach.convolve("moe", mlp_out, layer.sconv_moe)
    return x, Sites(k_input, attn_out, mlp_out, k, v), LayerStatistics(gate_mean, router)


def _states(
    ready: Ready, tokens: Int[Array, "B S"], segments: Int[Array, "B S"]
) -> tuple[Float[Array, "B S D"], LayerStatistics]:
    """States after the final norm, and the statistics of all layers stacked."""
    config, layout, length = ready.config, ready.layout, tokens.shape[1]
    positions = jnp.broadcast_to(layout.positions(length), tokens.shape)
    angles = rotation(positions, config.rotated_width, config.rope_theta)
    rows = layout.sequence(segments)
    local = layout.own(attention.lower_bounds(rows, config.window))
    wide = layout.own(attention.lower_bounds(rows, config.global_window or rows.shape[1]))
    segments_before = layout.before(segments, config.sconv_kernel - 1, fill=NO_DOCUMENT)

    def convolve(site: str, x: Array, taps: Array | None) -> Array:
        if taps is None:
            return x
        x_before = layout.before(x, taps.shape[0] - 1)
        return short_convolution(x, taps, segments, None if x_before is None else (x_before, segments_before))

    def one_layer(x: Array, layer: Layers, kind: Kind) -> tuple[Array, LayerStatistics]:
        lower = jnp.where(kind.is_global, wide, local)

        def attend(q: Array, k: Array, v: Array) -> Array:
            k, v = layout.sequence(k), layout.sequence(v)
            return attention.attend(q, k, v, lower, config.matmul_dtype, layout.start(length))

        x, _, statistics = block(x, layer, kind, Reach(convolve, attend), angles, segments >= 0, config, layout)
        return x, statistics

    x, statistics = ready.scan(one_layer, embed(ready, tokens), kinds(config), remat=config.remat)
    return final(ready, x), statistics


def _rows(h: Float[Array, "B S D"]) -> Float[Array, "T D"]:
    return h.reshape(-1, h.shape[-1])


def _targets(tokens: Int[Array, "B S"], layout: Layout) -> Int[Array, " T"]:
    """tokens[t + 1] at t; the last position gets token 0, and weight 0 from the batch."""
    return jnp.concatenate([tokens[:, 1:], layout.after(tokens, 1)], axis=1).reshape(-1)


def _metrics(ready: Ready, statistics: LayerStatistics) -> dict[str, Array]:
    """Means over layers, but extremes for what is only healthy in every layer."""
    gates = ready.layout.mean(statistics.gate_mean)
    found = {"attention/gate_mean": gates.mean(), "attention/gate_min": gates.min()}
    router = statistics.router
    if router is None:
        return found
    bias, drop_rate = ready.stored.layers.router_bias, router.sender_drop_rate + router.receiver_drop_rate
    found |= {
        "router/entropy": router.entropy.mean(),
        "router/load_max_over_mean": router.load_max_over_mean.max(),
        "router/load_min_over_mean": router.load_min_over_mean.min(),
        "router/bias_min": bias.min(),
        "router/bias_max": bias.max(),
        "router/drop_rate": drop_rate.mean(),
    }
    if ready.config.capacity_factor is None:
        return found
    return found | {
        "router/drop_rate/sender": router.sender_drop_rate.mean(),
        "router/drop_rate/receiver": router.receiver_drop_rate.mean(),
    }
