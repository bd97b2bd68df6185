"""Hyperparameters across size: from (tokens of the run, width, tokens per batch) to learning rates, epsilon and betas.

A rule is a power law fitted on many small runs and read off at a larger size. It holds only between its clamps: a
clamped rate no longer follows the law, and a ladder that contains one bends without telling. So every rule says which
of its values were clamped, and `require_unclamped` refuses them unless the experiment declares the value itself.

Sources: hero rule of August 2026 (Marin, issues #7856 and #8003); May rule of Snowball (issue #5951); first MoE rule,
for AdamH (issue #4447); Delphi's rule for AdamH (Marin, `completed_adamh`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from noonsight.model.families import FAMILIES, Family

MATRIX_OVER_ADAM = 13 / 3
RATE_CAP = 0.05
BETA2_BOUNDS = (0.95, 0.9999)
DELPHI_REFERENCE_SEQUENCES = 64
DELPHI_REFERENCE_TOKENS = 2.5e9
DELPHI_SEQUENCE_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak values for one run. `clamped` names the fields that left the power law for one of its bounds;
    `beta2_unclipped` is what the law says of beta2.
    """

    adam_lr: float  # embeddings, norms, gates, router
    matrix_lr: float  # MuonH and AdamH matrices
    epsilon: float
    beta1: float
    beta2: float
    momentum: float  # of Muon
    warmup_fraction: float
    min_lr_fraction: float  # of the peak, at the end
    clamped: tuple[str, ...] = ()
    beta2_unclipped: float = math.nan


def hero_rates(num_tokens: int, width: int, batch_tokens: int) -> Rates:
    """Rates of the hero family for `num_tokens` tokens in the whole run and `batch_tokens` tokens per step.

    adam_lr = 0.087571 T^-.3461 d^-.3448 tau^(1/2), matrix_lr = 13/3 of it, both at most 0.05;
    epsilon = 9.676e-18 (T/tau)^(1/2); beta2 = 0.999^(tau/131072) within [0.95, 0.9999].
    """
    _require_positive(num_tokens=num_tokens, width=width, batch_tokens=batch_tokens)
    adam = 0.087571 * num_tokens**-0.3461 * width**-0.3448 * math.sqrt(batch_tokens)
    return _clamp(
        Rates(
            adam_lr=adam,
            matrix_lr=MATRIX_OVER_ADAM * adam,
            epsilon=_moe_epsilon(num_tokens, batch_tokens),
            beta1=0.90,
            beta2=_moe_beta2(batch_tokens),
            momentum=0.95,
            warmup_fraction=0.01,
            min_lr_fraction=0.05,
        ),
        adam_lr=(0.0, RATE_CAP),
        matrix_lr=(0.0, RATE_CAP),
        beta2=BETA2_BOUNDS,
    )


def may_rates(num_tokens: int, width: int, batch_tokens: int) -> Rates:
    """Rates of Snowball: adam_lr = 0.06602 T^-.395 d^-.150 tau^(1/2), beta2 as in `hero_rates`.

    Its epsilon is the constant that its run stated. The formula beside it (#6044) is that of `hero_rates` with a batch
    in tokens where the reference is in rows, so the law itself would say 5.3e-15.
    """
    _require_positive(num_tokens=num_tokens, width=width, batch_tokens=batch_tokens)
    adam = 0.06602 * num_tokens**-0.395 * width**-0.150 * math.sqrt(batch_tokens)
    return _clamp(
        Rates(
            adam_lr=adam,
            matrix_lr=MATRIX_OVER_ADAM * adam,
            epsilon=8.0e-19,
            beta1=0.9062,
            beta2=_moe_beta2(batch_tokens),
            momentum=0.95,
            warmup_fraction=0.01,
            min_lr_fraction=0.05,
        ),
        adam_lr=(0.0, RATE_CAP),
        matrix_lr=(0.0, RATE_CAP),
        beta2=BETA2_BOUNDS,
    )


def moe_v1_rates(num_tokens: int, width: int, batch_tokens: int) -> Rates:
    """Rates of MoE V1 (AdamH on the matrices): adam_lr = 0.025469 T^-.2813 d^-.3678 tau^(1/2), which is published as 1.63
    with the batch in rows of 4096 tokens; matrix_lr 13/3 of it; epsilon and beta2 as in `hero_rates`.

    The warm-up covers the first tenth of the run. Our reading: the rates end at a twentieth of their peak.
    """
    _require_positive(num_tokens=num_tokens, width=width, batch_tokens=batch_tokens)
    adam = 0.025469 * num_tokens**-0.2813 * width**-0.3678 * math.sqrt(batch_tokens)
    return _clamp(
        Rates(
            adam_lr=adam,
            matrix_lr=MATRIX_OVER_ADAM * adam,
            epsilon=_moe_epsilon(num_tokens, batch_tokens),
            beta1=0.9062,
            beta2=_moe_beta2(batch_tokens),
            momentum=0.0,
            warmup_fraction=0.1,
            min_lr_fraction=0.05,
        ),
        adam_lr=(0.0, RATE_CAP),
        matrix_lr=(0.0, RATE_CAP),
        beta2=BETA2_BOUNDS,
    )


