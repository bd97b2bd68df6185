"""Verbs of the model: count."""

from __future__ import annotations

import json as json_format
from typing import Any

TABLE_OF_RATES = ("ladder-768", "ladder-1024", "ladder-1536", "ladder-2048", "hero")


def count(family: str, *, steps: int | None = None, rates: bool = False, json: bool = False) -> int:
    """Parameters, FLOPs and rates of a model family in closed form.

    Parameters
    ----------
    family
        Name of the family: hero, ladder-768, snowball, moe-v1, delphi-1e23, marin-8b and so on.
    steps
        Count a run of so many steps of the family's batch instead of the published run.
    rates
        Print the learning rates, epsilon and beta2 that the transfer rule gives; for the hero, of its whole ladder.
    json
        Print JSON for scripts.
    """
    from noonsight.model.count import count_family

    counts = count_family(family, steps=steps)
    if rates:
        names = TABLE_OF_RATES if family == "hero" and steps is None else (family,)
        rows = [_rates(count_family(name, steps=steps)) for name in names]
        print(json_format.dumps({"family": family, "rates": rows}, indent=1) if json else _table(rows))
    else:
        print(json_format.dumps(counts, indent=1) if json else _lines(counts))
    return 0


def _rates(counts: dict[str, Any]) -> dict[str, Any]:
    """One row of the table of rates."""
    from noonsight.model.count.totals import family_named
    from noonsight.scaling.transfer import family_rates

    family = family_named(counts["family"])
    found = family_rates(family, counts["tokens"])
    steps = counts["steps"] or counts["tokens"] // counts["batch_tokens"]
    return {
        "family": family.name,
        "rule": family.rule,
        "width": counts["width"],
        "batch_tokens": counts["batch_tokens"],
        "steps": steps,
        "tokens": counts["tokens"],
        "adam_lr": found.adam_lr,
        "matrix_lr": found.matrix_lr,
        "epsilon": found.epsilon,
        "beta1": found.beta1,
        "beta2": found.beta2,
        "beta2_unclipped": found.beta2_unclipped,
        "warmup_steps": found.num_warmup_steps(steps),
        "clamped": list(found.clamped),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    columns = {
        "family": "{}",
        "tokens": "{:,}",
        "steps": "{:,}",
        "warmup_steps": "{:,}",
        "adam_lr": "{:#.5g}",
        "matrix_lr": "{:#.5g}",
        "epsilon": "{:.4e}",
        "beta2": "{:.5f}",
        "beta2_unclipped": "{:.6f}",
    }
    lines = [list(columns), *([form.format(row[name]) for name, form in columns.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths)) for line in lines)


def _lines(counts: dict[str, Any]) -> str:
    """Totals, then each breakdown with the share of every part."""
    groups = {name: value for name, value in counts.items() if isinstance(value, dict)}
    lines = [_line(name, value) for name, value in counts.items() if name not in groups]
    for name, parts in groups.items():
        lines += ["", name.replace("_", " ")]
        whole = parts.get("executed") or sum(parts.values())
        lines += [f"{_line('  ' + part, value)}  {value / whole:6.1%}" for part, value in parts.items() if value]
    return "\n".join(lines)


def _line(name: str, value: Any) -> str:
    if value is None:
        value = "not published"
    elif isinstance(value, int):
        value = f"{value:,}" if value < 1e16 else f"{value:.5e}"
    return f"{name:26}{value:>26}"
