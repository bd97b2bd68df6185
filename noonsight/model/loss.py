"""Cross-entropy with z-loss over chunks of tokens: the logits of a chunk exist once, and never those of the whole
batch.

    loss = sum_t w_t (ce_t + z lse_t^2) / sum_t w_t

Under differentiation the gradient of a chunk is formed from the very logits its loss was read from, in the same pass,
and scaled by the cotangent later. So forward and backward cannot disagree (F3: Marin, #8217, where bf16 logits went
forward and float32 logits backward), and one matrix product of four is saved.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from noonsight.model import native
from noonsight.model.elementary import product
from noonsight.model.layout import ALONE, Layout

CHUNK_TOKENS = 256  # measured best at 4,096 entries on two cores


class LossParts(NamedTuple):
    """Weighted sums divided by the sum of weights, nats. Only `total` carries a gradient."""

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    z_loss: Float[Array, ""]  # already times its weight


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def weighted_loss(
    h: Float[Array, "T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    z_loss_weight: float,
    dtype: str = "float32",
    layout: Layout = ALONE,
) -> LossParts:
    """The loss of hidden states against target tokens. Products round their inputs to `dtype`; weights of sum 0 give 0.

    Over devices it is what this one adds to the loss: weights are divided by their sum over the global batch.
    """
    scale = _inverse_sum(weights, layout)

    def chunk(_, inputs):
        h, targets, weights = inputs
        logits = product(h, head, dtype)
        return None, _sums(logits, jax.nn.logsumexp(logits, axis=-1), targets, weights)

    _, (ce, square) = jax.lax.scan(chunk, None, _chunks(h, targets, weights))
    return _parts(ce.sum() * scale, square.sum() * scale, z_loss_weight)


def token_cross_entropy(
    h: Float[Array, "T D"], head: Float[Array, "D V"], targets: Int[Array, " T"], dtype: str = "float32"
) -> Float[Array, " T"]:
    """Cross-entropy of each token, nats, by chunks. Weights and z-loss play no part."""

    def chunk(inputs):
        h, targets = inputs
        logits = product(h, head, dtype)
        return jax.nn.logsumexp(logits, axis=-1) - _at(logits, targets)

    return jax.lax.map(chunk, _chunks(h, targets)).reshape(-1)[: h.shape[0]]


def _loss_forward(h, head, targets, weights, z_loss_weight, dtype, layout):
    scale = _inverse_sum(weights, layout)
    if native.serves(dtype, h):
        ce, lse, dh, d_head = native.cross_entropy(h, head, targets, weights * scale, z_loss_weight)
        sums = jnp.sum(weights * ce), jnp.sum(weights * lse * lse)
        return _parts(sums[0] * scale, sums[1] * scale, z_loss_weight), (dh, d_head)

    def chunk(d_head, inputs):
        h, targets, weights = inputs
        logits = product(h, head, dtype)
        top = logits.max(axis=-1, keepdims=True)
        shifted = jnp.exp(logits - top)
        total = shifted.sum(axis=-1, keepdims=True)
        lse = (top + jnp.log(total))[:, 0]
        slope = weights * scale * (1 + 2 * z_loss_weight * lse)  # of lse in the loss
        hot = jnp.arange(logits.shape[1]) == targets[:, None]
        d_logits = (shifted * (slope[:, None] / total) - jnp.where(hot, (weights * scale)[:, None], 0.0)).astype(
            h.dtype
        )
        dh = product(d_logits, head, dtype, b_transposed=True).astype(h.dtype)
        d_head = d_head + product(h, d_logits, dtype, a_transposed=True)
        return d_head, (dh, *_sums(logits, lse, targets, weights))

    start = jnp.zeros(head.shape, jnp.float32)
    d_head, (dh, ce, square) = jax.lax.scan(chunk, start, _chunks(h, targets, weights))
    parts = _parts(ce.sum() * scale, square.sum() * scale, z_loss_weight)
    return parts, (dh.reshape(-1, h.shape[1])[: h.shape[0]], d_head.astype(head.dtype))


def _loss_backward(z_loss_weight, dtype, layout, saved, cotangent):
    dh, d_head = saved
    return dh * cotangent.total.astype(dh.dtype), d_head * cotangent.total.astype(d_head.dtype), None, None


weighted_loss.defvjp(_loss_forward, _loss_backward)


def _at(logits: Array, targets: Array) -> Array:
    return jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]


def _sums(logits: Array, lse: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    return jnp.sum(weights * (lse - _at(logits, targets))), jnp.sum(weights * lse * lse)


def _parts(cross_entropy: Array, square: Array, z_loss_weight: float) -> LossParts:
    return LossParts(cross_entropy + z_loss_weight * square, cross_entropy, z_loss_weight * square)


def _inverse_sum(weights: Array, layout: Layout) -> Array:
    total = layout.total(weights.sum())
    return jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)


def _chunks(*arrays: Array) -> tuple[Array, ...]:
    """Arrays with leading T as [chunks, CHUNK_TOKENS, ...], zero-padded: a padded token has weight 0."""
    padding = -arrays[0].shape[0] % CHUNK_TOKENS
    padded = (jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))) for x in arrays)
    return tuple(x.reshape(-1, CHUNK_TOKENS, *x.shape[1:]) for x in padded)
