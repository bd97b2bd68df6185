"""The small pieces every layer is made of: matrix product, RMS norm, gated norm, short convolution, rotation, SwiGLU.

Reductions (means of squares, accumulations of products) are float32 whatever the compute dtype; results return to the
dtype of the input. Sources: Marin, #8435; RoFormer (Su et al. 2021) for the rotation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from noonsight.model.params import Gate

NO_DOCUMENT = -2  # a segment number that no token has; padding has -1


@jax.custom_vjp
def matmul(x: Float[Array, "*b m"], w: Float[Array, "m n"]) -> Float[Array, "*b n"]:
    """x @ w with float32 accumulation, rounded once to the dtype of x.

    The derivative is written out: JAX's own would multiply a float32 cotangent with a bfloat16 matrix, which no unit
    is fast at.
    """
    return _product(x, w).astype(x.dtype)


def _matmul_forward(x, w):
    return matmul(x, w), (x, w)


def _matmul_backward(saved, cotangent):
    x, w = saved
    rows, columns = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
    dx = jax.lax.dot_general(
        cotangent, w, (((cotangent.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    dw = jax.lax.dot_general(rows, columns, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def _product(x: Array, w: Array) -> Array:
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def rms_norm(x: Float[Array, "*b D"], gain: Float[Array, " D"] | None, eps: float) -> Float[Array, "*b D"]:
    """x / sqrt(mean(x^2) + eps) * gain, in float32 up to and including the gain."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed if gain is None else normed * gain).astype(x.dtype)


def gated_norm(
    x: Float[Array, "*b D"], gain: Float[Array, " D"], gate: Gate | None, eps: float
) -> Float[Array, "*b D"]:
    """RMS norm, then each channel scaled by a learned gate of the normed row: y * sigmoid(silu(y W_down) W_up)."""
    y = rms_norm(x, gain, eps)
    if gate is None:
        return y
    return y * jax.nn.sigmoid(matmul(jax.nn.silu(matmul(y, gate.down)), gate.up))


def short_convolution(
    x: Float[Array, "B S C"], taps: Float[Array, "I C"], segments: Int[Array, "B S"]
) -> Float[Array, "B S C"]:
    """Depthwise causal convolution inside documents: out[t] = sum_j taps[j] * x[t - j] where t - j is in the document
    of t.
    """
    out = x * taps[0].astype(x.dtype)
    for lag in range(1, taps.shape[0]):
        same = _delay(segments, lag, fill=NO_DOCUMENT) == segments
        out = out + jnp.where(same[..., None], _delay(x, lag, fill=0), 0) * taps[lag].astype(x.dtype)
    return out


def _delay(x: Array, lag: int, fill: int) -> Array:
    """x[b, t - lag] at t, `fill` before the start."""
    padding = ((0, 0), (lag, 0), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, padding, constant_values=fill)[:, : x.shape[1]]


def rotation(positions: Int[Array, "*b"], rotated_width: int, theta: float) -> Float[Array, "*b 2 h"]:
    """Cosine and sine of the angles position * theta^(-p / pairs) of each pair p of rotated channels."""
    pairs = rotated_width // 2
    frequencies = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / max(pairs, 1))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-2)


def rotate(x: Float[Array, "*b N H"], angles: Float[Array, "*b 2 h"]) -> Float[Array, "*b N H"]:
    """Rotate adjacent channels (2p, 2p + 1) of the first 2h of each head; the others pass.

    Interleaved, as in RoFormer: a checkpoint for split-half engines must permute the columns of wq and wk (F15).
    """
    pairs = angles.shape[-1]
    cos, sin = angles[..., None, 0, :], angles[..., None, 1, :]
    head = x[..., : 2 * pairs].astype(jnp.float32).reshape(*x.shape[:-1], pairs, 2)
    even, odd = head[..., 0], head[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], 2 * pairs).astype(x.dtype), x[..., 2 * pairs :]], axis=-1)


def swiglu(
    x: Float[Array, "*b D"], gate: Float[Array, "D M"], up: Float[Array, "D M"], down: Float[Array, "M D"]
) -> Float[Array, "*b D"]:
    """(silu(x gate) * (x up)) down."""
    return matmul(jax.nn.silu(matmul(x, gate)) * matmul(x, up), down)