def delphi_rates(num_tokens: int, num_sequences: int) -> Rates:
    """Rates of Delphi (AdamH throughout) for a batch of `num_sequences` sequences of 4096 tokens. No width term.

    With b = B/64 and t = T/2.5e9: matrix_lr = .0063 b^(1/2) t^-.3, adam_lr = .000656 (b/t)^(1/2),
    epsilon = 1.85e-8 (t/b)^(1/2), beta2 = .9999^b within [.9, .9999]. Both rates are at most 0.01.
    The decay to 0 covers the last fifth of the run; warm-up covers the first tenth.
    """
    _require_positive(num_tokens=num_tokens, num_sequences=num_sequences)
    batch = num_sequences / DELPHI_REFERENCE_SEQUENCES
    horizon = num_tokens / DELPHI_REFERENCE_TOKENS
    return _clamp(
        Rates(
            adam_lr=0.000656 * math.sqrt(batch / horizon),
            matrix_lr=0.0063 * math.sqrt(batch) * horizon**-0.3,
            epsilon=1.85e-8 * math.sqrt(horizon / batch),
            beta1=0.9,
            beta2=0.9999**batch,
            momentum=0.0,
            warmup_fraction=0.1,
            min_lr_fraction=0.0,
        ),
        adam_lr=(0.0, 0.01),
        matrix_lr=(0.0, 0.01),
        beta2=(0.9, 0.9999),
    )


RULES: dict[str, Callable[[int, int, int], Rates]] = {
    "hero": hero_rates,
    "may": may_rates,
    "moe-v1": moe_v1_rates,
    "delphi": lambda tokens, width, batch_tokens: delphi_rates(tokens, batch_tokens // DELPHI_SEQUENCE_TOKENS),
}
"""Rule by the name that a family gives: (tokens of the run, width, tokens per batch) -> rates."""


def family_rates(family: Family, num_tokens: int) -> Rates:
    """Rates of a family's run of `num_tokens` tokens, with the beta2 that the family states, if it does.

    Raises ValueError when no transfer rule set them.
    """
    if family.rule is None:
        ruled = ", ".join(name for name, each in FAMILIES.items() if each.rule is not None)
        raise ValueError(f"no transfer rule set the rates of {family.name}; the families that have one are {ruled}.")
    config = family.config()
    rates = RULES[family.rule](num_tokens, config.width, family.batch_size * config.sequence_length)
    return rates if family.beta2 is None else declare(rates, beta2=family.beta2)


def declare(rates: Rates, *, beta2: float) -> Rates:
    """The rates with a beta2 that the experiment states itself, which is then no clamped value."""
    return replace(rates, beta2=beta2, clamped=tuple(name for name in rates.clamped if name != "beta2"))


def require_unclamped(rates: Rates, run: str) -> Rates:
    """Returns `rates`. Raises ValueError when a value of `run` sits on a clamp."""
    if rates.clamped:
        values = ", ".join(f"{name} = {getattr(rates, name):g}" for name in rates.clamped)
        raise ValueError(
            f"{run}: {values} is clamped, so this run would not follow the transfer rule and would bend the ladder. "
            "Give it more tokens, more width or a smaller batch; a beta2 may be declared with transfer.declare. A run that is "
            "no rung of a ladder may take the clamped values as its own: optimizer=OptimizerConfig("
            f"adam_lr={rates.adam_lr:.4g}, matrix_lr={rates.matrix_lr:.4g}, beta2={rates.beta2:.4g}, epsilon={rates.epsilon:.3g}), "
            "from noonsight.train.config; with kind='adamw' matrix_lr is not used."
        )
    return rates


def _moe_epsilon(num_tokens: int, batch_tokens: int) -> float:
    """Grows as the root of the number of steps: 1e-15 at 1.4e9 tokens in batches of 131 072."""
    return 9.676e-18 * math.sqrt(num_tokens / batch_tokens)


def _moe_beta2(batch_tokens: int) -> float:
    """A memory that is constant in tokens."""
    return 0.999 ** (batch_tokens / 131072)


def _clamp(rates: Rates, **bounds: tuple[float, float]) -> Rates:
    values = {name: min(max(getattr(rates, name), low), high) for name, (low, high) in bounds.items()}
    clamped = tuple(name for name, value in values.items() if value != getattr(rates, name))
    return replace(rates, **values, clamped=clamped, beta2_unclipped=rates.beta2)


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive to set rates, got {value}")
