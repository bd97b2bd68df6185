"""The hero family in float64 NumPy, written from the equations: no code shared with the model, slow on purpose.

Arrays may be plain, complex, or traced by `tape`, so outputs and gradients come from these same equations. What a
config switches off is None in the weights. `w` holds one layer's arrays, `segments` is [B, S] and -1 on padding.
"""

from __future__ import annotations

import numpy as np

from tests.model.tape import concatenate, einsum, exp, log, value


def sigmoid(x):
    return 1 / (1 + exp(-x))


def silu(x):
    return x * sigmoid(x)


def swiglu(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def rms(x, gain, eps):
    y = x * ((x**2).sum(-1, keepdims=True) / x.shape[-1] + eps) ** -0.5
    return y if gain is None else y * gain


def gated_norm(x, gain, gate, eps):
    y = rms(x, gain, eps)
    return y if gate is None else y * sigmoid(silu(y @ gate.down) @ gate.up)


def sconv(x, taps, segments):
    if taps is None:
        return x
    out, at = 0.0, np.arange(x.shape[1])
    for lag in range(taps.shape[0]):
        past = np.maximum(at - lag, 0)
        same = (at >= lag) & (segments[:, past] == segments)
        out = out + taps[lag] * x[:, past] * same[..., None]
    return out


def rope(x, config):
    """x[B, S, n, H]: adjacent channels turn together."""
    rotated, (batch, length, number, _) = round(config.head_width * config.rope_fraction), x.shape
    if rotated == 0:
        return x
    angles = np.outer(np.arange(length), config.rope_theta ** (-np.arange(rotated // 2) / (rotated // 2)))
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
    even, odd = x[..., 0:rotated:2], x[..., 1:rotated:2]
    turned = concatenate([(even * cos - odd * sin)[..., None], (odd * cos + even * sin)[..., None]], 4)
    return concatenate([turned.reshape(batch, length, number, rotated), x[..., rotated:]], 3)


def visible(segments, window):
    """Whether query t (axis 1) sees key s (axis 2)."""
    at = np.arange(segments.shape[1])
    near = (at[None] <= at[:, None]) & (at[:, None] - at[None] < window)
    return near & (segments[:, :, None] == segments[:, None, :])


def attention(a, w, is_global, segments, config):
    """One layer's attention, before its output convolution."""
    batch, length = a.shape[:2]
    width, n, stored = config.head_width, config.num_heads, config.num_kv_heads_local
    q = (a @ w.wq).reshape(batch, length, n, width)
    k = sconv(a @ w.wk, w.sconv_k, segments).reshape(batch, length, stored, width)
    v = (a @ w.wv).reshape(batch, length, stored, width)
    if is_global:  # the first heads, each repeated in a row
        kept = np.repeat(np.arange(config.num_kv_heads_global), stored // config.num_kv_heads_global)
        k, v = k[:, :, kept], v[:, :, kept]
    if config.qk_norm != "off":
        eps = 1e-6 if config.qk_norm == "free" else config.norm_eps  # gains: as Qwen3
        q, k = rms(q, w.q_norm, eps), rms(k, w.k_norm, eps)
    if not is_global or config.rope_on_global:
        q, k = rope(q, config), rope(k, config)
    own = np.arange(n) // (n // stored)  # kv head of each query head
    k, v = k[:, :, own], v[:, :, own]
    scores = einsum("btnh,bsnh->bnts", q * config.qk_mult, k) / width**0.5
    window = (config.global_window or length) if is_global else config.window
    seen = visible(segments, window)[:, None]
    p = exp(scores - np.where(seen, value(scores).real, -np.inf).max(-1, keepdims=True)) * seen
    y = einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)
    if config.exclusive_attention:
        y = y - v * ((y * v).sum(-1, keepdims=True) / ((v**2).sum(-1, keepdims=True) + 1e-6))
    if w.head_gate is not None:
        y = y * (2 * sigmoid(a @ w.head_gate))[..., None]
    return y.reshape(batch, length, n * width) @ w.wo


def moe(m, w, bias, valid, config):
    """Routed and shared experts for rows [T, D], the routed ones for valid rows only; also the margins
    score - threshold, and how much clearer the last chosen score is than the first left out.
    """
    scores = m @ w.router
    biased, rows = value(scores).real + bias, np.arange(m.shape[0])[:, None]
    order = np.argsort(-biased, axis=-1)
    chosen, threshold = order[:, : config.num_experts_per_token], order[:, config.num_experts_per_token, None]
    weights = sigmoid(scores[rows, chosen])
    weights = config.router_combine_sum * weights / (weights.sum(-1, keepdims=True) + 1e-9)
    u = m if w.latent_down is None else rms(m @ w.latent_down, w.latent_norm, config.norm_eps)
    routed = 0.0
    for e in range(config.num_experts):
        share = (weights * (chosen == e)).sum(-1, keepdims=True) * valid[:, None]
        routed = routed + share * swiglu(u, w.expert_gate[e], w.expert_up[e], w.expert_down[e])
    out = routed if w.latent_up is None else routed @ w.latent_up
    for j in range(config.num_shared_experts):
        out = out + swiglu(m, w.shared_gate[j], w.shared_up[j], w.shared_down[j])
    clearance = (biased[rows, chosen].min(-1, keepdims=True) - biased[rows, threshold])[:, 0]
    return out, value(scores) - biased[rows, threshold], clearance


def block(x, w, bias, is_global, segments, config):
    """One layer; margins and clearances are those of its router, None in a dense model."""
    a = gated_norm(x, w.attn_norm, w.attn_gate, config.norm_eps)
    x = x + sconv(attention(a, w, is_global, segments, config), w.sconv_attn, segments)
    m = gated_norm(x, w.moe_norm, w.moe_gate, config.norm_eps)
    if config.num_experts:
        rows = m.reshape(-1, m.shape[-1])
        y, margins, clearance = moe(rows, w, bias, segments.reshape(-1) >= 0, config)
        y = y.reshape(*m.shape)
    else:
        y, margins, clearance = swiglu(m, w.mlp_gate, w.mlp_up, w.mlp_down), None, None
    return x + sconv(y, w.sconv_moe, segments), margins, clearance


def forward(params, pending, tokens, segments, config):
    """Logits [B, S, V], and the margins of each layer's router."""
    x = params.embed[tokens]
    if params.embed_norm is not None:
        x = gated_norm(x, params.embed_norm, params.embed_gate, config.norm_eps)
    margins = []
    for i in range(config.num_layers):
        every = config.global_every
        is_global = every is not None and ((i + 1) % every == 0 or i == config.num_layers - 1)
        bias = None if pending is None else -pending[i] - (-pending[i]).mean()
        x, found, _ = block(x, layer_of(params.layers, i), bias, is_global, segments, config)
        margins.append(found)
    h = gated_norm(x, params.final_norm, params.final_gate, config.norm_eps)
    return (einsum("btd,vd->btv", h, params.embed) if params.head is None else h @ params.head), margins


def layer_of(layers, i):
    """The arrays of layer i."""
    picked = {
        name: leaf if leaf is None else layer_of(leaf, i) if hasattr(leaf, "down") else leaf[i]
        for name, leaf in vars(layers).items()
    }
    return type(layers)(**picked)


def loss(logits, tokens, weights, z_weight):
    """sum_t w_t (ce_t + z lse_t^2) / sum_t w_t."""
    top = value(logits).real.max(-1, keepdims=True)
    lse = log(exp(logits - top).sum(-1)) + top[..., 0]
    batch, length = tokens.shape
    at = logits[np.arange(batch)[:, None], np.arange(length), np.roll(tokens, -1, axis=1)]
    return ((lse - at + z_weight * lse**2) * weights).sum() / weights.sum()
