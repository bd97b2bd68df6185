"""Forward with a cache: the block of `transformer.py`, one stretch of tokens at a time.

A cache holds, per layer, keys and values as queries see them (normed, rotated, heads repeated on global layers) and
the last inputs of the three short convolutions. Each row of the batch is one document that starts at position 0; rows
may have different lengths. Invariant: the logits equal those of `transformer.logits` on the same row to rounding
(1e-5 in float32).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from noonsight.model.attention import HIDDEN
from noonsight.model.config import ModelConfig
from noonsight.model.elementary import product, rotation
from noonsight.model.params import Layers, Params
from noonsight.model.ready import prepare
from noonsight.model.transformer import Kind, Reach, Sites, block, dropless, embed, final, head, kinds


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """What one layer remembers.

    `taps` are the inputs of its convolutions at the last I - 1 positions (None without convolutions).
    """

    key: Float[Array, "*L B P K H"]
    value: Float[Array, "*L B P K H"]
    k_taps: Float[Array, "*L B i C"] | None
    attn_taps: Float[Array, "*L B i D"] | None
    moe_taps: Float[Array, "*L B i D"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """What was seen so far: positions filled in each row, and every layer's memory, stacked."""

    lengths: Int[Array, " B"]
    layers: LayerCache


def init_cache(config: ModelConfig, batch: int, length: int) -> Cache:
    """An empty cache for `batch` rows of at most `length` positions."""
    dtype = jnp.dtype(config.compute_dtype)
    stored = (config.num_layers, batch, length, config.num_kv_heads_local, config.head_width)

    def taps(channels: int) -> Array | None:
        if not config.sconv_kernel:
            return None
        return jnp.zeros((config.num_layers, batch, config.sconv_kernel - 1, channels), dtype)

    layers = LayerCache(
        key=jnp.zeros(stored, dtype),
        value=jnp.zeros(stored, dtype),
        k_taps=taps(config.num_kv_heads_local * config.head_width),
        attn_taps=taps(config.width),
        moe_taps=taps(config.width),
    )
    return Cache(lengths=jnp.zeros(batch, jnp.int32), layers=layers)


def prefill(
    params: Params,
    extra: dict[str, Array],
    cache: Cache,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    config: ModelConfig,
) -> tuple[Float[Array, "B V"], Cache]:
    """Append the first `lengths[b]` >= 1 of each row's tokens; logits after each row's last one.

    The cache must have room for S more.

    What lies behind a row's length in `tokens` is ignored.
    """
    config = dropless(config)
    ready = prepare(params, extra, config)
    offsets = jnp.arange(tokens.shape[1])
    positions = cache.lengths[:, None] + offsets
    angles = rotation(positions, config.rotated_width, config.rope_theta)
    valid = offsets < lengths[:, None]

    def one_layer(x: Array, layer: Layers, kind: Kind, old: LayerCache) -> tuple[Array, LayerCache]:
        window = jnp.where(kind.is_global, config.global_window or old.key.shape[1], config.window)
        x, sites, _ = block(x, layer, kind, _reach(old, positions, window, config.matmul_dtype), angles, valid, config)
        return x, _advance(old, sites, cache.lengths, lengths)

    x, layers = ready.scan(one_layer, embed(ready, tokens), kinds(config), cache.layers)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    found = product(final(ready, last), head(ready), config.matmul_dtype)
    return found, Cache(lengths=cache.lengths + lengths, layers=layers)


def decode_step(
    params: Params, extra: dict[str, Array], cache: Cache, tokens: Int[Array, " B"], config: ModelConfig
) -> tuple[Float[Array, "B V"], Cache]:
    """Append one token to each row; logits for the next."""
    return prefill(params, extra, cache, tokens[:, None], jnp.ones_like(tokens), config)


def _reach(old: LayerCache, positions: Int[Array, "B S"], window: Int[Array, ""], dtype: str) -> Reach:
    """Convolutions that begin with the remembered inputs, attention over the cache with the new keys written in."""
    taps_of = {"k": old.k_taps, "attn": old.attn_taps, "moe": old.moe_taps}

    def convolve(site: str, x: Array, taps: Array | None) -> Array:
        if taps is None:
            return x
        reach, length = taps.shape[0] - 1, x.shape[1]
        whole = jnp.concatenate([taps_of[site], x], axis=1)
        return sum(whole[:, reach - lag : reach - lag + length] * taps[lag].astype(x.dtype) for lag in range(reach + 1))

    def attend(q: Array, k: Array, v: Array) -> Array:
        keys, values = _write(old.key, k, positions[:, 0]), _write(old.value, v, positions[:, 0])
        kept = q.dtype
        q, keys, values = (each.astype(dtype) for each in (q, keys, values))  # rounded as in training
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
        scores = jnp.einsum("bqkgh,bpkh->bkgqp", grouped, keys, preferred_element_type=jnp.float32)
        slots = jnp.arange(keys.shape[1])
        visible = (slots <= positions[..., None]) & (slots > positions[..., None] - window)
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, HIDDEN), axis=-1).astype(dtype)
        found = jnp.einsum("bkgqp,bpkh->bqkgh", weights, values, preferred_element_type=jnp.float32)
        return found.reshape(q.shape).astype(kept)

    return Reach(convolve, attend)


def _advance(old: LayerCache, sites: Sites, start: Int[Array, " B"], lengths: Int[Array, " B"]) -> LayerCache:
    """The memory of one layer after `lengths` of the new inputs, the first of which stood at `start`."""

    def latest(taps: Array | None, x: Array) -> Array | None:
        if taps is None:
            return None
        whole = jnp.concatenate([taps, x], axis=1)
        index = lengths[:, None] + jnp.arange(taps.shape[1])
        return jnp.take_along_axis(whole, index[..., None], axis=1)

    return LayerCache(
        key=_write(old.key, sites.key, start),
        value=_write(old.value, sites.value, start),
        k_taps=latest(old.k_taps, sites.k),
        attn_taps=latest(old.attn_taps, sites.attn),
        moe_taps=latest(old.moe_taps, sites.moe),
    )


def _write(
    stored: Float[Array, "B P K H"], new: Float[Array, "B S K H"], start: Int[Array, " B"]
) -> Float[Array, "B P K H"]:
    """`new` from each row's own start.

    Slots behind the row's final length are overwritten by the next call before they are seen.
    """
    return jax.vmap(lambda row, part, at: jax.lax.dynamic_update_slice(row, part, (at, 0, 0)))(stored, new, start)
