"""The rules, each with its threshold, and what they look at. Sources of the faults: Marin #8818 (gates, frozen experts),
#8073 and #9148 (norms), torchtitan #3863, and the failure register of the public run (F22, F23).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from noonsight.train.config import PretrainConfig
from noonsight.train.schedule import share_of_peak

WINDOW = 50
"""Steps that most rules look back on: a fault is told within as many."""
MEMORY = 500
"""Steps that are remembered, to know what is usual."""
SPIKE_Z, SPIKE_RISE, SPIKE_STEPS = 8.0, 0.2, 2
"""A loss is a spike at 8 robust standard deviations and a fifth above the median. The step and the one before it are
passed over: either may have done it."""
KEPT_NORM = 1e-3  # hyperball groups keep their norm to 1e-5 in a thousand steps; a hundred times that is a fault
LARGEST_BIAS = 20.0  # router scores are of order 1: the tokens do not choose any more
LARGEST_UPDATE = 0.5  # of the size of the group, in one step
SHUT = 0.1  # of an open gate's 1
MOST_DROPS = 0.05
EVAL_RISE = 0.01


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurements of one step."""

    step: int
    values: dict[str, float]
    sources: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Look:
    """What a rule may look at."""

    rows: Sequence[Row]  # oldest first; the last is the step at hand
    config: PretrainConfig
    first_loss: float | None = None
    first_norms: dict[str, float] = field(default_factory=dict)  # norm/param/GROUP -> what this attempt began with
    evaluations: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)  # (step, value, train loss)

    @property
    def values(self) -> dict[str, float]:
        """The measurements of the step at hand."""
        return self.rows[-1].values

    def last(self, name: str, count: int = WINDOW) -> list[float]:
        """The values of one measurement in the last `count` steps, oldest first."""
        return [row.values[name] for row in list(self.rows)[-count:] if name in row.values]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One sentinel: `find` returns a sentence, or None when all is well or it cannot tell yet."""

    name: str
    text: str
    needs: str  # what it looks at: the beginning of a metric's name
    find: Callable[[Look], str | None]
    after: Literal["step", "evaluation"] = "step"


def spike(losses: Sequence[float]) -> float | None:
    """How many robust standard deviations (1.4826 x median absolute deviation) the last of `losses` lies above the median
    of those before it, where that is a spike: more than SPIKE_Z of them and SPIKE_RISE of the median. None otherwise, and
    with fewer than 20 losses before it. Positive losses are compared by their logarithms: one that has come close to zero
    scatters by factors.
    """
    *before, last = losses
    if len(before) < 20 or not math.isfinite(last):
        return None
    risen = last - statistics.median(before) > SPIKE_RISE * abs(statistics.median(before))
    if min(*before, last) > 0:
        before, last = [math.log(loss) for loss in before], math.log(last)
    middle = statistics.median(before)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in before)
    z = (last - middle) / max(spread, 1e-12)
    return z if z > SPIKE_Z and risen else None


def _non_finite(look: Look) -> str | None:
    bad = [name for name, value in look.values.items() if not math.isfinite(value)]
    return f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not a finite number." if bad else None


def _above_start(look: Look) -> str | None:
    losses = look.last("loss", 20)
    if look.first_loss is None or len(losses) < 20 or statistics.median(losses) <= 1.02 * look.first_loss:
        return None
    return (
        f"The loss of the last 20 steps is {statistics.median(losses):.3f}; it began at {look.first_loss:.3f}: the run "
        "has unlearned all it knew. Lower the rates."
    )


def _loss_jump(look: Look) -> str | None:
    z = spike(look.last("loss"))
    return None if z is None else f"The loss is {look.values['loss']:.3f}, {z:.0f} robust deviations above the usual."


def _starved_expert(look: Look) -> str | None:
    loads = look.last("router/load_min_over_mean")
    if len(loads) < WINDOW or max(loads) >= 0.05:
        return None
    return f"The idlest expert got at most {max(loads):.1%} of its fair share of tokens for {WINDOW} steps."


def _frozen_expert(look: Look) -> str | None:
    least, load = (look.last(name, 10) for name in ("router/grad_min_over_mean", "router/load_min_over_mean"))
    if len(least) < 10 or max(least) > 1e-6 or min(load, default=0.0) <= 0:
        return None
    return "An expert that gets tokens has had no gradient for 10 steps: it does not learn."


def _frozen_bias(look: Look) -> str | None:
    if look.config.model.balance != "histogram":
        return None
    low, high = look.last("router/bias_min", 20), look.last("router/bias_max", 20)
    if len(low) < 20 or len({*low}) > 1 or len({*high}) > 1:
        return None
    return (
        f"The routing biases have not moved for 20 steps ({low[-1]:.3g} to {high[-1]:.3g}): nothing balances the load."
    )


def _runaway_bias(look: Look) -> str | None:
    reach = max(abs(look.values.get("router/bias_min", 0.0)), abs(look.values.get("router/bias_max", 0.0)))
    return (
        f"A routing bias has reached {reach:.3g}: the tokens do not choose any more." if reach > LARGEST_BIAS else None
    )


def _shut_gates(look: Look) -> str | None:
    means = look.last("attention/gate_min", 20)
    if len(means) < 20 or max(means) >= SHUT:
        return None
    return f"The attention of a layer is shut: its head gates let through {max(means):.1%} of what open ones do."


def _drops(look: Look) -> str | None:
    rates = look.last("router/drop_rate", 20)
    if look.config.model.capacity_factor is None:
        return f"{rates[-1]:.2%} of the assignments found no room where none may." if rates and rates[-1] > 0 else None
    if len(rates) < 20 or statistics.mean(rates) <= MOST_DROPS:
        return None
    return f"{statistics.mean(rates):.1%} of the assignments found no room in the last 20 steps."


def _gradient_jump(look: Look) -> str | None:
    norms = look.last("norm/grad")
    if len(norms) < 20:
        return None
    usual = statistics.median(norms[:-1])
    return f"The gradient norm is {norms[-1]:.3g}, usually {usual:.3g}." if norms[-1] > 10 * usual else None


def _rate_off_schedule(look: Look) -> str | None:
    told = look.config.optimizer
    share = float(share_of_peak(told, look.config.schedule_steps, look.rows[-1].step))
    for name, value in look.values.items():
        if name.startswith("rate/"):
            peak = told.peak(name[5:])
            if abs(value - peak * share) > 1e-5 * peak:
                return f"The rate of {name[5:]} is {value:.4g}, the schedule says {peak * share:.4g}."
    return None


def _norm_drift(look: Look) -> str | None:
    if look.config.optimizer.kind != "muonh":
        return None
    for group in ("muonh", "adamh"):
        name = f"norm/param/{group}"
        first, now = look.first_norms.get(name), look.values.get(name)
        if first and now and abs(now / first - 1) > KEPT_NORM:
            return f"The norm of the {group} group went from {first:.6g} to {now:.6g}; its update keeps it, to 1e-5."
    return None


def _large_update(look: Look) -> str | None:
    found = [(name, value) for name, value in look.values.items() if name.startswith("ratio/update/")]
    name, value = max(found, key=lambda pair: pair[1], default=("", 0.0))
    return f"One step changed the group {name[13:]} by {value:.0%} of its size." if value > LARGEST_UPDATE else None


def _nothing_moves(look: Look) -> str | None:
    values = look.values
    groups = [name[5:] for name, value in values.items() if name.startswith("rate/") and value > 0]
    still = [group for group in groups if 0 in (values.get(f"norm/grad/{group}"), values.get(f"ratio/update/{group}"))]
    return f"The parameters of {', '.join(still)} did not change although their rate is not 0." if still else None


def _document_ends(look: Look) -> str | None:
    """The ends of the window against the usual, where enough are to be expected to tell."""
    ends = look.last("data/documents", MEMORY)
    now, before = ends[-WINDOW:], ends[:-WINDOW]
    if len(before) < WINDOW or (usual := statistics.mean(before) * len(now)) < 20:
        return None
    if usual / 5 <= sum(now) <= usual * 5:
        return None
    return f"{sum(now):.0f} documents ended in the last {len(now)} steps, usually {usual:.0f}: look at the end tokens."


def _empty_documents(look: Look) -> str | None:
    count = look.values.get("data/empty_documents", 0.0)
    return f"{count:.0f} documents of the batch are nothing but an end token: two ends on end." if count else None


def _missing_source(look: Look) -> str | None:
    got: dict[str, float] = {}
    meant: dict[str, float] = {}
    for row in list(look.rows)[-WINDOW:]:
        for name, (rows, expected) in row.sources.items():
            got[name], meant[name] = got.get(name, 0.0) + rows, meant.get(name, 0.0) + expected
    for name, expected in meant.items():
        if expected >= 20 and got[name] < expected / 4:
            return f"{name} gave {got[name]:.0f} rows of the last {WINDOW} steps; the mixture means it to give {expected:.0f}."
    return None


def _eval_not_finite(look: Look) -> str | None:
    bad = [name for name, found in look.evaluations.items() if not math.isfinite(found[-1][1])]
    return f"The evaluation gave no finite number for {', '.join(bad)}." if bad else None


def _eval_gap(look: Look) -> str | None:
    for name, found in look.evaluations.items():
        step, value, train = found[-1]
        best_step, best, train_then = min(found, key=lambda each: each[1])
        if value > (1 + EVAL_RISE) * best and train < train_then:
            return (
                f"{name} rose from {best:.4f} (step {best_step}) to {value:.4f} (step {step}) while the training loss fell: "
                "the run learns its data by heart."
            )
    return None


RULES: tuple[Rule, ...] = (
    Rule(name="non-finite", text="Every measurement is a finite number.", needs="", find=_non_finite),
    Rule(
        name="above-start",
        text="The median loss of 20 steps is not more than 2 % above the loss of the first step.",
        needs="loss",
        find=_above_start,
    ),
    Rule(
        name="loss-jump",
        text=f"No loss lies {SPIKE_Z:.0f} robust deviations and {SPIKE_RISE:.0%} above the median of the last {WINDOW}.",
        needs="loss",
        find=_loss_jump,
    ),
    Rule(
        name="starved-expert",
        text=f"The idlest expert of the worst layer is not below 5 % of the mean load for {WINDOW} steps on end.",
        needs="router/load_min_over_mean",
        find=_starved_expert,
    ),
    Rule(
        name="frozen-expert",
        text="No expert that gets tokens is without gradient for 10 steps on end (a millionth of its layer's mean).",
        needs="router/grad_min_over_mean",
        find=_frozen_expert,
    ),
    Rule(
        name="frozen-bias",
        text="Where the load is balanced, the routing biases move within 20 steps.",
        needs="router/bias_min",
        find=_frozen_bias,
    ),
    Rule(
        name="runaway-bias",
        text=f"No routing bias goes beyond {LARGEST_BIAS:.0f}, some twenty times the spread of the scores.",
        needs="router/bias_max",
        find=_runaway_bias,
    ),
    Rule(
        name="shut-gates",
        text=f"No layer's head gates average below {SHUT:.0%} of open for 20 steps on end.",
        needs="attention/gate_min",
        find=_shut_gates,
    ),
    Rule(
        name="drops",
        text=f"The mean drop rate of 20 steps is at most {MOST_DROPS:.0%}; without a capacity nothing is dropped.",
        needs="router/drop_rate",
        find=_drops,
    ),
    Rule(
        name="gradient-jump",
        text=f"The gradient norm is at most 10 times the median of the last {WINDOW} steps (told from step 20 on).",
        needs="norm/grad",
        find=_gradient_jump,
    ),
    Rule(
        name="rate-off-schedule",
        text="The learning rate of every group equals the schedule, to 1e-5 of its peak.",
        needs="rate/",
        find=_rate_off_schedule,
    ),
    Rule(
        name="norm-drift",
        text=f"Groups whose update keeps their norm (muonh, adamh) keep it to {KEPT_NORM:g}.",
        needs="norm/param/muonh",
        find=_norm_drift,
    ),
    Rule(
        name="large-update",
        text=f"No step changes the Adam group by more than {LARGEST_UPDATE:.0%} of its size.",
        needs="ratio/update/",
        find=_large_update,
    ),
    Rule(
        name="nothing-moves",
        text="Every group has a gradient, and the Adam group changes, whenever the rate is not 0.",
        needs="ratio/update/",
        find=_nothing_moves,
    ),
    Rule(
        name="document-ends",
        text=f"As many documents end in {WINDOW} steps as usual, within a factor of 5 (told where that is 20 or more).",
        needs="data/documents",
        find=_document_ends,
    ),
    Rule(
        name="empty-documents",
        text="No document is nothing but an end token.",
        needs="data/empty_documents",
        find=_empty_documents,
    ),
    Rule(
        name="missing-source",
        text=f"Every source gives at least a quarter of the rows that the mixture means it to give in {WINDOW} steps.",
        needs="data/share/",
        find=_missing_source,
    ),
    Rule(
        name="eval-not-finite",
        text="Every evaluation gives finite numbers.",
        needs="eval/",
        find=_eval_not_finite,
        after="evaluation",
    ),
    Rule(
        name="eval-gap",
        text=f"Held-out loss is not {EVAL_RISE:.0%} above its best while the training loss is below what it was then.",
        needs="eval/",
        find=_eval_gap,
        after="evaluation",
    ),
)
