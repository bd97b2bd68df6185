"""The arbiter: the whole model in NumPy float64, without cache, scan, sharding or dropped tokens.

When two engines disagree, this file decides; it is therefore written from the equations and shares no code with the JAX
model or the torch file. It is slow and meant to be read beside the paper form of each component, which the docstrings
state. Source: Marin, issue #8435, and the papers named per function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tree = dict[str, Any]


class Trace(NamedTuple):
    """Everything a comparison needs. `routed` and `margins` are empty (L = 0) for a dense model."""

    logits: Array  # [B, S, V]
    hidden: Array  # [L+1, B, S, D]: residual stream before each layer, and after the last
    routed: NDArray[np.int64]  # [L, B, S, k], best first by biased score
    margins: Array  # [L, B, S]: biased score of the k-th expert minus that of the (k+1)-th


def forward(params: Any, extra: Any, config: Any, tokens: NDArray, segments: NDArray | None = None) -> Array:
    """Logits [B, S, V] of `tokens` [B, S]. `segments` [B, S] separates packed documents; none: one document per row.

    `params` and `extra` are the trees of the model room, as nested mappings or dataclasses, of anything NumPy reads.
    """
    return trace(params, extra, config, tokens, segments).logits


def trace(params: Any, extra: Any, config: Any, tokens: NDArray, segments: NDArray | None = None) -> Trace:
    """The same forward pass with the residual stream and the router's choices of every layer."""
    p = as_tree(params)
    segments = np.zeros(tokens.shape, np.int64) if segments is None else np.asarray(segments)
    pending = (as_tree(extra) or {}).get("pending_beta")
    bias = p["layers"]["router_bias"] if pending is None else effective_bias(pending)
    x = p["embed"][np.asarray(tokens)]
    if p["embed_norm"] is not None:
        x = _gated(_rms(x, config.norm_eps) * p["embed_norm"], p["embed_gate"])
    hidden, routed, margins = [x], [], []
    for i in range(config.num_layers):
        layer = _slice(p["layers"], i)
        a = _gated(_rms(x, config.norm_eps) * layer["attn_norm"], layer["attn_gate"])
        x = x + _sconv(_attention(a, layer, config, config.is_global(i), segments), layer["sconv_attn"], segments)
        m = _gated(_rms(x, config.norm_eps) * layer["moe_norm"], layer["moe_gate"])
        if config.is_moe:
            out, chosen, margin = _experts(m, layer, config, bias[i])
            routed.append(chosen)
            margins.append(margin)
        else:
            out = _swiglu(m, layer["mlp_gate"], layer["mlp_up"], layer["mlp_down"])
        x = x + _sconv(out, layer["sconv_moe"], segments)
        hidden.append(x)
    final = _gated(_rms(x, config.norm_eps) * p["final_norm"], p["final_gate"])
    head = p["embed"].T if p.get("head") is None else p["head"]
    empty = np.zeros((0, *tokens.shape))
    return Trace(
        logits=final @ head,
        hidden=np.stack(hidden),
        routed=np.stack(routed) if routed else empty[..., None].astype(np.int64),
        margins=np.stack(margins) if margins else empty,
    )


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis, in float64."""
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def effective_bias(pending_beta: NDArray) -> Array:
    """The bias that chooses experts [L, E]: b = -beta, centred over the experts of a layer (quantile balancing)."""
    bias = -np.asarray(pending_beta, np.float64)
    return bias - bias.mean(-1, keepdims=True)


def as_tree(node: Any, dtype: Any = np.float64) -> Any:
    """Nested mappings or dataclasses of arrays -> nested dicts of NumPy arrays of `dtype` (None: as they are)."""
    if node is None:
        return None
    if isinstance(node, Mapping):
        return {name: as_tree(child, dtype) for name, child in node.items()}
    if dataclasses.is_dataclass(node):
        return {field.name: as_tree(getattr(node, field.name), dtype) for field in dataclasses.fields(node)}
    return np.asarray(node) if dtype is None else np.asarray(node).astype(dtype)


def _slice(layers: Tree, i: int) -> Tree:
    return {
        name: _slice(leaf, i) if isinstance(leaf, dict) else (None if leaf is None else leaf[i])
        for name, leaf in layers.items()
    }


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _rms(x: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich 2019)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _gated(y: Array, gate: Tree | None) -> Array:
    """GN(y) = y * sigmoid(silu(y W_down) W_up)."""
    return y if gate is None else y * _sigmoid(_silu(y @ gate["down"]) @ gate["up"])


def _swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """(silu(x W_gate) * x W_up) W_down (Shazeer 2020)."""
    return (_silu(x @ gate) * (x @ up)) @ down


def _sconv(x: Array, weight: Array | None, segments: NDArray) -> Array:
    """out[t, c] = sum_j w[j, c] x[t-j, c], over lags j that stay in the row and in the token's segment."""
    if weight is None:
        return x
    out = weight[0] * x
    for lag in range(1, min(len(weight), x.shape[1])):
        same = segments[:, lag:] == segments[:, :-lag]
        out[:, lag:] += weight[lag] * x[:, :-lag] * same[..., None]
    return out


