"""Sentinels: faults that a falling loss hides, as rules that are data.

A rule looks at the last measurements and answers with a sentence when something is wrong. It speaks once when its
fault begins and again only after the fault has gone. Thresholds stand in the rule's text, because a page shows them:
green (never spoke), amber (spoke), red (still speaking at the end), unmeasured (what it looks at was never there:
a dense model has no experts, and silence about them is no good news).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from noonsight.logbook.record import Event
from noonsight.train.config import PretrainConfig
from noonsight.train.schedule import share_of_peak

WINDOW = 50
"""Steps that a rule can look back on."""

Rows = Sequence[dict[str, float]]  # oldest first; the last is the step at hand, with its number under "step"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One sentinel: `find` returns a sentence, or None when all is well or it cannot tell yet."""

    name: str
    text: str
    needs: str  # what it looks at: the beginning of a metric's name
    find: Callable[[Rows, PretrainConfig], str | None]


class Health:
    """The rules over one run."""

    def __init__(self, config: PretrainConfig) -> None:
        self._config = config
        self._rows: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._speaking: set[str] = set()
        self._measured: set[str] = set()

    def change(self, config: PretrainConfig) -> None:
        """From the next step on the run is as `config` says."""
        self._config = config

    def look(self, step: int, values: dict[str, float]) -> list[tuple[str, str]]:
        """(rule, sentence) for every fault that begins at this step."""
        self._rows.append({**values, "step": step})
        self._measured.update(values)
        rows, begun = list(self._rows), []
        for rule in RULES:
            sentence = rule.find(rows, self._config)
            if sentence and rule.name not in self._speaking:
                begun.append((rule.name, sentence))
            (self._speaking.add if sentence else self._speaking.discard)(rule.name)
        return begun

    def table(self, events: Sequence[Event]) -> dict[str, Any]:
        """The rules and what they found, in the events of all attempts, as a table of the logbook."""
        rows = []
        for rule in RULES:
            found = [event.step for event in events if event.kind == "sentinel" and event.cause == rule.name]
            steps = sorted({step for step in found if step is not None})
            seen = any(name.startswith(rule.needs) for name in self._measured)
            state = "red" if rule.name in self._speaking else "amber" if steps else "green" if seen else "unmeasured"
            value = f"{len(steps)} times, first at step {steps[0]}" if steps else "never" if seen else "not measured"
            rows.append([rule.name, rule.text, state, value])
        return {
            "title": "Sentinels",
            "columns": ["name", "rule", "state", "value"],
            "rows": rows,
            "text": "Checked after every step. Green: never broken. Amber: broken for a while. Red: broken at the end.",
        }


def _non_finite(rows: Rows, config: PretrainConfig) -> str | None:
    bad = [name for name, value in rows[-1].items() if not math.isfinite(value)]
    return f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not a finite number." if bad else None


def _starved_expert(rows: Rows, config: PretrainConfig) -> str | None:
    loads = [row["router/load_min_over_mean"] for row in rows if "router/load_min_over_mean" in row]
    if len(loads) < WINDOW or max(loads) >= 0.05:
        return None
    return f"The idlest expert got at most {max(loads):.1%} of its fair share of tokens for {WINDOW} steps."


def _gradient_jump(rows: Rows, config: PretrainConfig) -> str | None:
    norms = [row["norm/grad"] for row in rows]
    if len(norms) < 20:
        return None
    usual = statistics.median(norms[:-1])
    return f"The gradient norm is {norms[-1]:.3g}, usually {usual:.3g}." if norms[-1] > 10 * usual else None


def _rate_off_schedule(rows: Rows, config: PretrainConfig) -> str | None:
    share = float(share_of_peak(config.optimizer, config.schedule_steps, int(rows[-1]["step"])))
    for name, value in rows[-1].items():
        if name.startswith("rate/"):
            peak = config.optimizer.peak(name[5:])
            if abs(value - peak * share) > 1e-5 * peak:
                return f"The rate of {name[5:]} is {value:.4g}, the schedule says {peak * share:.4g}."
    return None


def _nothing_moves(rows: Rows, config: PretrainConfig) -> str | None:
    row = rows[-1]
    groups = [name[5:] for name, value in row.items() if name.startswith("rate/") and value > 0]
    still = [group for group in groups if 0 in (row.get(f"norm/grad/{group}"), row.get(f"ratio/update/{group}"))]
    return f"The parameters of {', '.join(still)} did not change although their rate is not 0." if still else None


RULES: tuple[Rule, ...] = (
    Rule(name="non-finite", text="Every measurement is a finite number.", needs="", find=_non_finite),
    Rule(
        name="starved-expert",
        text=f"The idlest expert of the worst layer is not below 5 % of the mean load for {WINDOW} steps on end.",
        needs="router/load_min_over_mean",
        find=_starved_expert,
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
        name="nothing-moves",
        text="Every group has a gradient, and the Adam group changes, whenever the rate is not 0.",
        needs="ratio/update/",
        find=_nothing_moves,
    ),
)
