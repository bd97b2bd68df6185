"""Attention of the hero family: grouped queries, window or whole document, rotated or not, exclusive, gated per head.

A query at t sees the keys [lower(t), t]; the lower bound alone carries document masks and windows, so local and
global layers run the same code and a scan over layers stays uniform. `attend` never holds more than one block of
scores; blocks outside the bounds are never computed; its backward pass recomputes the scores from the saved
log-sum-exp (FlashAttention, Dao et al. 2022).

Sources: Marin, #8435; exclusive self-attention (XSA) removes from each head's output its component along the token's
own value.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from noonsight.model import native
from noonsight.model.config import ModelConfig
from noonsight.model.elementary import matmul, rms_norm, rotate
from noonsight.model.params import Layers

BLOCK = 64  # queries and keys of one block; measured best at head widths 8 to 64 on two cores
HIDDEN = -1e30  # score of an invisible key; finite, so that no row of a block gives inf - inf
QK_EPS = 1e-6
XSA_EPS = 1e-6


def lower_bounds(segments: Int[Array, "B S"], window: int) -> Int[Array, "B S"]:
    """First key each query sees: the start of its document, or `window - 1` positions back if that is later."""
    positions = jnp.arange(segments.shape[1], dtype=jnp.int32)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    document_start = jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)
    return jnp.maximum(document_start, positions - (window - 1))


def query(
    a: Float[Array, "B S D"],
    layer: Layers,
    angles: Float[Array, "B S 2 h"],
    rotated: Bool[Array, ""],
    config: ModelConfig,
) -> Float[Array, "B S N H"]:
    """Normed, rotated and scaled queries, ready for the product with keys."""
    q = matmul(a, layer.wq, config.matmul_dtype).reshape(*a.shape[:-1], config.num_heads, config.head_width)
    q = _place(q, layer.q_norm, angles, rotated, config)
    return q * jnp.asarray(config.qk_mult / config.head_width**0.5, q.dtype)


def key_value(
    k: Float[Array, "B S C"],
    v: Float[Array, "B S C"],
    layer: Layers,
    angles: Float[Array, "B S 2 h"],
    rotated: Bool[Array, ""],
    is_global: Bool[Array, ""],
    config: ModelConfig,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Keys and values as the queries see them, from the projections (the key's after its convolution)."""
    shape = (*k.shape[:-1], config.num_kv_heads_local, config.head_width)
    k, v = (_kept_heads(x.reshape(shape), is_global, config) for x in (k, v))
    return _place(k, layer.k_norm, angles, rotated, config), v


def _kept_heads(x: Float[Array, "B S K H"], is_global: Bool[Array, ""], config: ModelConfig) -> Float[Array, "B S K H"]:
    """On global layers the first heads, each repeated in place, so that both kinds of layer have the same number."""
    if config.num_kv_heads_global == config.num_kv_heads_local or config.global_every is None:
        return x
    repeats = config.num_kv_heads_local // config.num_kv_heads_global
    return jnp.where(is_global, jnp.repeat(x[..., : config.num_kv_heads_global, :], repeats, axis=-2), x)


def _place(
    x: Float[Array, "B S n H"],
    gain: Float[Array, " H"] | None,
    angles: Float[Array, "B S 2 h"],
    rotated: Bool[Array, ""],
    config: ModelConfig,
) -> Float[Array, "B S n H"]:
    if config.qk_norm != "off":
        x = rms_norm(x, gain, QK_EPS if config.qk_norm == "free" else config.norm_eps)  # gains: as Qwen3
    return jnp.where(rotated, rotate(x, angles), x) if config.rotated_width else x


