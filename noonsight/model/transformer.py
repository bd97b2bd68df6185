"""The forward pass: embedding, a scan over stacked layers, final norm, logits; and the `Program` that trains it.

Every layer runs the same code; two booleans per layer (global? rotated?) select what differs. A layer is

    x += SConv(Attention(GN(RMS(x)))) ;  x += SConv(MoE(GN(RMS(x))) + SharedExperts(...))

with x in the compute dtype (Marin, #8435). How a layer reaches other positions (its convolutions and its attention)
is handed in as a `Reach`, so that decoding with a cache (`decode.py`) runs this same block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from noonsight.model import attention
from noonsight.model.config import ModelConfig
from noonsight.model.elementary import gated_norm, matmul, product, rotation, short_convolution, swiglu
from noonsight.model.loss import token_cross_entropy, weighted_loss
from noonsight.model.moe import RouterStatistics, effective_bias, moe
from noonsight.model.params import Layers, Params, init_params, is_precise
from noonsight.model.program import Program

UNROLLED = 8
"""Layers of one turn of the scan where all of a layer is kept for its gradient: what is kept then stays where it is and
is not copied into a stack and out again, 5 to 17 % of a step on two cores. Recomputed layers keep little and gain
nothing.
"""


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


def make_program(config: ModelConfig) -> Program:
    """The model as `train` runs it. `extra` is {"pending_beta": f32[L, E]} where the load is balanced, else {}."""

    def init(key: Array) -> tuple[Params, dict[str, Array]]:
        return init_params(key, config), init_extra(config)

    def loss(params: Params, extra: dict[str, Array], batch: Batch) -> tuple[Array, dict[str, Any]]:
        ready = prepare(params, extra, config)
        h, statistics = _states(ready, batch.tokens, batch.segments, config)
        targets, weights = _targets(batch.tokens), batch.weights.reshape(-1)
        parts = weighted_loss(_rows(h), head(ready), targets, weights, config.z_loss_weight, config.matmul_dtype)
        metrics = {"cross_entropy": parts.cross_entropy, "z_loss": parts.z_loss, **_metrics(ready, statistics)}
        following = {"pending_beta": statistics.router.beta} if extra else {}
        return parts.total, {"metrics": metrics, "next": following}

    def after_step(extra: dict[str, Array], aux: dict[str, Any]) -> dict[str, Array]:
        return {**extra, **aux["next"]}

    return Program(init, loss, after_step)


def init_extra(config: ModelConfig) -> dict[str, Array]:
    """State without gradient at step 0."""
    balanced = config.balance != "none"
    return {"pending_beta": jnp.zeros((config.num_layers, config.num_experts), jnp.float32)} if balanced else {}


def prepare(params: Params, extra: dict[str, Array], config: ModelConfig) -> Params:
    """The parameters a forward pass computes with: pending bias applied, matrices cast to the compute dtype.

    Training, evaluation, decoding and export all come through here, so none of them can forget either (F17).
    The bias is data, not trained: no gradient reaches it.
    """
    if "pending_beta" in extra:
        params = replace(params, layers=replace(params.layers, router_bias=effective_bias(extra["pending_beta"])))
    dtype = jnp.dtype(config.compute_dtype)
    return jax.tree.map_with_path(lambda path, leaf: leaf if is_precise(path) else leaf.astype(dtype), params)


def hidden_states(
    params: Params, extra: dict[str, Array], tokens: Int[Array, "B S"], segments: Int[Array, "B S"], config: ModelConfig
) -> Float[Array, "B S D"]:
    """States after the final norm, in the compute dtype. Any S; `segments` is -1 on padding."""
    return _states(prepare(params, extra, config), tokens, segments, config)[0]


def logits(
    params: Params, extra: dict[str, Array], tokens: Int[Array, "B S"], segments: Int[Array, "B S"], config: ModelConfig
) -> Float[Array, "B S V"]:
    """Logits of every position, float32, pending bias applied, nothing dropped."""
    ready = prepare(params, extra, config)
    h, _ = _states(ready, tokens, segments, config)
    found = product(_rows(h), head(ready), config.matmul_dtype)
    return found.reshape(*tokens.shape, config.vocab_size)


def token_losses(params: Params, extra: dict[str, Array], batch: Batch, config: ModelConfig) -> Float[Array, "B S"]:
    """Cross-entropy in nats of predicting tokens[t + 1] at t; the last column, which has no target, is 0. Weights are
    ignored.
    """
    ready = prepare(params, extra, config)
    h, _ = _states(ready, batch.tokens, batch.segments, config)
    losses = token_cross_entropy(_rows(h), head(ready), _targets(batch.tokens), config.matmul_dtype)
    return losses.reshape(batch.tokens.shape).at[:, -1].set(0.0)


def head(params: Params) -> Float[Array, "D V"]:
    """The output projection; the embedding's transpose where the two are tied."""
    return params.embed.T if params.head is None else params.head


