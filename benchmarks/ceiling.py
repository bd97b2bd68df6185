"""The ceiling of a train step: how fast this machine multiplies matrices of exactly the step's own shapes.

Each matrix product of the forward pass is measured three times, as the forward product and as the two of its backward
pass (towards the rows, towards the matrix). The ceiling is what a step would reach that did nothing else:

    ceiling = sum_i flops_i / sum_i (flops_i / rate_i)          rate_i of the faster of XLA and our kernels for product i

The FLOPs are those of `noonsight.model.count`, so a share of the ceiling is (tokens/s x FLOPs per token) / ceiling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from noonsight.model.config import ModelConfig

DIRECTIONS = ("forward", "rows", "matrix")


class Product(NamedTuple):
    """`count` times per step: `batch` independent products [m, k] x [k, n]."""

    name: str
    batch: int
    m: int
    k: int
    n: int
    count: int

    @property
    def flops(self) -> int:
        """FLOPs of all of them in one direction, per step."""
        return 2 * self.count * self.batch * self.m * self.k * self.n


def products(config: ModelConfig, batch_size: int) -> list[Product]:
    """The matrix products of one forward pass over `batch_size` rows; equal shapes are one entry.

    Experts are taken as evenly filled, attention as the full square of the window that `count` counts.
    """
    tokens, layers, d = batch_size * config.sequence_length, config.num_layers, config.width
    query = config.num_heads * config.head_width
    found = [
        Product("query", 1, tokens, d, query, layers),
        Product("attention out", 1, tokens, query, d, layers),
        Product("head", 1, tokens, d, config.vocab_size, 1),
    ]
    for layer in range(layers):
        kept = config.num_kv_heads_global if config.is_global(layer) else config.num_kv_heads_local
        found.append(Product("key, value", 1, tokens, d, kept * config.head_width, 2))
        squares = batch_size * config.num_heads, config.sequence_length
        found.append(Product("scores", *squares, config.head_width, config.span(layer), 1))
        found.append(Product("values", *squares, config.span(layer), config.head_width, 1))
    for inner in filter(None, (config.dense_width, config.num_shared_experts * config.shared_width)):
        found.append(Product("gate, up", 1, tokens, d, inner, 2 * layers))
        found.append(Product("down", 1, tokens, inner, d, layers))
    if config.is_moe:
        z, each = config.expert_input_width, tokens * config.num_experts_per_token // config.num_experts
        found.append(Product("router", 1, tokens, d, config.num_experts, layers))
        found.append(Product("expert gate, up", config.num_experts, each, z, config.expert_width, 2 * layers))
        found.append(Product("expert down", config.num_experts, each, config.expert_width, z, layers))
        if config.latent_width:
            found.append(Product("latent down", 1, tokens, d, z, layers))
            found.append(Product("latent up", 1, tokens, z, d, layers))
    merged: dict[tuple[int, ...], Product] = {}
    for product in found:
        same = merged.get(product[1:5])
        merged[product[1:5]] = product._replace(count=product.count + (same.count if same else 0))
    return list(merged.values())


def ceiling_flops_per_s(found: list[Product], rates: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Ceilings in FLOP/s: of each way in `rates` (way -> per product, per direction, FLOP/s) and of the best of them."""
    flops = [product.flops for product in found for _ in DIRECTIONS]
    ways = {way: [rate for product in table for rate in product] for way, table in rates.items()}
    ways["best"] = [max(choices) for choices in zip(*ways.values())]
    return {way: sum(flops) / sum(part / rate for part, rate in zip(flops, table)) for way, table in ways.items()}