def finish(
    y: Float[Array, "B S N H"], v: Float[Array, "B S K H"], a: Float[Array, "B S D"], layer: Layers, config: ModelConfig
) -> tuple[Float[Array, "B S D"], Float[Array, ""]]:
    """From heads to width: exclusion of the own value, head gate, output projection.

    Second result: mean head gate (1 without).
    """
    grouped = y.reshape(*y.shape[:2], v.shape[2], -1, config.head_width)
    if config.exclusive_attention:
        wide = v.astype(jnp.float32)[:, :, :, None]
        along = jnp.sum(grouped * wide, axis=-1, keepdims=True) / (
            jnp.sum(wide * wide, axis=-1, keepdims=True) + XSA_EPS
        )
        grouped = (grouped - wide * along).astype(y.dtype)
    heads = grouped.reshape(y.shape)
    gate_mean = jnp.float32(1)
    if layer.head_gate is not None:
        gate = 2 * jax.nn.sigmoid(matmul(a, layer.head_gate, config.matmul_dtype).astype(jnp.float32))
        heads = heads * gate[..., None].astype(heads.dtype)
        gate_mean = jax.lax.stop_gradient(jnp.mean(gate))
    return matmul(heads.reshape(*heads.shape[:2], -1), layer.wo, config.matmul_dtype), gate_mean


def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B P K H"],
    v: Float[Array, "B P K H"],
    lower: Int[Array, "B S"],
    dtype: str = "float32",
    start: Int[Array, ""] | None = None,
) -> Float[Array, "B S N H"]:
    """softmax(q k) v over the keys [lower(t), t] of each query. Query head n uses kv head n // (N / K). Any S.

    The keys begin at position 0, the queries at `start`; None: there are as many queries as keys (P = S).

    Products round their inputs to `dtype` (through XLA the result and its slopes as well); softmax and sums are float32.
    """
    if start is None and native.serves(dtype, q):
        return native.attend(q, k, v, lower)
    length, kept = q.shape[1], q.dtype
    if dtype == "bfloat16":
        q, k, v = (x.astype(dtype) for x in (q, k, v))
    q, k, v = (_whole_blocks(x) for x in (q, k, v))
    if padding := q.shape[1] - length:
        own = jnp.arange(length, length + padding, dtype=lower.dtype)
        own = jnp.broadcast_to(own if start is None else own + start, (q.shape[0], padding))
        lower = jnp.concatenate([lower, own], axis=1)
    return _blocked(q, k, v, lower, start)[:, :length].astype(kept)


@jax.custom_vjp
def _blocked(q: Array, k: Array, v: Array, lower: Array, start: Array | None) -> Array:
    return _blocked_forward(q, k, v, lower, start)[0]


def _blocked_forward(q, k, v, lower, start):
    """For each block of queries one pass over its visible blocks of keys, with a running maximum and sum."""
    queries, keys, values, bounds = _query_blocks(q, k.shape[2]), _key_blocks(k), _key_blocks(v), _bound_blocks(lower)

    def one_block(block):
        index, q_block, bound = block
        row, end = _span(index, start, len(keys))

        def visit(j, carry):
            top, total, out = carry
            scores = _scores(q_block, keys[j], bound, row, j)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
            out = out * shrink[..., None] + _dot("bkrs,bksh->bkrh", weights.astype(v.dtype), values[j])
            return new_top, total * shrink + weights.sum(axis=-1), out

        zeros = jnp.zeros(q_block.shape[:-1], jnp.float32)
        nothing = (zeros + HIDDEN, zeros, jnp.zeros(q_block.shape, jnp.float32))
        top, total, out = jax.lax.fori_loop(_first(bound), end, visit, nothing)
        return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

    out, log_sum = jax.lax.map(one_block, (jnp.arange(len(queries)), queries, bounds))
    return _from_query_blocks(out, q.shape), (q, k, v, lower, start, out, log_sum)


