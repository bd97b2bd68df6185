"""The hero family in float64 NumPy, written from the equations with loops: no code shared with the model, slow on
purpose.
"""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def gated_norm(x, gain, gate, eps):
    y = rms(x, gain, eps)
    return y if gate is None else y * sigmoid(silu(y @ gate.down) @ gate.up)


def sconv(x, taps, segments):
    out = np.zeros_like(x)
    for b, t in np.ndindex(x.shape[:2]):
        for lag in range(len(taps)):
            if t - lag >= 0 and segments[b, t - lag] == segments[b, t]:
                out[b, t] += taps[lag] * x[b, t - lag]
    return out


def rope(vector, position, config):
    out, rotated = vector.copy(), int(config.head_width * config.rope_fraction)
    for p in range(rotated // 2):
        angle = position * config.rope_theta ** (-p / (rotated // 2))
        even, odd = vector[2 * p], vector[2 * p + 1]
        out[2 * p] = even * np.cos(angle) - odd * np.sin(angle)
        out[2 * p + 1] = odd * np.cos(angle) + even * np.sin(angle)
    return out


def heads(x, number, config):
    return x.reshape(*x.shape[:2], number, config.head_width)


def attention(a, w, is_global, segments, config):
    """One layer's attention, before its output convolution. `w` has this layer's arrays."""
    width, n, stored = config.head_width, config.num_heads, config.num_kv_heads_local
    q, k, v = (
        heads(a @ w.wq, n, config),
        heads(sconv(a @ w.wk, w.sconv_k, segments), stored, config),
        heads(a @ w.wv, stored, config),
    )
    if is_global:
        kept, repeats = config.num_kv_heads_global, stored // config.num_kv_heads_global
        k, v = (np.repeat(x[:, :, :kept], repeats, axis=2) for x in (k, v))
    q, k = (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) for x in (q, k))
    out = np.zeros_like(q)
    for b, t, head in np.ndindex(*q.shape[:3]):
        kv = head // (n // stored)
        window = config.sequence_length if is_global else config.window
        keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t] and t - s < window]
        turn = (lambda x, position: x) if is_global else (lambda x, position: rope(x, position, config))
        query = config.qk_mult * turn(q[b, t, head], t)
        scores = np.array([query @ turn(k[b, s, kv], s) for s in keys]) / np.sqrt(width)
        p = np.exp(scores - scores.max())
        y = (p / p.sum()) @ v[b, keys, kv]
        own = v[b, t, kv]
        out[b, t, head] = y - own * (y @ own) / (own @ own + 1e-6)
    out *= 2 * sigmoid(a @ w.head_gate)[..., None]
    return out.reshape(*a.shape[:2], -1) @ w.wo


def moe(m, w, bias, valid, config):
    """Routed and shared experts for rows [T, D], the routed ones for valid rows only; also the margins score -
    threshold.
    """
    chosen_number = config.num_experts_per_token
    scores = m @ w.router
    biased = scores + bias
    out, margins = np.zeros_like(m), np.zeros_like(scores)
    for t in range(len(m)):
        order = np.argsort(-biased[t])
        chosen = order[:chosen_number]
        margins[t] = scores[t] - biased[t, order[chosen_number]]
        weights = sigmoid(scores[t, chosen])
        weights = config.router_combine_sum * weights / (weights.sum() + 1e-9)
        u = rms(m[t] @ w.latent_down, w.latent_norm, config.norm_eps)
        routed = sum(
            weight * ((silu(u @ w.expert_gate[e]) * (u @ w.expert_up[e])) @ w.expert_down[e])
            for weight, e in zip(weights, chosen)
        )
        out[t] = valid[t] * (routed @ w.latent_up)
        for j in range(config.num_shared_experts):
            out[t] += (silu(m[t] @ w.shared_gate[j]) * (m[t] @ w.shared_up[j])) @ w.shared_down[j]
    return out, margins


def block(x, w, bias, is_global, segments, config):
    a = gated_norm(x, w.attn_norm, w.attn_gate, config.norm_eps)
    x = x + sconv(attention(a, w, is_global, segments, config), w.sconv_attn, segments)
    m = gated_norm(x, w.moe_norm, w.moe_gate, config.norm_eps)
    y, margins = moe(m.reshape(-1, m.shape[-1]), w, bias, segments.reshape(-1) >= 0, config)
    return x + sconv(y.reshape(m.shape), w.sconv_moe, segments), margins


def forward(params, layers, pending, tokens, segments, config):
    """Logits. `layers` is the list of each layer's arrays; the first is local, the last global when there are two."""
    x = gated_norm(params.embed[tokens], params.embed_norm, params.embed_gate, config.norm_eps)
    margins = []
    for i, w in enumerate(layers):
        bias = -pending[i] - (-pending[i]).mean()
        x, found = block(x, w, bias, i == len(layers) - 1 or (i + 1) % config.global_every == 0, segments, config)
        margins.append(found)
    return gated_norm(x, params.final_norm, params.final_gate, config.norm_eps) @ params.head, margins


def loss(logits, tokens, weights, z_weight):
    top = logits.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    targets = np.roll(tokens, -1, axis=1)
    ce = lse - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (weights * (ce + z_weight * lse**2)).sum() / weights.sum()
