"""The hero, its ladder, and its relatives: each family a function that returns a `ModelConfig`.

`FAMILIES` adds to each config its published run: batch, steps, optimiser and the rule of its rates, so that `count` can
tell tokens, FLOPs and rates. Two changes of a config in the middle of a run are functions here: `lengthened` and
`switch_qk_norm_on`, the only one that touches arrays and so the only one that imports JAX.

Sources: Marin (marin-community/marin) issue #8435 for the hero run, #6044 Snowball, #4447 and #4697 MoE V1, #1337
Delphi, and the public retrospectives of Marin 8B and 32B. What a source leaves open and we chose is marked "our
reading".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from noonsight.model.config import ModelConfig

if TYPE_CHECKING:
    from noonsight.model.params import Params

LLAMA3_VOCABULARY = 128_256


@dataclass(frozen=True, kw_only=True)
class Family:
    """A named model with its published run: `num_steps` steps of `batch_size` rows (the last, where it grew), `tokens`
    when the steps alone do not tell. `rule` names the transfer rule of its rates (`scaling.transfer`), if one set them;
    `beta2` is stated where the run does not take the rule's, which its batch would clamp.
    """

    name: str
    config: Callable[[], ModelConfig]
    batch_size: int
    num_steps: int | None
    tokens: int | None = None
    rule: Literal["hero", "may", "moe-v1", "delphi"] | None = "hero"
    beta2: float | None = None
    optimizer: Literal["muonh", "adamh", "adamw"] = "muonh"


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
    """The 535B-A23B mixture of experts (Marin, #8435), in the published form: bf16 compute, every block recomputed, and
    the ragged exchange, which it has used since step 81,716.
    """
    return replace(hero_ladder(6144), exchange="ragged", capacity_factor=1.15)


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
        head_init_scale=0.5,
        tie_embeddings=False,
        compute_dtype="bfloat16",
        matmul_dtype="bfloat16",
        remat="block",
    )


def miniature(width: int, num_layers: int, vocab_size: int) -> ModelConfig:
    """The hero at the size of a laptop: all its components, heads of width 8, 8 experts of which 2 act, 256 tokens of
    context.

    Raises ValueError when `width` is not a positive multiple of 8.
    """
    _require_multiple("miniature", width, 8)
    local, global_ = hero_kv_heads(width // 8)
    return replace(
        hero_ladder(6144),
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


def hero_reach(config: ModelConfig) -> ModelConfig:
    """The config with a head so large that its logits reach as far as the hero's, whatever its width.

    AdamH keeps the norm of the head, and the rows it acts on have norm sqrt(width), so with gains of 1 a logit cannot
    exceed head_init_scale * sqrt(width): 39 in the hero, 8 at width 256, 5 at width 96, where no token can be certain.
    The published ladder keeps 0.5 at every width (768 and up); this is ours (decision 6).
    """
    return replace(config, head_init_scale=config.init_scale * math.sqrt(max(HERO_LADDER) / config.width))


NUCLEOTIDES = "ACGTN"  # N: a base that was not read
NUM_CONTROL_TOKENS = 8  # as in every tokenizer of ours: the end of a document, and seven reserved ones


def nucleotide(width: int = 64, num_layers: int = 3) -> ModelConfig:
    """The hero for sequences of bases: one token is one base, so the vocabulary is five characters and the control
    tokens, and the bits per byte of an evaluation are bits per base.
    """
    return miniature(width, num_layers, NUM_CONTROL_TOKENS + len(NUCLEOTIDES))


def snowball() -> ModelConfig:
    """Snowball 67B-A2B (Marin, #6044). Its table gives 67.1 B parameters, 2.01 B active with the gated norms and 2.34 B
    with the head; ours are 67.079 B, 2.011 B and 2.339 B.

    Our reading: rotation of half the head on all layers, no short convolutions, no latent space. Left out: the partial
    key offset of its wide layers, which has no parameters and no counted FLOPs.
    """
    return replace(
        hero_ladder(6144),
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
    """MoE V1 129B-A16B (Marin, #4697). Its table gives 129.1 B parameters and 15.9 B active; ours are 129.18 B, 129.06 B
    without the gated norms, and 15.94 B touched by a token.

    As Snowball, but the whole head is rotated. Every fourth layer sees 4096 keys, the others half (README of its
    recipe). Our reading: the weights of the chosen experts sum to 2.5 as in Snowball.
    """
    return replace(
        snowball(),
        width=5120,
        num_layers=48,
        sequence_length=4096,
        num_heads=40,
        num_kv_heads_local=10,
        num_kv_heads_global=10,
        rope_fraction=1.0,
        num_experts=64,
        expert_width=2560,
        shared_width=5120,
    )


def delphi(width: int) -> ModelConfig:
    """Delphi, Marin's dense suite (#1337): Qwen3-shaped, full multi-head attention, inner width 4d, depth from
    width.

    Raises ValueError when `width` is not a positive multiple of 128.
    """
    _require_multiple("delphi", width, 128)
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


def marin_32b(*, qk_norm: bool = True) -> ModelConfig:
    """Marin 32B. It started as a Llama, `qk_norm=False`; at step 80 000 its loss spiked beyond repair and QK norm was
    switched on (`switch_qk_norm_on`).
    """
    return replace(
        _llama(width=5120, num_layers=64, num_heads=40, num_kv_heads=8),
        dense_width=27_648,
        qk_norm="gain" if qk_norm else "off",
        z_loss_weight=1e-4,
    )


def switch_qk_norm_on(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """A model without QK norm as one with it: gains q_norm, k_norm of 1 [L, H] are added, no other array is touched.

    For a run that must go on: take the parameters of its last good checkpoint, make the optimiser anew for the new tree
    and warm its rates up again (Marin 32B: 1 000 steps). The loss jumps once, because scores lose the scale that the
    norms of queries and keys gave them; a model whose queries and keys have unit rms is left as it was.
    Raises ValueError when the model has QK norm already.
    """
    import jax.numpy as jnp

    if config.qk_norm != "off":
        raise ValueError(f"switch_qk_norm_on: qk_norm is {config.qk_norm!r} already; there is nothing to switch on")
    gains = jnp.ones((config.num_layers, config.head_width), jnp.float32)
    layers = replace(params.layers, q_norm=gains, k_norm=jnp.copy(gains))
    return replace(params, layers=layers), replace(config, qk_norm="gain")


def lengthened(config: ModelConfig, sequence_length: int) -> ModelConfig:
    """The config for a longer context: qk_mult grows by 1 + 0.1 ln(factor), as in the hero's probe at 262 144 tokens
    (Marin, #8754). Local layers keep their window. Without QK norm qk_mult stays: it sharpens normed scores, and those
    of a Llama have a scale of their own. Raises ValueError for a shorter context.
    """
    if sequence_length < config.sequence_length:
        raise ValueError(
            f"lengthened: {sequence_length} is shorter than the context of {config.sequence_length} tokens"
        )
    growth = 1 + 0.1 * math.log(sequence_length / config.sequence_length) if config.qk_norm != "off" else 1.0
    return replace(config, sequence_length=sequence_length, qk_mult=config.qk_mult * growth)


def _llama(*, width: int, num_layers: int, num_heads: int, num_kv_heads: int) -> ModelConfig:
    """A Llama: the hero with every special component switched off. Every layer is global and rotated, so that it sees
    the whole sequence, however long; `window` means nothing here.
    """
    return replace(
        hero_ladder(6144),
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads_local=num_kv_heads,
        num_kv_heads_global=num_kv_heads,
        window=4096,
        global_window=None,
        global_every=1,
        rope_theta=500_000.0,
        rope_fraction=1.0,
        rope_on_global=True,
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


def _require_multiple(family: str, width: int, head_width: int) -> None:
    if width <= 0 or width % head_width:
        lower, upper = width // head_width * head_width, (width // head_width + 1) * head_width
        near = f"{lower} or {upper}" if lower > 0 else f"{head_width} or more"
        raise ValueError(
            f"{family}: width {width} is not a positive multiple of the head width {head_width}; take {near}"
        )


def _ladder_family(width: int) -> Family:
    _, batch_size, num_steps = HERO_LADDER[width]
    assert batch_size is not None
    return Family(name=f"ladder-{width}", config=lambda: hero_ladder(width), batch_size=batch_size, num_steps=num_steps)


def _delphi_family(budget: str, width: int, batch_size: int, num_steps: int) -> Family:
    return Family(
        name=f"delphi-{budget}",
        config=lambda: delphi(width),
        batch_size=batch_size,
        num_steps=num_steps,
        rule="delphi",
        optimizer="adamh",
    )


def _marin_family(config: Callable[[], ModelConfig], batch_size: int, num_steps: int | None, tokens: int) -> Family:
    name = config.__name__.replace("_", "-")
    return Family(
        name=name,
        config=config,
        batch_size=batch_size,
        num_steps=num_steps,
        tokens=tokens,
        rule=None,
        optimizer="adamw",
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        replace(_ladder_family(6144), name="hero", config=hero),
        *(_ladder_family(width) for width in (512, 768, 1024, 1536, 2048)),
        Family(
            name="snowball",
            config=snowball,
            batch_size=8_192,
            num_steps=157_500,
            tokens=(15_000 * 4_096 + 142_500 * 8_192) * 8_192,  # half the batch up to step 15 000
            rule="may",
        ),
        Family(
            name="moe-v1",
            config=moe_v1,
            batch_size=2_048,
            num_steps=None,
            tokens=1_040_000_000_000,
            rule="moe-v1",
            optimizer="adamh",
        ),
        _delphi_family("1e21", 2560, 512, 22_057),
        _delphi_family("1e22", 3840, 1_024, 38_235),
        _delphi_family("1e23", 5376, 2_048, 74_884),
        _marin_family(marin_8b, 4_096, None, 12_750_000_000_000),
        _marin_family(marin_32b, 8_192, 192_000, 6_400_000_000_000),
        Family(name="miniature", config=lambda: miniature(96, 3, 4096), batch_size=4, num_steps=1_348, beta2=0.98),
        Family(name="nucleotide", config=nucleotide, batch_size=8, num_steps=600, beta2=0.98),
    )
}
