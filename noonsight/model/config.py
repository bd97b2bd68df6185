"""What a model is: one frozen `ModelConfig` for the hero family and all its relatives (`families.py`).

A config is identity, so no field that changes a result has a default: a family function states every one. There are
no subclasses; a component is switched off by its size (rank 0, kernel 0, no experts). JAX is not imported here.

`check_fields` holds any config against its own annotations; training configs use it too.
"""

from __future__ import annotations

import difflib
import functools
import types
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

MAX_HISTOGRAM_BINS = 1 << 20
LEAST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, 2.0**128 - 2.0**104  # normal ones: below the least a device may see 0

# What must be above 0 where it is not None, and what 0 switches off.
POSITIVE = (
    *("vocab_size", "width", "num_layers", "sequence_length", "num_heads", "num_kv_heads_local", "num_kv_heads_global"),
    *(
        "head_width",
        "window",
        "global_window",
        "global_every",
        "rope_theta",
        "qk_mult",
        "init_scale",
        "head_init_scale",
    ),
)
NOT_NEGATIVE = (
    *("gated_norm_rank", "sconv_kernel", "num_experts", "num_experts_per_token", "expert_width", "latent_width"),
    *("num_shared_experts", "shared_width", "dense_width", "router_combine_sum", "balance_bins", "z_loss_weight"),
)
INSTEAD = {"global_window": "None lets global layers see the whole sequence", "global_every": "None: no global layer"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every choice that changes the function a model computes. Widths are in channels, lengths in tokens."""

    # Sizes
    vocab_size: int
    width: int
    num_layers: int
    sequence_length: int
    # Attention. Layer i is global when (i + 1) % global_every == 0 or it is the last; without `global_every`, never.
    num_heads: int
    num_kv_heads_local: int  # also the number stored in every layer
    num_kv_heads_global: int
    head_width: int
    window: int  # keys a local layer sees, the query's own included
    global_window: int | None  # the same for a global layer; None: the whole sequence
    global_every: int | None
    rope_theta: float
    rope_fraction: float  # part of the head width that is rotated
    rope_on_global: bool
    qk_norm: Literal["off", "free", "gain"]  # free: without parameters; gain: one learned gain per channel of a head
    qk_mult: float
    exclusive_attention: bool
    head_gate: bool
    # Norms and convolutions
    norm_eps: float
    gated_norm_rank: int  # 0: plain RMS norms
    sconv_kernel: int  # 0: no short convolutions
    # Experts; num_experts 0 makes a dense model of inner width `dense_width`
    num_experts: int
    num_experts_per_token: int
    expert_width: int
    latent_width: int  # 0: experts act on the full width
    num_shared_experts: int
    shared_width: int
    router_combine_sum: float  # what the weights of the chosen experts are scaled to sum to
    dense_width: int
    balance: Literal["histogram", "topk", "none"]
    balance_bins: int  # of the histogram
    exchange: Literal["sorted", "einsum", "ring", "fixed", "pooled", "ragged", "waterfill"]  # `model/exchange`
    capacity_factor: float | None  # room for assignments over their mean; None: for all, none is ever dropped
    # Loss, initialisation, numerics
    z_loss_weight: float
    init_scale: float  # initial standard deviation times sqrt(width)
    head_init_scale: float  # the same of the head; under AdamH it is for good, and bounds the logits (`hero_reach`)
    tie_embeddings: bool
    compute_dtype: Literal["float32", "bfloat16"]  # of activations
    matmul_dtype: Literal["float32", "bfloat16"]  # what matrix products round their inputs to; sums are float32
    remat: Literal["none", "block", "offload"]  # kept of a layer for its gradient: all; its input; that, by the host

    def __post_init__(self) -> None:
        """Refuse what no model can be. Raises ValueError that names field, value and what to do."""
        check_fields(self)
        _check_sizes(self)
        _check_attention(self)
        _check_experts(self)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def expert_input_width(self) -> int:
        """Width of the rows the experts receive: the latent width, or the full width when there is no latent space."""
        return self.latent_width or self.width

    @property
    def rotated_width(self) -> int:
        """Channels of a head that are rotated; even."""
        return round(self.head_width * self.rope_fraction)

    def is_global(self, layer: int) -> bool:
        """Whether 0-based `layer` sees the whole sequence: every `global_every`-th one, and the last."""
        if self.global_every is None:
            return False
        return (layer + 1) % self.global_every == 0 or layer == self.num_layers - 1

    def span(self, layer: int) -> int:
        """The most keys a query of `layer` sees."""
        window = (self.global_window or self.sequence_length) if self.is_global(layer) else self.window
        return min(window, self.sequence_length)


def check_fields(config: Any) -> None:
    """Hold every field of `config`, a dataclass, against its annotation: int (True is none), bool, float (an int will
    do, but neither NaN nor what is infinite in float32), str, Literal, another config, and these or None.

    Raises ValueError that names the field, its value and what it may be.
    """
    for name, kinds in _kinds_of(type(config)):
        value = getattr(config, name)
        if not any(_is_a(value, kind) for kind in kinds):
            rule = " or ".join(_told(kind, value) for kind in kinds)
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; {rule}")


@functools.cache
def _kinds_of(kind: type) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    hints = get_type_hints(kind)
    each = ((field.name, hints[field.name]) for field in fields(kind))
    return tuple((name, get_args(hint) if isinstance(hint, types.UnionType) else (hint,)) for name, hint in each)


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(_is_a(each, get_args(kind)[0]) for each in value)
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= LARGEST_FLOAT32  # NaN is not
    return isinstance(value, kind)


def _told(kind: Any, value: Any) -> str:
    if get_origin(kind) is Literal:
        near = difflib.get_close_matches(str(value), get_args(kind), n=1)
        return f"choose one of {', '.join(get_args(kind))}" + (f" (did you mean {near[0]!r}?)" if near else "")
    words = {
        int: "it must be an int",
        float: "it must be a number, finite in float32",
        bool: "it must be True or False",
    }
    return words.get(kind) or ("None" if kind is types.NoneType else f"it must be of type {kind.__name__}")


def _check_sizes(config: ModelConfig) -> None:
    for name in POSITIVE:
        value, instead = getattr(config, name), f"; {INSTEAD[name]}" if name in INSTEAD else ""
        _require(value is None or value > 0, f"{name} is {value}; it must be positive{instead}")
    for name in NOT_NEGATIVE:
        value = getattr(config, name)
        _require(value >= 0, f"{name} is {value}; it must not be negative, 0 switches it off")
    _require(
        config.norm_eps >= LEAST_FLOAT32,
        f"norm_eps is {config.norm_eps}; it must be at least {LEAST_FLOAT32:.2g}, below which float32 may see 0",
    )
    _require(
        config.gated_norm_rank <= config.width,
        f"gated_norm_rank is {config.gated_norm_rank}, more than the width {config.width}; take a smaller one",
    )
    _require(
        config.sconv_kernel <= config.sequence_length,
        f"sconv_kernel is {config.sconv_kernel}, more than the sequence_length {config.sequence_length}; take fewer taps",
    )
    _require(
        not config.tie_embeddings or config.head_init_scale == config.init_scale,
        f"head_init_scale is {config.head_init_scale}, but the head is the embedding; use its init_scale {config.init_scale}",
    )
    _require(
        config.compute_dtype == "float32" or config.matmul_dtype == "bfloat16",
        "matmul_dtype is 'float32' but activations are bfloat16, and widening them gains nothing; use 'bfloat16'",
    )


def _check_attention(config: ModelConfig) -> None:
    heads, local, global_ = config.num_heads, config.num_kv_heads_local, config.num_kv_heads_global
    _require(heads % local == 0, f"num_heads {heads} is not a multiple of num_kv_heads_local {local}")
    _require(
        local % global_ == 0,
        f"num_kv_heads_local {local} is not a multiple of num_kv_heads_global {global_}: "
        "global layers repeat each kept head",
    )
    _require(
        0 <= config.rope_fraction <= 1, f"rope_fraction is {config.rope_fraction}; it is a part of the head, 0 to 1"
    )
    rotated = config.head_width * config.rope_fraction
    _require(
        abs(rotated - config.rotated_width) <= 1e-9 and config.rotated_width % 2 == 0,
        f"head_width {config.head_width} * rope_fraction {config.rope_fraction} is {rotated}; "
        "rotation needs an even number of channels",
    )


def _check_experts(config: ModelConfig) -> None:
    factor, dropless = config.capacity_factor, config.exchange in ("sorted", "einsum")
    _require(
        factor is None or not dropless,
        f"capacity_factor is {factor}, but exchange {config.exchange!r} drops nothing; use None",
    )
    _require(factor is None or factor > 0, f"capacity_factor is {factor}; it is a part of the mean load, such as 1.15")
    if not config.is_moe:
        _require(
            config.dense_width > 0, "num_experts is 0 and dense_width is 0: the model has no MLP; give one of them"
        )
        _require(config.balance == "none", f"balance is {config.balance!r} but there are no experts; use 'none'")
        return
    experts, chosen = config.num_experts, config.num_experts_per_token
    _require(
        config.dense_width == 0, f"dense_width is {config.dense_width} beside {experts} experts; one of them must be 0"
    )
    _require(
        0 < chosen < experts,
        f"num_experts_per_token is {chosen} of {experts} experts; it must be smaller, "
        f"the ({chosen} + 1)-th score sets the threshold",
    )
    _require(config.expert_width > 0, f"expert_width is {config.expert_width}; routed experts need an inner width")
    _require(
        config.num_shared_experts == 0 or config.shared_width > 0,
        f"shared_width is {config.shared_width}; {config.num_shared_experts} shared experts need an inner width",
    )
    _require(config.router_combine_sum > 0, f"router_combine_sum is {config.router_combine_sum}; it must be positive")
    _require(
        1 < config.balance_bins <= MAX_HISTOGRAM_BINS,
        f"balance_bins is {config.balance_bins}; use 2 to {MAX_HISTOGRAM_BINS}",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"ModelConfig: {message}")