def _attention(a: Array, layer: Tree, config: Any, is_global: bool, segments: NDArray) -> Array:
    """softmax(q k / sqrt(H)) v on visible keys, then v's direction removed (XSA), head gates, output projection."""
    batch, length, _ = a.shape
    heads, width = config.num_heads, config.head_width
    kept = config.num_kv_heads_global if is_global else config.num_kv_heads_local
    q = (a @ layer["wq"]).reshape(batch, length, heads, width)
    k = _sconv(a @ layer["wk"], layer["sconv_k"], segments).reshape(batch, length, -1, width)
    v = (a @ layer["wv"]).reshape(batch, length, -1, width)
    k, v = (np.repeat(x[:, :, :kept], heads // kept, axis=2) for x in (k, v))  # query head n uses kv head n // (N/kept)
    if config.qk_norm != "off":
        q, k = _rms(q, 1e-6), _rms(k, 1e-6)
    if config.qk_norm == "gain":
        q, k = q * layer["q_norm"], k * layer["k_norm"]
    if not is_global or config.rope_on_global:
        q, k = _rotate(q, config), _rotate(k, config)
    scores = np.einsum("btnh,bsnh->bnts", config.qk_mult * q, k) / np.sqrt(width)
    lag = np.arange(length)[:, None] - np.arange(length)[None]
    window = config.global_window if is_global else config.window
    visible = (lag >= 0) & (lag < (length if window is None else window))
    visible = visible[None, None] & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    if config.exclusive_attention:
        y = y - v * (y * v).sum(-1, keepdims=True) / ((v * v).sum(-1, keepdims=True) + 1e-6)
    if config.head_gate:
        y = y * 2 * _sigmoid(a @ layer["head_gate"])[..., None]
    return y.reshape(batch, length, heads * width) @ layer["wo"]


def _rotate(x: Array, config: Any) -> Array:
    """Turn adjacent pairs (2p, 2p+1) of the first dims by position * theta^(-p / pairs); the rest passes (RoPE)."""
    pairs = round(config.head_width * config.rope_fraction) // 2
    angle = np.arange(x.shape[1])[:, None] * config.rope_theta ** (-np.arange(pairs) / max(pairs, 1))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    even, odd = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    out = x.copy()
    out[..., 0 : 2 * pairs : 2] = even * cos - odd * sin
    out[..., 1 : 2 * pairs : 2] = odd * cos + even * sin
    return out


def _experts(m: Array, layer: Tree, config: Any, bias: Array) -> tuple[Array, NDArray, Array]:
    """Top-k by biased score, weights from unbiased sigmoids summing to the combine sum, experts in latent space, and
    the shared experts on the full width, unweighted. Returns output [B,S,D], ids [B,S,k], margins [B,S]."""
    k = config.num_experts_per_token
    scores = m @ layer["router"]
    order = np.argsort(-(scores + bias), axis=-1, kind="stable")[..., : k + 1]
    biased = np.take_along_axis(scores + bias, order, axis=-1)
    chosen = order[..., :k]
    weights = _sigmoid(np.take_along_axis(scores, chosen, axis=-1))
    weights = weights * config.router_combine_sum / (weights.sum(-1, keepdims=True) + 1e-9)
    latent = layer["latent_down"] is not None
    u = _rms(m @ layer["latent_down"], config.norm_eps) * layer["latent_norm"] if latent else m
    mixed = np.zeros_like(u)
    for expert in range(config.num_experts):
        weight = (weights * (chosen == expert)).sum(-1)
        rows = weight != 0
        y = _swiglu(u[rows], *(layer[name][expert] for name in ("expert_gate", "expert_up", "expert_down")))
        mixed[rows] += weight[rows][:, None] * y
    out = mixed @ layer["latent_up"] if latent else mixed
    for shared in range(config.num_shared_experts):
        out = out + _swiglu(m, *(layer[name][shared] for name in ("shared_gate", "shared_up", "shared_down")))
    return out, chosen, biased[..., k - 1] - biased[..., k]
