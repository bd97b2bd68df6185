"""FLOPs in closed form: two per multiply-add of a matrix product.

The convention of published figures (Marin, #8435): spans of attention in full (no halving for causality), three per
score for the softmax; convolutions, gates and gated norms are not counted; training costs three forwards,
recomputation is not credited. `step_flops` takes that figure apart into what serves the loss, what a mask hides and
what padding wastes, and sets beside it what the convention leaves out: recomputation and the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from noonsight.model.config import ModelConfig
from noonsight.model.count.parameters import expert_parameters, matrix_stacks, parameters_by_part

NEWTON_SCHULZ_ITERATIONS = 5
# Elementwise operations for one parameter, each with the addition of the update to it.
ADAM = 14  # two moments 3 + 4, their bias 2, root, epsilon, division, rate and addition
ADAMW = ADAM + 2  # decay and its addition
HYPERBALL = 10  # three sums (both norms, inner product) 6, the update from weight and direction 3, its addition
MUON_MOMENTUM = 7  # momentum 2, Nesterov 2, norm 2, division
MUON = 3  # the factor of the shape, rate and addition

OptimizerKind = Literal["muonh", "adamh", "adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of one optimiser step, part by part. `useful + attention_mask + padding` is the published figure."""

    useful: int  # forward and backward of tokens that count, on keys they see
    attention_mask: int  # counted by span, but hidden by causality, window or the end of a document
    padding: int  # positions that hold no token
    recompute: int  # forward again, for the backward pass
    optimizer: int

    @property
    def model(self) -> int:
        """Three forwards of every position: what a utilisation is measured by."""
        return self.useful + self.attention_mask + self.padding

    @property
    def executed(self) -> int:
        """All five parts. A kernel that skips blocks which the mask hides does less."""
        return self.model + self.recompute + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """How fast a run is. `mfu` is the share of the devices' peak that three forwards account for."""

    tokens_per_s: float
    device_flops_per_s: float
    mfu: float


def forward_flops(config: ModelConfig, *, num_global: int | None = None) -> dict[str, int]:
    """FLOPs of one token's forward pass by part.

    `num_global` replaces the config's number of global layers: published tables take `num_layers // 4` for the 22
    layers of d2048, where the layers themselves give 6.
    """
    d, layers = config.width, config.num_layers
    query = config.num_heads * config.head_width
    num_wide = sum(config.is_global(layer) for layer in range(layers)) if num_global is None else num_global
    kinds = (
        (layers - num_wide, config.num_kv_heads_local, min(config.window, config.sequence_length)),
        (
            num_wide,
            config.num_kv_heads_global,
            min(config.global_window or config.sequence_length, config.sequence_length),
        ),
    )
    parts = parameters_by_part(config)
    chosen = config.num_experts_per_token * expert_parameters(config) if config.is_moe else 0
    key_value = sum(number * 2 * kv_heads * config.head_width for number, kv_heads, _ in kinds)
    keys = sum(number * span for number, _, span in kinds)
    return {
        "projections": 2 * d * (2 * layers * query + key_value),
        "scores": 4 * query * keys,
        "softmax": 3 * config.num_heads * keys,
        "router": 2 * layers * d * config.num_experts,
        "latent": 2 * parts["latent"],
        "experts": 2 * layers * chosen,
        "shared_experts": 2 * parts["shared_experts"],
        "dense": 2 * parts["dense"],
        "head": 2 * d * config.vocab_size,
    }


def step_flops(
    config: ModelConfig,
    batch_size: int,
    *,
    padding_share: float = 0.0,
    document_tokens: int | None = None,
    optimizer: OptimizerKind = "muonh",
) -> StepFlops:
    """FLOPs of a step of `batch_size` rows, of whose positions `padding_share` hold no token.

    Documents of `document_tokens` tokens follow each other in a row and see only themselves; None: a row is one
    document. Raises ValueError for a share outside [0, 1) or a length below 1.
    """
    if not 0 <= padding_share < 1:
        raise ValueError(f"step_flops: padding_share is {padding_share}; it is a share of the positions, 0 up to 1")
    if document_tokens is not None and document_tokens < 1:
        raise ValueError(f"step_flops: document_tokens is {document_tokens}; a document has at least one token")
    parts = forward_flops(config)
    positions = batch_size * config.sequence_length
    model = 3 * sum(parts.values()) * positions
    padding = round(model * padding_share)
    per_score = 4 * config.num_heads * config.head_width + 3 * config.num_heads
    hidden = 3 * batch_size * per_score * hidden_keys(config, document_tokens)
    mask = round(hidden * (1 - padding_share))
    return StepFlops(
        useful=model - padding - mask,
        attention_mask=mask,
        padding=padding,
        recompute=recompute_flops(config) * positions,
        optimizer=optimizer_flops(config, optimizer),
    )