def _blocked_backward(saved, cotangent):
    q, k, v, lower, start, out, log_sum = saved
    queries, keys, values, bounds = _query_blocks(q, k.shape[2]), _key_blocks(k), _key_blocks(v), _bound_blocks(lower)

    def one_block(sums, block):
        index, q_block, d_out, out, log_sum, bound = block
        row, end = _span(index, start, len(keys))
        delta = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1, keepdims=True)

        def visit(j, carry):
            dq, dk, dv = carry
            weights = jnp.exp(_scores(q_block, keys[j], bound, row, j) - log_sum[..., None])
            d_scores = (weights * (_dot("bkrh,bksh->bkrs", d_out, values[j]) - delta)).astype(q.dtype)
            dv = dv.at[j].add(_dot("bkrs,bkrh->bksh", weights.astype(q.dtype), d_out))
            dk = dk.at[j].add(_dot("bkrs,bkrh->bksh", d_scores, q_block))
            return dq + _dot("bkrs,bksh->bkrh", d_scores, keys[j]), dk, dv

        dq, dk, dv = jax.lax.fori_loop(_first(bound), end, visit, (jnp.zeros(q_block.shape, jnp.float32), *sums))
        return (dk, dv), dq.astype(q.dtype)

    sums = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
    blocks = (jnp.arange(len(queries)), queries, _query_blocks(cotangent, k.shape[2]), out, log_sum, bounds)
    (dk, dv), dq = jax.lax.scan(one_block, sums, blocks)
    return _from_query_blocks(dq, q.shape), _from_key_blocks(dk, k), _from_key_blocks(dv, v), None, None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _scores(
    q: Float[Array, "B K r H"], k: Float[Array, "B K s H"], bound: Int[Array, "B s"], row: Array, j: Array
) -> Float[Array, "B K r s"]:
    """Scores of the query block at position `row` on key block j, invisible ones HIDDEN."""
    scores = _dot("bkrh,bksh->bkrs", q, k)
    rows, columns = row + jnp.arange(BLOCK), j * BLOCK + jnp.arange(BLOCK)
    visible = (columns <= rows[:, None]) & (columns >= bound[:, :, None])
    by_group = scores.reshape(*scores.shape[:2], -1, BLOCK, BLOCK)
    return jnp.where(visible[:, None, None], by_group, HIDDEN).reshape(scores.shape)


def _span(index: Array, start: Array | None, num_key_blocks: int) -> tuple[Array, Array]:
    """Position of the first query of block `index`, and the end of the key blocks that its last one sees."""
    if start is None:
        return index * BLOCK, index + 1
    row = start + index * BLOCK
    return row, jnp.minimum((row + BLOCK - 1) // BLOCK + 1, num_key_blocks)


def _first(bound: Int[Array, "B s"]) -> Int[Array, ""]:
    return bound.min() // BLOCK


def _whole_blocks(x: Float[Array, "B S n H"]) -> Float[Array, "B s n H"]:
    padding = -x.shape[1] % BLOCK
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x


_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _query_blocks(x: Float[Array, "B S N H"], kv_heads: int) -> Float[Array, "n B K r H"]:
    """Blocks of queries; the rows of a block are the query heads of one kv head, each with BLOCK positions."""
    batch, length, heads, width = x.shape
    split = x.reshape(batch, length // BLOCK, BLOCK, kv_heads, heads // kv_heads, width)
    return split.transpose(1, 0, 3, 4, 2, 5).reshape(length // BLOCK, batch, kv_heads, -1, width)


def _from_query_blocks(x: Float[Array, "n B K r H"], shape: tuple[int, ...]) -> Float[Array, "B S N H"]:
    blocks, batch, kv_heads, _, width = x.shape
    split = x.reshape(blocks, batch, kv_heads, -1, BLOCK, width)
    return split.transpose(1, 0, 4, 2, 3, 5).reshape(shape)


def _key_blocks(x: Float[Array, "B S K H"]) -> Float[Array, "n B K s H"]:
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:]).transpose(1, 0, 3, 2, 4)


def _from_key_blocks(x: Float[Array, "n B K s H"], like: Float[Array, "B S K H"]) -> Float[Array, "B S K H"]:
    return x.transpose(1, 0, 3, 2, 4).reshape(like.shape).astype(like.dtype)


def _bound_blocks(lower: Int[Array, "B S"]) -> Int[Array, "n B s"]:
    return lower.reshape(lower.shape[0], -1, BLOCK).transpose(1, 0, 2)
