"""What a model is: one frozen `ModelConfig` for the hero family and all its relatives, and the families themselves as
data.

A config is identity, so no field that changes a result has a default: a family function states every one. There are
no subclasses; a component is switched off by its size (rank 0, kernel 0, no experts). `FAMILIES` adds to each config
the batch and the number of steps of its published run, so that `count` can tell its tokens and FLOPs. JAX is not
imported here.

Sources: Marin (marin-community/marin) issue #8435 for the hero run, #6044 Snowball, #4447 MoE V1, #1337 Delphi, and
the public retrospectives of Marin 8B and 32B. What a source leaves open and we chose is marked "our reading".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

LLAMA3_VOCABULARY = 128_256
MAX_HISTOGRAM_BINS = 1 << 20


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
    exchange: Literal["sorted", "einsum"]
    capacity_factor: float | None  # None: no assignment is ever dropped
    # Loss, initialisation, numerics
    z_loss_weight: float
    init_scale: float  # initial standard deviation times sqrt(width)
    tie_embeddings: bool
    compute_dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "block"]  # block: keep only each layer's input for the backward pass

    def __post_init__(self) -> None:
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
        return int(self.head_width * self.rope_fraction)

    def is_global(self, layer: int) -> bool:
        """Whether 0-based `layer` sees the whole sequence: every `global_every`-th one, and the last."""
        if self.global_every is None:
            return False
        return (layer + 1) % self.global_every == 0 or layer == self.num_layers - 1

    def span(self, layer: int) -> int:
        """The most keys a query of `layer` sees."""
        window = (self.global_window or self.sequence_length) if self.is_global(layer) else self.window
        return min(window, self.sequence_length)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A named model with its published run: `num_steps` steps of `batch_size` rows, `tokens` when the steps alone do
    not tell.
    """

    name: str
    config: Callable[[], ModelConfig]
    batch_size: int
    num_steps: int | None
    tokens: int | None = None


# Width -> (layers, rows per batch, steps) of the hero ladder; None where no run was published (Marin, #8435, #8673).
HERO_LADDER: dict[int, tuple[int, int | None, int | None]] = {
    512: (6, 1_024, 3_930),
    768: (8, 1_024, 11_420),
    1024: (12, 2_048, 15_276),
    1280: (14, None, None),
    1536: (16, 6_144, 15_128),
    2048: (22, 11_264, 20_072),
    6144: (48, 11_264, 390_251),
}


def hero() -> ModelConfig:
    """The 535B-A23B mixture of experts (Marin, #8435), in the published form: bf16 compute, every block recomputed."""
    return hero_ladder(6144)


def hero_ladder(width: int) -> ModelConfig:
    """The rung of the hero ladder at `width`. Raises ValueError for a width without a published depth."""
    if width not in HERO_LADDER:
        raise ValueError(f"hero_ladder: no rung of width {width}; the table has {sorted(HERO_LADDER)}")
    num_heads = width // 128
    local, global_ = hero_kv_heads(num_heads)
    return ModelConfig(
        vocab_size=LLAMA3_VOCABULARY,
        width=width,
        num_layers=HERO_LADDER[width][0],
        sequence_length=4096,
        num_heads=num_heads,
        num_kv_heads_local=local,
        num_kv_heads_global=global_,
        head_width=128,
        window=2048,
        global_window=None,
        global_every=4,
        rope_theta=10_000.0,
        rope_fraction=0.5,
        rope_on_global=False,
        qk_norm="free",
        qk_mult=1.3,
        exclusive_attention=True,
        head_gate=True,
        norm_eps=1e-5,
        gated_norm_rank=128,
        sconv_kernel=4,
        num_experts=384,
        num_experts_per_token=8,
        expert_width=width // 2,
        latent_width=width // 2,
        num_shared_experts=2,
        shared_width=width // 2,
        router_combine_sum=2.5,
        dense_width=0,
        balance="histogram",
        balance_bins=10_000,
        exchange="sorted",
        capacity_factor=None,
        z_loss_weight=1e-4,
        init_scale=0.5,
        tie_embeddings=False,
        compute_dtype="bfloat16",
        remat="block",
    )