def recompute_flops(config: ModelConfig) -> int:
    """FLOPs of one token that the backward pass repeats.

    Always the products of queries and keys, which attention never stores; where the config recomputes blocks, the
    layers' whole forward beside them (an upper bound: a compiler leaves out products that no gradient needs).
    """
    parts = forward_flops(config)
    layers = sum(parts.values()) - parts["head"]
    return parts["scores"] // 2 + (0 if config.remat == "none" else layers)


def hidden_keys(config: ModelConfig, document_tokens: int | None = None) -> int:
    """Keys of one row, summed over layers and queries, that lie in the counted spans and that no query sees."""
    length = config.sequence_length
    document = min(document_tokens or length, length)
    whole, rest = divmod(length, document)
    spans = [config.span(layer) for layer in range(config.num_layers)]
    return sum(span * length - whole * visible_keys(document, span) - visible_keys(rest, span) for span in spans)


def visible_keys(length: int, span: int) -> int:
    """Keys that the queries of a document see together: min(t + 1, span) at position t."""
    near = min(length, span)
    return near * (near + 1) // 2 + (length - near) * span


def optimizer_flops(config: ModelConfig, kind: OptimizerKind = "muonh") -> int:
    """FLOPs of one update of all parameters.

    muonh: Newton-Schulz for each matrix, AdamH for the head, Adam for the rest; adamh: AdamH for matrices and head;
    muon: Newton-Schulz for each matrix, Adam for the rest; adamw: the same for all. Raises ValueError for another kind.
    """
    if kind not in get_args(OptimizerKind):
        raise ValueError(f"optimizer_flops: no optimiser {kind!r}; choose one of {', '.join(get_args(OptimizerKind))}")
    parts = parameters_by_part(config)
    total = sum(parts.values())
    stacks = matrix_stacks(config).values()
    turned = sum(number * rows * columns for number, rows, columns in stacks)
    if kind == "adamw":
        return ADAMW * total
    adam = ADAM * (total - turned)
    adam_and_head = adam + (HYPERBALL - 2) * parts["head"]  # the hyperball has Adam's last two in itself
    if kind == "adamh":
        return adam_and_head + (ADAM + HYPERBALL - 2) * turned
    matrices = MUON_MOMENTUM * turned + sum(number * newton_schulz_flops(*shape) for number, *shape in stacks)
    return adam + MUON * turned + matrices if kind == "muon" else adam_and_head + HYPERBALL * turned + matrices


def newton_schulz_flops(rows: int, columns: int) -> int:
    """FLOPs of the five iterations on one matrix, laid on its side if it is tall: r rows, c >= r columns.

    Each forms X X' (2 r^2 c), its square (2 r^3) and their product with X (2 r^2 c), plus 3 r^2 + 2 r c sums. A
    symmetric product that computes one triangle would halve the first two.
    """
    r, c = sorted((rows, columns))
    return NEWTON_SCHULZ_ITERATIONS * (4 * r * r * c + 2 * r**3 + 3 * r * r + 2 * r * c)


def utilisation(
    config: ModelConfig, *, batch_tokens: int, step_s: float, num_devices: int, peak_flops_per_s: float
) -> Utilisation:
    """Tokens and FLOPs per second of a run whose steps of `batch_tokens` take `step_s` seconds."""
    tokens_per_s = batch_tokens / step_s
    each = 3 * sum(forward_flops(config).values()) * tokens_per_s / num_devices
    return Utilisation(tokens_per_s=tokens_per_s, device_flops_per_s=each, mfu=each / peak_flops_per_s)
