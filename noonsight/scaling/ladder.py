"""Ladders: the fixed tables of rungs, and what is wrong with a ladder before it is run.

A rung is a complete small run of the same family as the target. Its sizes are literals: they never depend on the clock
or the machine, or the forecast would not be reproducible. `problems` says in words why a ladder would mislead: rates
on a clamp, too few steps, more than one pass over the data, or a target too far outside the rungs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from noonsight.model.families import FAMILIES
from noonsight.scaling.fit import isoflop_optimum
from noonsight.scaling.transfer import Rates, hero_rates

MIN_STEPS = 150
FURTHEST_TOKENS = 4.0  # target's tokens over the longest rung's
HERO_TOKENS_PER_ACTIVE_PARAMETER = 791


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One run of a ladder. `num_tokens` is a whole number of steps of `batch_size` x `sequence_length` tokens."""

    name: str
    width: int
    num_layers: int
    num_steps: int
    batch_size: int  # sequences per step
    sequence_length: int
    seed: int = 0

    @property
    def batch_tokens(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def num_tokens(self) -> int:
        return self.num_steps * self.batch_tokens


def published(family: str, name: str) -> Rung:
    """The published run of a family as a rung called `name`. Raises ValueError where its steps were not published."""
    run = FAMILIES[family]
    if run.num_steps is None:
        raise ValueError(f"the run of {family} was published without its number of steps, so it is no rung")
    config = run.config()
    return Rung(
        name=name,
        width=config.width,
        num_layers=config.num_layers,
        num_steps=run.num_steps,
        batch_size=run.batch_size,
        sequence_length=config.sequence_length,
    )


MINIATURE_TARGET = published("miniature", "target")


def _miniature(name: str, width: int, num_layers: int, num_steps: int) -> Rung:
    return replace(MINIATURE_TARGET, name=name, width=width, num_layers=num_layers, num_steps=num_steps)


# Three widths, each with a short and a long run, so that the effects of parameters and of tokens can be told apart. The long
# runs cost an eighth of the target each; the short ones have enough tokens to keep the matrix rate below its cap.
MINIATURE = (
    _miniature("d32_short", 32, 2, 250),
    _miniature("d48_short", 48, 2, 180),
    _miniature("d64_short", 64, 2, 166),
    _miniature("d32", 32, 2, 690),
    _miniature("d48", 48, 2, 440),
    _miniature("d64", 64, 2, 315),
)

# Width 512 has a published run too, but only as a replica on other machines (Marin, #8673): it is no rung of this ladder.
HERO = tuple(published(f"ladder-{width}", f"d{width}") for width in (768, 1024, 1536, 2048))
HERO_TARGET = published("hero", "d6144")


def hero_num_steps(active_parameters: int, batch_tokens: int) -> int:
    """Steps of a hero rung: 791 tokens per active parameter, rounded to whole steps (Marin, issue #8435)."""
    return round(HERO_TOKENS_PER_ACTIVE_PARAMETER * active_parameters / batch_tokens)


def problems(
    rungs: Sequence[Rung],
    target: Rung,
    *,
    unique_tokens: int | None = None,
    min_steps: int = MIN_STEPS,
    rates: Callable[[int, int, int], Rates] = hero_rates,
    declared: Sequence[str] = (),
) -> list[str]:
    """What is wrong with a ladder, one sentence each; empty when nothing is.

    `unique_tokens` is the training set's size (None: not checked); `declared` names rates that the experiment states
    itself (for instance beta2), so that their clamps do not count.
    """
    found = []
    for rung in (*rungs, target):
        if rung.num_steps < min_steps:
            found.append(f"{rung.name}: {rung.num_steps} steps are too few (at least {min_steps}); shrink the batch")
        if unique_tokens is not None and rung.num_tokens > unique_tokens:
            passes = rung.num_tokens / unique_tokens
            found.append(f"{rung.name}: {passes:.2f} passes over {unique_tokens:,} tokens; repeated text bends the law")
        clamped = [n for n in rates(rung.num_tokens, rung.width, rung.batch_tokens).clamped if n not in declared]
        if clamped:
            found.append(f"{rung.name}: {', '.join(clamped)} is clamped, so the run would not follow the transfer rule")
    if len(rungs) < 3:
        found.append(f"{len(rungs)} rungs cannot carry a forecast; at least three")
    if len({rung.name for rung in rungs}) < len(rungs):
        found.append("two rungs share a name")
    found += _extrapolation(rungs, target)
    return found


def edge_problems(budgets: Mapping[float, Sequence[tuple[float, float]]]) -> list[str]:
    """Which budgets of a measured isoFLOP grid (FLOPs -> (tokens, loss) of its runs) do not hold their optimum."""
    found = []
    for budget, runs in sorted(budgets.items()):
        try:
            isoflop_optimum([tokens for tokens, _ in runs], [loss for _, loss in runs])
        except ValueError as error:
            found.append(f"budget {budget:.2g} FLOPs: {error}")
    return found


def _extrapolation(rungs: Sequence[Rung], target: Rung) -> list[str]:
    if not rungs:
        return []
    found = []
    longest = max(rung.num_tokens for rung in rungs)
    if target.num_tokens > FURTHEST_TOKENS * longest * 1.02:
        found.append(
            f"{target.name}: {target.num_tokens / longest:.1f} x the tokens of the longest rung; "
            f"a ladder of this kind was checked up to {FURTHEST_TOKENS:g} x"
        )
    if len({rung.num_tokens for rung in rungs}) == 1 and target.num_tokens != longest:
        found.append("all rungs have the same tokens, so nothing says what more tokens bring: vary them")
    if len({rung.width for rung in rungs}) == 1 and target.width != rungs[0].width:
        found.append("all rungs have the same width, so nothing says what more width brings: vary it")
    return found