def embed(params: Params, tokens: Int[Array, "B S"], config: ModelConfig) -> Float[Array, "B S D"]:
    """Rows of the embedding, normed and gated where the config has gated norms."""
    x = params.embed[tokens]
    return x if params.embed_norm is None else gated_norm(x, params.embed_norm, params.embed_gate, config)


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
        mlp_out, router = moe(m, valid, layer, config)
    else:
        mlp_out, router = swiglu(m, layer.mlp_gate, layer.mlp_up, layer.mlp_down, config.matmul_dtype), None
    x = x + reach.convolve("moe", mlp_out, layer.sconv_moe)
    return x, Sites(k_input, attn_out, mlp_out, k, v), LayerStatistics(gate_mean, router)


def _states(
    params: Params, tokens: Int[Array, "B S"], segments: Int[Array, "B S"], config: ModelConfig
) -> tuple[Float[Array, "B S D"], LayerStatistics]:
    """States after the final norm, and the statistics of all layers stacked."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    angles = rotation(positions, config.rotated_width, config.rope_theta)
    local = attention.lower_bounds(segments, config.window)
    wide = attention.lower_bounds(segments, config.global_window or tokens.shape[1])

    def convolve(site: str, x: Array, taps: Array | None) -> Array:
        return x if taps is None else short_convolution(x, taps, segments)

    def one_layer(x, scanned):
        layer, kind = scanned
        lower = jnp.where(kind.is_global, wide, local)
        reach = Reach(convolve, lambda q, k, v: attention.attend(q, k, v, lower, config.matmul_dtype))
        x, _, statistics = block(x, layer, kind, reach, angles, segments >= 0, config)
        return x, statistics

    step = _rematerialised(one_layer, config.remat)
    unroll = UNROLLED if config.remat == "none" else 1
    x, statistics = jax.lax.scan(step, embed(params, tokens, config), (params.layers, kinds(config)), unroll=unroll)
    return gated_norm(x, params.final_norm, params.final_gate, config), statistics


def _rematerialised(one_layer: Callable[[Array, Any], Any], remat: str) -> Callable[[Array, Any], Any]:
    """`one_layer` that keeps for its backward pass everything ("none"), its input ("block"), or its input in pinned
    host memory ("offload"); what is not kept is computed again.

    The name stands on the layer's input: on the output it would do nothing, for a scan keeps the carry it was given
    (jax, #23869).
    """
    if remat == "none":
        return one_layer
    if remat == "block":
        return jax.checkpoint(one_layer)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["carry"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(lambda x, scanned: one_layer(checkpoint_name(x, "carry"), scanned), policy=policy)


def _rows(h: Float[Array, "B S D"]) -> Float[Array, "T D"]:
    return h.reshape(-1, h.shape[-1])


def _targets(tokens: Int[Array, "B S"]) -> Int[Array, " T"]:
    """tokens[t + 1] at t; the last position gets token 0, and weight 0 from the batch."""
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))).reshape(-1)


def _metrics(params: Params, statistics: LayerStatistics) -> dict[str, Array]:
    """Means over layers, but extremes for what is only healthy in every layer."""
    found = {"attention/gate_mean": statistics.gate_mean.mean()}
    router = statistics.router
    if router is None:
        return found
    bias = params.layers.router_bias
    return found | {
        "router/entropy": router.entropy.mean(),
        "router/load_max_over_mean": router.load_max_over_mean.max(),
        "router/load_min_over_mean": router.load_min_over_mean.min(),
        "router/bias_min": bias.min(),
        "router/bias_max": bias.max(),
        "router/drop_rate": router.drop_rate.mean(),
    }
