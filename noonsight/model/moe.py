"""Routed experts in a latent space, shared experts beside them, and quantile balancing of the load.

A token takes the A experts with the highest biased scores and weighs them by the logistic of the unbiased ones,
scaled to a fixed sum. There is no auxiliary loss: the bias of each expert is set once per step so that, on the batch
before, exactly A / E of the tokens would have chosen it. Routed experts read and write a narrow latent space; shared
experts see the full width.

Invariant: beta_e is the upper (A / E)-quantile over valid tokens of score[t, e] - threshold[t], where threshold is
the (A + 1)-th biased score; the bias is -beta, centred (Marin, #8435, "quantile balancing").
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from noonsight.model.config import ModelConfig
from noonsight.model.elementary import matmul, rms_norm, swiglu
from noonsight.model.exchange import EXCHANGES, Drops, Way
from noonsight.model.layout import ALONE, Layout
from noonsight.model.params import Layers


class Routing(NamedTuple):
    """Which experts each token takes.

    `scores` are the unbiased router logits, float32; no gradient through `threshold`.
    """

    chosen: Int[Array, "T A"]
    weights: Float[Array, "T A"]
    scores: Float[Array, "T E"]
    threshold: Float[Array, " T"]


class RouterStatistics(NamedTuple):
    """What one layer's router did with the valid tokens of the global batch. None of it carries a gradient."""

    beta: Float[Array, " E"]  # the next step's pending quantile
    entropy: Float[Array, ""]  # of softmax(scores), mean over tokens, nats
    load_max_over_mean: Float[Array, ""]
    load_min_over_mean: Float[Array, ""]
    sender_drop_rate: Float[Array, ""]  # share of the assignments refused when sending
    receiver_drop_rate: Float[Array, ""]  # when receiving


def effective_bias(pending_beta: Float[Array | np.ndarray, "*L E"]) -> Float[Array, "*L E"]:
    """The bias that balances: minus the pending quantile, centred over the experts of each layer."""
    return -pending_beta - jnp.mean(-pending_beta, axis=-1, keepdims=True)


def route(
    m: Float[Array, "T D"], router: Float[Array, "D E"], bias: Float[Array, " E"], config: ModelConfig
) -> Routing:
    """Choose and weigh experts.

    Scores leave the matrix product in float32, and its inputs are not rounded to `matmul_dtype`: rounding changes a few
    choices in a hundred.
    """
    scores = jnp.dot(m, router, preferred_element_type=jnp.float32)
    highest = jax.lax.top_k(jax.lax.stop_gradient(scores + bias), config.num_experts_per_token + 1)
    # XLA joins slices of it into a sort of all, eight times slower; one barrier for the pair makes it abort over a mesh
    top, index = (jax.lax.optimization_barrier(each) for each in highest)
    chosen = index[:, :-1]
    taken = chosen[..., None] == jnp.arange(config.num_experts)  # a mask, so that the derivative needs no scatter
    picked = jax.nn.sigmoid(jnp.sum(jnp.where(taken, scores[:, None, :], 0.0), axis=-1))
    weights = config.router_combine_sum * picked / (picked.sum(axis=-1, keepdims=True) + 1e-9)
    return Routing(chosen, weights.astype(m.dtype), scores, top[:, -1])


def moe(
    m: Float[Array, "B S D"],
    valid: Bool[Array, "B S"],
    layer: Layers,
    config: ModelConfig,
    layout: Layout = ALONE,
) -> tuple[Float[Array, "B S D"], RouterStatistics]:
    """Routed plus shared experts of one layer, and what its router did."""
    rows, live = m.reshape(-1, m.shape[-1]), valid.reshape(-1)
    routing = route(rows, layer.router, layer.router_bias, config)
    latent = rows
    if layer.latent_down is not None:
        latent = rms_norm(matmul(rows, layer.latent_down, config.matmul_dtype), layer.latent_norm, config.norm_eps)
    split = layout.size("expert")
    way = Way(
        axis="expert" if split > 1 else None,
        shards=split,
        capacity_factor=config.capacity_factor,
        dtype=config.matmul_dtype,
    )
    bank = (layer.expert_gate, layer.expert_up, layer.expert_down)
    y, drops = EXCHANGES[config.exchange](latent, routing.chosen, routing.weights, live, *bank, way)
    if layer.latent_up is not None:
        y = matmul(y, layer.latent_up, config.matmul_dtype)
    if config.num_shared_experts:
        y = y + _shared_experts(rows, layer, config)
    return y.reshape(m.shape), _statistics(routing, live, drops, config, layout)


