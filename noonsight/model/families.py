"""The hero, its ladder, and its relatives: each family a function that returns a `ModelConfig`.

`FAMILIES` adds to each config the batch and the number of steps of its published run, so that `count` can tell its
tokens and FLOPs. JAX is not imported here.

Sources: Marin (marin-community/marin) issue #8435 for the hero run, #6044 Snowball, #4447 MoE V1, #1337 Delphi, and
the public retrospectives of Marin 8B and 32B. What a source leaves open and we chose is marked "our reading".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from noonsight.model.config import ModelConfig

LLAMA3_VOCABULARY = 128_256


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
        matmul_dtype="bfloat16",
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
        compute_dtype="float32",
        matmul_dtype="float32",
        # remat stays: recomputing a block is faster on a CPU than storing what is inside it
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
