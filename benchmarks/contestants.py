"""Who competes: every contestant as a `ModelConfig` of equal active FLOPs, an environment and its options.

A peer is described by our config too, so that one formula (`noonsight.model.count`) counts everybody, and so that its
own number of parameters can be checked against the count: a peer of another shape is found out.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from noonsight.model.config import ModelConfig
from noonsight.model.count import count
from noonsight.model.families import hero_kv_heads, hero_ladder
from noonsight.model.native.build import SETTING

HOUSE = Path(__file__).resolve().parents[1]
Side = Literal["ours", "torch", "levanter"]
MODULES: dict[Side, str] = {
    "ours": "benchmarks.ours",
    "torch": "benchmarks.torch_peer",
    "levanter": "benchmarks.levanter_peer",
}
TORCH_NUMERICS = {  # what torch calls it -> how our names end
    "float32": "f32",
    "bfloat16": "bf16",
    "bfloat16-matmul": "bf16mm",
    "bfloat16-weights": "bf16weights",
}
REFERENCE = "ours-moe-bf16"
EQUAL_WITHIN = 0.01  # active FLOPs and parameters of one shape agree to this share


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A size at which everybody competes. Widths in channels, lengths in tokens."""

    name: str
    width: int
    num_layers: int = 6
    vocab_size: int = 8192
    sequence_length: int = 256
    batch_size: int = 8
    num_experts: int = 16
    head_width: int = 64
    rate: float = 1e-3


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="d256", width=256),
        Shape(name="d512", width=512),
        Shape(
            name="tiny", width=64, num_layers=2, vocab_size=512, sequence_length=32, batch_size=4, num_experts=8,
            head_width=16, rate=3e-3,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One row of the table: what is trained, by whom, how."""

    name: str
    side: Side
    config: ModelConfig
    says: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def train_flops_per_token(self) -> int:
        """Useful FLOPs of forward and backward, by the one formula."""
        return count(self.config).train_flops(1)

    def job(self, shape: Shape, seed: int) -> dict[str, Any]:
        """What its worker must know."""
        batches = {
            "vocab_size": shape.vocab_size,
            "batch_size": shape.batch_size,
            "sequence_length": shape.sequence_length,
            "seed": seed,
        }
        return {
            "config": asdict(self.config), "options": self.options, "batches": batches, "seed": seed, "rate": shape.rate
        }  # fmt: skip


def contestants(shape: Shape, cpu_flags: set[str]) -> list[Contestant]:
    """Everybody at `shape`, the reference first. Raises ValueError when one of them has other FLOPs than the rest."""
    found = [*_ours(shape), *_torch(shape), *_levanter(shape), *_without_kernels(shape, cpu_flags)]
    target = count(plain_moe(shape)).train_flops(1)
    for contestant in found:
        apart = contestant.train_flops_per_token / target - 1
        if abs(apart) > EQUAL_WITHIN:
            raise ValueError(
                f"contestants: {contestant.name} at {shape.name} has {apart:+.1%} of the FLOPs per token of the plain "
                f"mixture; at most {EQUAL_WITHIN:.0%} apart counts as equal work. Change a width"
            )
    return found


def plain_moe(shape: Shape) -> ModelConfig:
    """The mixture that all peers can express: top-2 of 16 and a shared expert, full rotation and attention, QK gains."""
    d, heads = shape.width, shape.width // shape.head_width
    return replace(
        hero_ladder(6144),
        vocab_size=shape.vocab_size,
        width=d,
        num_layers=shape.num_layers,
        sequence_length=shape.sequence_length,
        num_heads=heads,
        num_kv_heads_local=heads,
        num_kv_heads_global=heads,
        head_width=shape.head_width,
        window=shape.sequence_length,
        global_every=None,
        rope_fraction=1.0,
        rope_on_global=True,
        qk_norm="gain",
        qk_mult=1.0,
        exclusive_attention=False,
        head_gate=False,
        gated_norm_rank=0,
        sconv_kernel=0,
        num_experts=shape.num_experts,
        num_experts_per_token=2,
        expert_width=d,
        latent_width=0,
        num_shared_experts=1,
        shared_width=d,
        remat="none",  # as the peers
        **_numerics("f32"),
    )


def dense(shape: Shape) -> ModelConfig:
    """A dense model of equal active FLOPs: the same attention, one MLP as wide as the active experts together."""
    return replace(
        plain_moe(shape),
        num_experts=0,
        num_experts_per_token=0,
        expert_width=0,
        num_shared_experts=0,
        shared_width=0,
        balance="none",
        dense_width=3 * shape.width,
    )


def qwen3_moe(shape: Shape) -> ModelConfig:
    """What Qwen3-MoE computes: it has no shared expert, so top-3 is equal work."""
    return replace(plain_moe(shape), num_experts_per_token=3, num_shared_experts=0, shared_width=0)


@functools.cache
def hero_moe(shape: Shape) -> ModelConfig:
    """The whole hero at this size: 4 x the experts, half as wide and in a latent space, top-8, two shared ones, windows,
    gates, convolutions. Its inner widths (about width / 2) are searched for the FLOPs of the plain mixture.
    """
    heads, half = shape.width // shape.head_width, shape.width // 2
    local, global_ = hero_kv_heads(heads)
    target = count(plain_moe(shape)).forward_flops_per_token

    def at(expert_width: int, shared_width: int) -> ModelConfig:
        return replace(
            hero_ladder(6144),
            vocab_size=shape.vocab_size,
            width=shape.width,
            num_layers=shape.num_layers,
            sequence_length=shape.sequence_length,
            num_heads=heads,
            num_kv_heads_local=local,
            num_kv_heads_global=global_,
            head_width=shape.head_width,
            window=shape.sequence_length // 2,
            gated_norm_rank=shape.width // 8,
            num_experts=4 * shape.num_experts,
            latent_width=half,
            expert_width=expert_width,
            shared_width=shared_width,
            remat="none",
            **_numerics("f32"),
        )

    step = shape.width // 32
    around = [half + step * i for i in range(-6, 9) if half + step * i > 0]
    pairs = [at(expert, shared) for expert in around for shared in around]
    return min(
        pairs,
        key=lambda config: (
            round(abs(count(config).forward_flops_per_token / target - 1), 3),
            abs(config.expert_width - config.shared_width),
        ),
    )


def _ours(shape: Shape) -> list[Contestant]:
    made = []
    for name, config, numerics, optimizer, says in (
        (REFERENCE, plain_moe(shape), "bf16", "adamw", "ours, the peers' architecture"),
        ("ours-moe-bf16-remat", replace(plain_moe(shape), remat="block"), "bf16", "adamw", "ours, blocks recomputed"),
        ("ours-moe-f32", plain_moe(shape), "f32", "adamw", "ours, the peers' architecture"),
        ("ours-moe-bf16-muonh", plain_moe(shape), "bf16", "muonh", "ours, MuonH instead of AdamW"),
        ("ours-hero-bf16", hero_moe(shape), "bf16", "adamw", "ours, all of the hero's components"),
        ("ours-hero-bf16-muonh", hero_moe(shape), "bf16", "muonh", "ours, the hero's architecture and recipe"),
        ("ours-dense-bf16", dense(shape), "bf16", "adamw", "ours, dense"),
        ("ours-dense-f32", dense(shape), "f32", "adamw", "ours, dense"),
    ):
        numbers = replace(config, **_numerics(numerics))
        made.append(_our_contestant(name, numbers, says, optimizer=optimizer))
    return made


def _our_contestant(
    name: str, config: ModelConfig, says: str, *, optimizer: str = "adamw", environment: dict[str, str] | None = None
) -> Contestant:
    options = {"optimizer": optimizer}
    return Contestant(name=name, side="ours", config=config, says=says, options=options, environment=environment or {})


def _numerics(name: Literal["f32", "bf16"]) -> dict[str, str]:
    return {"compute_dtype": "float32", "matmul_dtype": "float32" if name == "f32" else "bfloat16"}


def _torch(shape: Shape) -> list[Contestant]:
    eager = [
        _torch_contestant(shape, numerics, experts)
        for numerics in TORCH_NUMERICS
        for experts in ("eager", "grouped_mm")
        if (numerics, experts) != ("bfloat16-weights", "eager")  # one row is enough for what is nobody's best
    ]
    # compiled, the loop over experts has data-dependent sizes and breaks the graph at each of them: grouped only
    compiled = [_torch_contestant(shape, numerics, "grouped_mm", "default") for numerics in TORCH_NUMERICS]
    return eager + compiled


def _torch_contestant(
    shape: Shape,
    numerics: str,
    experts: str,
    compiled: str = "",
    cap: str = "",
    environment: dict[str, str] | None = None,
) -> Contestant:
    """`cap` ends the name of a contestant whose `environment` caps the instructions."""
    parts = ["torch", "compile" if compiled else "eager", TORCH_NUMERICS[numerics], experts.removesuffix("_mm"), cap]
    return Contestant(
        name="-".join(filter(None, parts)),
        side="torch",
        config=qwen3_moe(shape),
        says=f"transformers Qwen3-MoE, {numerics}, experts {experts}{', torch.compile' if compiled else ''}",
        options={"numerics": numerics, "experts": experts, "compiled": compiled},
        environment=environment or {},
    )


def _levanter(shape: Shape) -> list[Contestant]:
    config = plain_moe(shape)
    return [
        Contestant(
            name=f"levanter-{short}{'-remat' if remat else ''}",
            side="levanter",
            config=replace(config, qk_norm="free"),
            says=f"Levanter Grug parts, wired by us{', checkpointed blocks' if remat else ''}",
            options={"numerics": numerics, "remat": remat},
        )
        for numerics, short in (("float32", "f32"), ("bfloat16", "bf16"))
        for remat in (False, True)
    ]


def _without_kernels(shape: Shape, cpu_flags: set[str]) -> list[Contestant]:
    """Both sides without special units: no C++ kernel on ours, oneDNN capped below AMX, and below AVX-512 bf16.

    XLA finds such units for bf16 products by itself and no flag of it caps that, so where a cap excludes a unit that
    the machine has, our row is the float32 one, which has no use for them.
    """
    made = []
    for suffix, cap, excluded in (("noamx", "AVX512_CORE_BF16", "amx_bf16"), ("avx512", "AVX512_CORE", "avx512_bf16")):
        if suffix == "avx512" and excluded not in cpu_flags:
            continue  # the cap would change nothing
        capped = {"ONEDNN_MAX_CPU_ISA": cap}
        for numerics in ("f32",) if excluded in cpu_flags else ("f32", "bf16"):
            config = replace(plain_moe(shape), **_numerics(numerics))
            environment = {SETTING: "xla", **capped}
            says = f"ours, plain XLA, nothing above {cap}"
            made.append(_our_contestant(f"ours-xla-{numerics}-{suffix}", config, says, environment=environment))
        for numerics in ("float32", "bfloat16", "bfloat16-matmul"):
            made.append(_torch_contestant(shape, numerics, "grouped_mm", cap=suffix, environment=capped))
        made.append(_torch_contestant(shape, "float32", "eager", cap=suffix, environment=capped))
    return made