def miniature(width: int, num_layers: int, vocab_size: int) -> ModelConfig:
    """The hero at the size of a laptop: all its components, heads of width 8, 8 experts of which 2 act, 256 tokens of
    context.

    Raises ValueError when `width` is not a multiple of 8.
    """
    if width % 8:
        raise ValueError(
            f"miniature: width {width} is not a multiple of the head width 8; take {width - width % 8 or 8}"
        )
    local, global_ = hero_kv_heads(width // 8)
    return replace(
        hero(),
        vocab_size=vocab_size,
        width=width,
        num_layers=num_layers,
        sequence_length=256,
        num_heads=width // 8,
        num_kv_heads_local=local,
        num_kv_heads_global=global_,
        head_width=8,
        window=128,
        gated_norm_rank=width // 8,
        num_experts=8,
        num_experts_per_token=2,
        expert_width=width // 2,
        latent_width=width // 2,
        shared_width=width // 2,
        compute_dtype="float32",  # remat stays: recomputing a block is faster on a CPU than storing what is inside it
    )


def hero_kv_heads(num_heads: int) -> tuple[int, int]:
    """KV heads (local, global) of the hero family: a quarter and an eighth of the query heads, as whole divisors, at
    least one.
    """
    local = max(k for k in range(1, max(1, num_heads // 4) + 1) if num_heads % k == 0)
    return local, max(k for k in range(1, max(1, num_heads // 8) + 1) if local % k == 0)


def snowball() -> ModelConfig:
    """Snowball 67B-A2B (Marin, #6044). Our reading: rotation on all layers, no short convolutions, no latent space."""
    return replace(
        hero(),
        width=2560,
        num_layers=26,
        sequence_length=8192,
        num_heads=20,
        num_kv_heads_local=5,
        num_kv_heads_global=5,
        window=2048,
        global_window=4096,
        rope_on_global=True,
        sconv_kernel=0,
        num_experts=256,
        num_experts_per_token=4,
        expert_width=1280,
        latent_width=0,
        num_shared_experts=1,
        shared_width=2560,
    )


def moe_v1() -> ModelConfig:
    """MoE V1 129B-A16B (Marin, #4447). Our reading: as Snowball, with one window of 4096 in all layers."""
    return replace(
        snowball(),
        width=5120,
        num_layers=48,
        sequence_length=4096,
        num_heads=40,
        num_kv_heads_local=10,
        num_kv_heads_global=10,
        window=4096,
        global_window=None,
        global_every=None,
        num_experts=64,
        expert_width=2560,
        shared_width=5120,
    )


def delphi(width: int) -> ModelConfig:
    """Delphi, Marin's dense suite (#1337): Qwen3-shaped, full multi-head attention, inner width 4d, depth from
    width.
    """
    return replace(
        _llama(width=width, num_layers=delphi_layers(width), num_heads=width // 128, num_kv_heads=width // 128),
        dense_width=4 * width,
        qk_norm="gain",
        norm_eps=1e-6,
        rope_theta=10_000.0,
        z_loss_weight=1e-7,
    )


def delphi_layers(width: int) -> int:
    """round(d / (64 + 4 log2 d - 9)): 512 -> 6, 2048 -> 21, 5376 -> 51."""
    return round(width / (64 + 4 * math.log2(width) - 9))


def marin_8b() -> ModelConfig:
    """Marin 8B: the shape of Llama 3.1 8B, without the long-context scaling of its rotation."""
    return replace(_llama(width=4096, num_layers=32, num_heads=32, num_kv_heads=8), dense_width=14_336)


def marin_32b() -> ModelConfig:
    """Marin 32B after its change at step 80 000, when QK norm was switched on (before: `replace(...,
    qk_norm="off")`).
    """
    return replace(
        _llama(width=5120, num_layers=64, num_heads=40, num_kv_heads=8),
        dense_width=27_648,
        qk_norm="gain",
        z_loss_weight=1e-4,
    )


def _llama(*, width: int, num_layers: int, num_heads: int, num_kv_heads: int) -> ModelConfig:
    """A Llama: the hero with every special component switched off; its layers are local ones whose window is the
    sequence.
    """
    return replace(
        hero(),
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads_local=num_kv_heads,
        num_kv_heads_global=num_kv_heads,
        window=4096,
        global_every=None,
        rope_theta=500_000.0,
        rope_fraction=1.0,
        qk_norm="off",
        qk_mult=1.0,
        exclusive_attention=False,
        head_gate=False,
        gated_norm_rank=0,
        sconv_kernel=0,
        num_experts=0,
        num_experts_per_token=0,
        expert_width=0,
        latent_width=0,
        num_shared_experts=0,
        shared_width=0,
        dense_width=4 * width,
        balance="none",
        z_loss_weight=0.0,
    )


def _ladder_family(width: int) -> Family:
    _, batch_size, num_steps = HERO_LADDER[width]
    assert batch_size is not None
    return Family(name=f"ladder-{width}", config=lambda: hero_ladder(width), batch_size=batch_size, num_steps=num_steps)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="hero", config=hero, batch_size=11_264, num_steps=390_251),
        *(_ladder_family(width) for width in (512, 768, 1024, 1536, 2048)),
        Family(name="snowball", config=snowball, batch_size=8_192, num_steps=157_500),
        Family(name="moe-v1", config=moe_v1, batch_size=2_048, num_steps=None, tokens=1_040_000_000_000),
        Family(name="delphi-1e23", config=lambda: delphi(5376), batch_size=2_048, num_steps=74_884),
        Family(name="marin-8b", config=marin_8b, batch_size=4_096, num_steps=None, tokens=12_750_000_000_000),
        Family(name="marin-32b", config=marin_32b, batch_size=8_192, num_steps=192_000, tokens=6_400_000_000_000),
        Family(name="miniature", config=lambda: miniature(96, 3, 4096), batch_size=4, num_steps=1_348),
    )
}


def _check_sizes(config: ModelConfig) -> None:
    for name in ("vocab_size", "width", "num_layers", "sequence_length", "num_heads", "head_width", "window"):
        _require(getattr(config, name) > 0, f"{name} is {getattr(config, name)}; it must be positive")
    _require(config.norm_eps > 0, f"norm_eps is {config.norm_eps}; it must be positive")
    _require(config.gated_norm_rank >= 0, f"gated_norm_rank is {config.gated_norm_rank}; 0 switches gated norms off")
    _require(config.sconv_kernel >= 0, f"sconv_kernel is {config.sconv_kernel}; 0 switches short convolutions off")
    _require(config.z_loss_weight >= 0, f"z_loss_weight is {config.z_loss_weight}; 0 switches it off")
    _choice("compute_dtype", config.compute_dtype, ("float32", "bfloat16"))
    _choice("remat", config.remat, ("none", "block"))


def _check_attention(config: ModelConfig) -> None:
    heads, local, global_ = config.num_heads, config.num_kv_heads_local, config.num_kv_heads_global
    _require(local > 0 and heads % local == 0, f"num_heads {heads} is not a multiple of num_kv_heads_local {local}")
    _require(
        global_ > 0 and local % global_ == 0,
        f"num_kv_heads_local {local} is not a multiple of num_kv_heads_global {global_}: "
        "global layers repeat each kept head",
    )
    _require(
        config.global_every is None or config.global_every > 0,
        f"global_every is {config.global_every}; use None for no global layer",
    )
    _require(
        0 <= config.rope_fraction <= 1, f"rope_fraction is {config.rope_fraction}; it is a part of the head, 0 to 1"
    )
    rotated = config.head_width * config.rope_fraction
    _require(
        rotated == int(rotated) and int(rotated) % 2 == 0,
        f"head_width * rope_fraction is {rotated}; rotation needs an even number",
    )
    _choice("qk_norm", config.qk_norm, ("off", "free", "gain"))


def _check_experts(config: ModelConfig) -> None:
    _choice("balance", config.balance, ("histogram", "topk", "none"))
    _choice("exchange", config.exchange, ("sorted", "einsum"))
    _require(
        config.capacity_factor is None,
        f"capacity_factor is {config.capacity_factor}, but exchange {config.exchange!r} drops nothing; use None",
    )
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
    _require(config.expert_width > 0, "expert_width is 0; routed experts need an inner width")
    _require(
        config.num_shared_experts == 0 or config.shared_width > 0,
        "shared_width is 0; shared experts need an inner width",
    )
    _require(config.router_combine_sum > 0, f"router_combine_sum is {config.router_combine_sum}; it must be positive")
    _require(
        1 < config.balance_bins <= MAX_HISTOGRAM_BINS,
        f"balance_bins is {config.balance_bins}; use 2 to {MAX_HISTOGRAM_BINS}",
    )


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"ModelConfig: {message}")
