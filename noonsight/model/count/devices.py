"""What one device holds, sends and receives, in closed form. Sources: Marin, #8435 (hero), #7279 and #8549 (exchanges).

A device has `device_tokens` tokens, hence A = tokens x experts per token assignments; the experts are split over
`expert_shards` devices. A capacity factor is capacity over mean load.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from noonsight.model.config import ModelConfig
from noonsight.model.count.parameters import expert_parameters


@dataclass(frozen=True, kw_only=True)
class PooledWave:
    """Rows of the fixed pooled exchange, in one wave. A header row holds the expert of each payload row."""

    rows_per_pair: int  # between one sender and one receiver
    rows_per_expert: int  # of one local expert, from all senders
    header_rows: int


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Rows of the ragged exchange on one receiver: in all, and in each of its sequential chunks of experts."""

    capacity: int
    rows_per_chunk: int


def pooled_wave(
    config: ModelConfig,
    device_tokens: int,
    *,
    expert_shards: int,
    num_waves: int = 3,
    transport_factor: float = 1.15,
    capacity_factor: float = 1.15,
) -> PooledWave:
    """The rows of a device with so many tokens; see `pooled_rows`."""
    return pooled_rows(
        device_tokens * config.num_experts_per_token,
        shards=expert_shards,
        experts_here=local_experts(config, expert_shards),
        row_width=config.expert_input_width,
        num_waves=num_waves,
        transport_factor=transport_factor,
        capacity_factor=capacity_factor,
    )


def pooled_rows(
    assignments: int,
    *,
    shards: int,
    experts_here: int,
    row_width: int,
    num_waves: int,
    transport_factor: float,
    capacity_factor: float,
) -> PooledWave:
    """P = ceil(transport A / (shards waves)), R = ceil(capacity A / (local experts waves)), ceil(P / row width)."""
    rows = ceiled(transport_factor, assignments, shards * num_waves)
    return PooledWave(
        rows_per_pair=rows,
        rows_per_expert=ceiled(capacity_factor, assignments, experts_here * num_waves),
        header_rows=-(-rows // row_width),
    )


def ragged(config: ModelConfig, device_tokens: int, *, num_chunks: int = 2, capacity_factor: float = 1.15) -> Ragged:
    """The rows of a device with so many tokens; see `ragged_rows`."""
    assignments = device_tokens * config.num_experts_per_token
    return ragged_rows(assignments, num_chunks=num_chunks, capacity_factor=capacity_factor)


def ragged_rows(assignments: int, *, num_chunks: int, capacity_factor: float) -> Ragged:
    """ceil(capacity A) rows in all; the chunks share them evenly, rounded up."""
    capacity = ceiled(capacity_factor, assignments, 1)
    return Ragged(capacity=capacity, rows_per_chunk=-(-capacity // num_chunks))


def local_experts(config: ModelConfig, expert_shards: int) -> int:
    """Experts of one device. Raises ValueError when they cannot be split evenly."""
    if expert_shards < 1 or config.num_experts % expert_shards:
        raise ValueError(
            f"{config.num_experts} experts cannot be split evenly over {expert_shards} devices; take a divisor"
        )
    return config.num_experts // expert_shards


def local_expert_parameters(config: ModelConfig, expert_shards: int) -> int:
    """Parameters of the routed experts that one device holds, all layers."""
    return config.num_layers * local_experts(config, expert_shards) * expert_parameters(config)


def carry_bytes(config: ModelConfig, device_tokens: int) -> int:
    """Bytes of the residual streams that remat "block" keeps: one per layer, in the compute dtype."""
    width = {"float32": 4, "bfloat16": 2}[config.compute_dtype]
    return device_tokens * config.width * width * config.num_layers


def ceiled(factor: float, number: int, parts: int) -> int:
    """ceil(factor * number / parts), exact for a factor written in decimals."""
    exact = Fraction(str(factor)) * number / parts
    return -(-exact.numerator // exact.denominator)
