"""The rules over one run, and what of a batch they want to know."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from noonsight.logbook.record import Event
from noonsight.train.config import PretrainConfig
from noonsight.train.health.rules import MEMORY, RULES, Look, Row


class Health:
    """What the rules have seen and said."""

    def __init__(self, config: PretrainConfig, *, first_loss: float | None = None) -> None:
        """`first_loss`: the loss of the run's first step, where an earlier attempt made it."""
        self._rows: deque[Row] = deque(maxlen=MEMORY)
        self._look = Look(rows=self._rows, config=config, first_loss=first_loss)
        self._speaking: set[str] = set()
        self._measured: set[str] = set()

    def change(self, config: PretrainConfig) -> None:
        """From the next step on the run is as `config` says."""
        self._look.config = config

    def look(
        self, step: int, values: Mapping[str, float], sources: Mapping[str, tuple[float, float]] | None = None
    ) -> list[tuple[str, str]]:
        """(rule, sentence) for every fault that begins at this step. `sources`: source -> (rows of the batch from it, rows
        that the mixture means it to have).
        """
        self._rows.append(Row(step=step, values=dict(values), sources=dict(sources or {})))
        self._measured.update(values)
        if sources:
            self._measured.add("data/share/")
        if self._look.first_loss is None and math.isfinite(values.get("loss", math.nan)):
            self._look.first_loss = values["loss"]
        for name, value in values.items():
            if name.startswith("norm/param/"):
                self._look.first_norms.setdefault(name, value)
        return self._judge("step")

    def evaluated(self, step: int, values: Mapping[str, float]) -> list[tuple[str, str]]:
        """The same for the values of an evaluation after `step` steps."""
        losses = [row.values["loss"] for row in self._rows if "loss" in row.values]
        for name, value in values.items():
            self._look.evaluations.setdefault(name, []).append((step, value, float(np.mean(losses or [math.nan]))))
        self._measured.update(values)
        return self._judge("evaluation")

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

    def _judge(self, after: str) -> list[tuple[str, str]]:
        begun = []
        for rule in RULES:
            if rule.after != after:
                continue
            sentence = rule.find(self._look)
            if sentence and rule.name not in self._speaking:
                begun.append((rule.name, sentence))
            (self._speaking.add if sentence else self._speaking.discard)(rule.name)
        return begun


def measure_batch(batch: Any) -> dict[str, float]:
    """What the rules want to know of a batch of rows of documents (`tokens.batches.Batch`); {} for any other.

    data/documents: documents that end in it; data/empty_documents: of them, those of nothing but an end (two ends on end);
    data/padding: share of positions that carry no loss.
    """
    if not hasattr(batch, "segments") or not isinstance(batch.segments, np.ndarray):
        return {}
    ends = np.diff(batch.segments, axis=1) == 1  # position t is the end of a document
    return {
        "data/documents": float(ends.sum()),
        "data/empty_documents": float((ends[:, 1:] & ends[:, :-1]).sum()),
        "data/padding": float((batch.weights == 0).mean()),
    }