def _shared_experts(rows: Float[Array, "T D"], layer: Layers, config: ModelConfig) -> Float[Array, "T D"]:
    """The sum of J SwiGLU blocks, computed as one block of inner width J * G. (The optimiser sees J separate
    matrices.)
    """
    gate, up = (jnp.moveaxis(w, 0, 1).reshape(rows.shape[1], -1) for w in (layer.shared_gate, layer.shared_up))
    return swiglu(rows, gate, up, layer.shared_down.reshape(-1, rows.shape[1]), config.matmul_dtype)


def histogram_beta(
    margins: Float[Array, "T E"],
    valid: Bool[Array, " T"],
    rank: Float[Array, ""],
    bins: int,
    layout: Layout = ALONE,
) -> Float[Array, " E"]:
    """Each expert's margin of upper rank `rank`, from a histogram of `bins` equal bins between the layer's extremes.

    The bin is found by halving: the largest b with at least `rank` margins in bins >= b. That reads the histogram
    without building it, gives the same bin, and sums over devices as well (one count per expert and halving).
    """
    live = valid[:, None]
    low = layout.lowest(jnp.min(jnp.where(live, margins, jnp.inf)))
    high = jnp.maximum(layout.highest(jnp.max(jnp.where(live, margins, -jnp.inf))), low + 1e-6)
    width = (high - low) / bins
    bin_of = jnp.where(live, jnp.clip(jnp.floor((margins - low) / width), 0, bins - 1).astype(jnp.int32), -1)

    def halve(_, bounds):
        least, most = bounds
        middle = (least + most + 1) // 2
        enough = layout.total(jnp.sum(bin_of >= middle, axis=0)) >= rank
        return jnp.where(enough, middle, least), jnp.where(enough, most, middle - 1)

    zeros = jnp.zeros(margins.shape[1], jnp.int32)
    found, _ = jax.lax.fori_loop(0, bins.bit_length(), halve, (zeros, zeros + bins - 1))
    above, inside = layout.total((jnp.sum(bin_of >= found, axis=0), jnp.sum(bin_of == found, axis=0)))
    return low + found * width + width * (above - rank) / jnp.maximum(inside, 1)


def topk_beta(
    margins: Float[Array, "T E"], valid: Bool[Array, " T"], rank: Float[Array, ""], layout: Layout = ALONE
) -> Float[Array, " E"]:
    """Each expert's margin of upper rank max(1, floor(rank)), exactly: the estimator of small runs."""
    margins, valid = layout.rows_of_all(margins), layout.rows_of_all(valid)
    ordered = -jnp.sort(jnp.where(valid[:, None], -margins, jnp.inf), axis=0)
    return ordered[jnp.maximum(1, jnp.floor(rank).astype(jnp.int32)) - 1]


def _statistics(
    routing: Routing, valid: Bool[Array, " T"], drops: Drops, config: ModelConfig, layout: Layout
) -> RouterStatistics:
    scores, threshold = jax.lax.stop_gradient((routing.scores, routing.threshold))
    taken = (routing.chosen[..., None] == jnp.arange(config.num_experts)) & valid[:, None, None]
    load = jnp.sum(taken, axis=(0, 1)).astype(jnp.float32)
    log_p = jax.nn.log_softmax(scores)
    entropy = jnp.sum(jnp.where(valid, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1), 0.0))
    # A batch has fewer than 2^31 tokens, but its assignments may be more: those are added in float32 (F11).
    refused = jnp.stack(drops).astype(jnp.float32)
    num_valid, load, entropy, refused = layout.total((valid.sum(), load, entropy, refused))
    num_valid = jnp.maximum(num_valid, 1)
    beta = jnp.zeros(config.num_experts, jnp.float32)
    rank = num_valid * (config.num_experts_per_token / config.num_experts)
    margins = scores - threshold[:, None]
    if config.balance == "histogram":
        beta = histogram_beta(margins, valid, rank, config.balance_bins, layout)
    elif config.balance == "topk":
        beta = topk_beta(margins, valid, rank, layout)
    assignments = num_valid.astype(jnp.float32) * config.num_experts_per_token
    mean = jnp.maximum(load.mean(), 1e-9)
    return RouterStatistics(beta, entropy / num_valid, load.max() / mean, load.min() / mean, *(refused / assignments))
