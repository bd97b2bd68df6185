"""The small pieces every layer is made of: matrix product, RMS norm, gated norm, short convolution, rotation, SwiGLU.

Reductions (means of squares, accumulations of products) are float32 whatever the compute dtype; results return to the
dtype of the input. Sources: Marin, #8435; RoFormer (Su et al. 2021) for the rotation.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from noonsight.model import native
from noonsight.model.config import ModelConfig
from noonsight.model.params import Gate

NO_DOCUMENT = -2  # a segment number that no token has; padding has -1


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "*b m"], w: Float[Array, "m n"], dtype: str) -> Float[Array, "*b n"]:
    """x @ w of inputs rounded to `dtype`, accumulated in float32, rounded once more to the dtype of x.

    The derivative is written out: JAX's own would multiply a float32 cotangent with a bfloat16 matrix, which no unit
    is fast at. Where the processor has bfloat16 units and our kernels for them (`native`), they do the work.
    """
    rows = product(x.reshape(-1, x.shape[-1]), w, dtype)
    return rows.reshape(*x.shape[:-1], w.shape[1]).astype(x.dtype)


def _matmul_forward(x, w, dtype):
    return matmul(x, w, dtype), (x, w)


def _matmul_backward(dtype, saved, cotangent):
    x, w = saved
    rows, columns = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
    dx = product(columns, w, dtype, b_transposed=True)
    dw = product(rows, columns, dtype, a_transposed=True)
    return dx.reshape(x.shape).astype(x.dtype), dw.astype(w.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def product(
    a: Float[Array, "i j"],
    b: Float[Array, "k l"],
    dtype: str,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> Float[Array, "m n"]:
    """a @ b in float32 from inputs rounded to `dtype`, either matrix transposed on the way. No derivative."""
    if native.serves(dtype):
        a, b = (x if x.dtype in (jnp.float32, jnp.bfloat16) else x.astype(jnp.float32) for x in (a, b))
        return native.product(a, b, a_transposed=a_transposed, b_transposed=b_transposed)
    contracted = (0 if a_transposed else 1,), (1 if b_transposed else 0,)
    return jax.lax.dot_general(
        a.astype(dtype), b.astype(dtype), (contracted, ((), ())), preferred_element_type=jnp.float32
    )


def rms_norm(x: Float[Array, "*b D"], gain: Float[Array, " D"] | None, eps: float) -> Float[Array, "*b D"]:
    """x / sqrt(mean(x^2) + eps) * gain, in float32 up to and including the gain."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed if gain is None else normed * gain).astype(x.dtype)


def gated_norm(
    x: Float[Array, "*b D"], gain: Float[Array, " D"], gate: Gate | None, config: ModelConfig
) -> Float[Array, "*b D"]:
    """RMS norm, then each channel scaled by a learned gate of the normed row: y * sigmoid(silu(y W_down) W_up)."""
    y = rms_norm(x, gain, config.norm_eps)
    if gate is None:
        return y
    dtype = config.matmul_dtype
    return y * jax.nn.sigmoid(matmul(jax.nn.silu(matmul(y, gate.down, dtype)), gate.up, dtype))


def short_convolution(
    x: Float[Array, "B S C"],
    taps: Float[Array, "I C"],
    segments: Int[Array, "B S"],
    before: tuple[Array, Array] | None = None,
) -> Float[Array, "B S C"]:
    """Depthwise causal convolution inside documents: out[t] = sum_j taps[j] * x[t - j] where t - j is in the document
    of t.

    `before` are the I - 1 columns of x and of segments before the first; None: nothing was there.
    """
    x_before, segments_before = before or (None, None)
    out = x * taps[0].astype(x.dtype)
    for lag in range(1, taps.shape[0]):
        same = _delay(segments, lag, segments_before, fill=NO_DOCUMENT) == segments
        out = out + jnp.where(same[..., None], _delay(x, lag, x_before, fill=0), 0) * taps[lag].astype(x.dtype)
    return out


def _delay(x: Array, lag: int, before: Array | None, fill: int) -> Array:
    """x[b, t - lag] at t; before the start what was `before`, or `fill`."""
    if before is not None:
        return jnp.concatenate([before[:, before.shape[1] - lag :], x], axis=1)[:, : x.shape[1]]
    padding = ((0, 0), (lag, 0), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, padding, constant_values=fill)[:, : x.shape[1]]


def rotation(positions: Int[Array, "*b"], rotated_width: int, theta: float) -> Float[Array, "*b 2 h"]:
    """Cosine and sine of the angles position * theta^(-p / pairs) of each pair p of rotated channels."""
    pairs = rotated_width // 2
    frequencies = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / max(pairs, 1))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-2)


@jax.custom_vjp
def rotate(x: Float[Array, "*b N H"], angles: Float[Array, "*b 2 h"]) -> Float[Array, "*b N H"]:
    """Rotate adjacent channels (2p, 2p + 1) of the first 2h of each head; the others pass. No slope reaches the angles.

    Interleaved, as in RoFormer: a checkpoint for split-half engines must permute the columns of wq and wk (F15). The
    derivative is the rotation back; JAX's own pads each half of each pair and adds them, 3 to 6 % of a step on a CPU.
    """
    pairs = angles.shape[-1]
    cos, sin = angles[..., None, 0, :], angles[..., None, 1, :]
    head = x[..., : 2 * pairs].astype(jnp.float32).reshape(*x.shape[:-1], pairs, 2)
    even, odd = head[..., 0], head[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], 2 * pairs).astype(x.dtype), x[..., 2 * pairs :]], axis=-1)


def _rotate_forward(x, angles):
    return rotate(x, angles), angles


def _rotate_backward(angles, cotangent):
    back = angles * jnp.array([1.0, -1.0])[:, None]
    return rotate(cotangent, back), None


rotate.defvjp(_rotate_forward, _rotate_backward)


def swiglu(
    x: Float[Array, "*b D"], gate: Float[Array, "D M"], up: Float[Array, "D M"], down: Float[Array, "M D"], dtype: str
) -> Float[Array, "*b D"]:
    """(silu(x gate) * (x up)) down."""
    return matmul(jax.nn.silu(matmul(x, gate, dtype)) * matmul(x, up, dtype), down, dtype)
