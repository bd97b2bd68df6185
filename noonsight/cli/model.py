"""Verbs of the model: count."""

from __future__ import annotations

import json as json_format
from typing import Any

LADDER = ("ladder-768", "ladder-1024", "ladder-1536", "ladder-2048")  # whose rates are shown above the hero's
LABELS = {
    "active_parameters": "what a token uses of attention, MLPs, router",
    "touched_parameters": "all that a token uses, embedding and head too",
}
MARKS = {  # of a value in the table of rates: the key of the row that lists it, and what it means
    "*": ("clamped", "clamped: the transfer rule left its bounds here; what it says of beta2 is beta2_unclipped"),
    "+": ("declared", "declared by the experiment in place of the rule's value"),
    "~": ("computed", "computed from the tokens; the number of steps was not published"),
}


def count(family: str | None = None, *, steps: str | None = None, rates: bool = False, json: bool = False) -> int:
    """Parameters, FLOPs and rates of a model family in closed form; without a family, the list of them.

    Active parameters: the matrices of attention, MLPs and router that one token uses, as published figures count.

    Touched parameters: everything that one token uses, so embedding, head, norms and gates as well.

    Parameters
    ----------
    family
        Name of the family: hero, ladder-768, snowball, moe-v1, delphi-1e23, marin-8b and so on.
    steps
        Count a run of so many steps (a whole number) of the family's batch instead of the published run.
    rates
        Print the learning rates, epsilon and beta2 that the transfer rule gives; for the hero, of its ladder too,
        widths 768 to 2048 (ladder-512 was run on other machines and is asked for by its name).
    json
        Print JSON for scripts.
    """
    from noonsight.model.count import count_family
    from noonsight.model.families import FAMILIES

    if family is None:
        if steps is not None or rates:
            raise ValueError(f"count: --steps and --rates need a family. The families are {', '.join(FAMILIES)}.")
        rows = [count_family(name) for name in FAMILIES]
        print(json_format.dumps(rows, indent=1) if json else _overview(rows))
        return 0
    counts = count_family(family, steps=_whole_number(steps))
    if rates:
        above = map(count_family, LADDER) if family == "hero" else ()
        rows = [_rates(each) for each in (*above, counts)]
        print(json_format.dumps({"family": family, "rates": rows}, indent=1) if json else _table(rows))
    else:
        print(json_format.dumps(counts, indent=1) if json else _lines(counts))
    return 0


def _whole_number(steps: str | None) -> int | None:
    """`--steps` as it was typed, because a parser of numbers would round 1.5 without a word."""
    try:
        return None if steps is None else int(steps)
    except ValueError:
        raise ValueError(f"count: --steps {steps} is no whole number; give 1 or more, such as 390139.") from None


def _rates(counts: dict[str, Any]) -> dict[str, Any]:
    """One row of the table of rates."""
    from noonsight.model.count.totals import family_named
    from noonsight.scaling.transfer import family_rates
    from noonsight.train.schedule import num_warmup_steps

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
        "warmup_steps": num_warmup_steps(found, steps),  # of a config; of rates too: it reads their warm-up alone
        "clamped": list(found.clamped),
        "declared": [] if family.beta2 is None else ["beta2"],
        "computed": [] if counts["steps"] else ["steps", "warmup_steps"],
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

    def cell(row: dict[str, Any], name: str) -> str:
        return columns[name].format(row[name]) + next((mark for mark in MARKS if name in row[MARKS[mark][0]]), " ")

    cells = [[f"{name} " for name in columns], *([cell(row, name) for name in columns] for row in rows)]
    used = [f"{mark} {said}" for mark, (key, said) in MARKS.items() if any(row[key] for row in rows)]
    return "\n".join([*_aligned(cells, gap=" "), *([""] if used else []), *used])


def _overview(rows: list[dict[str, Any]]) -> str:
    columns = ("family", "total_parameters", "active_parameters", "tokens", "train_flops")
    cells = [[_short(row[name]) for name in columns] for row in rows]
    return "\n".join([*_aligned([list(columns), *cells]), "", "noon count FAMILY takes one apart."])


def _aligned(cells: list[list[str]], gap: str = "  ") -> list[str]:
    """Columns of equal width; the first is flush left."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    flush = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    return [gap.join(line).rstrip() for line in flush]


def _lines(counts: dict[str, Any]) -> str:
    """Totals, then each breakdown with the share of every part."""
    groups = {name: value for name, value in counts.items() if isinstance(value, dict)}
    single = {name: value for name, value in counts.items() if name not in groups}
    lines = [f"{_line(name, value)}  {LABELS.get(name, '')}".rstrip() for name, value in single.items()]
    for name, parts in groups.items():
        lines += ["", name.replace("_", " ")]
        whole = parts.get("executed") or sum(parts.values())
        lines += [f"{_line('  ' + part, value)}  {value / whole:6.1%}" for part, value in parts.items() if value]
    return "\n".join(lines)


def _line(name: str, value: Any) -> str:
    return f"{name:26}{_short(value):>26}"


def _short(value: Any) -> str:
    if value is None:
        return "not published"
    if isinstance(value, int):
        return f"{value:,}" if value < 1e16 else f"{value:.5e}"
    return str(value)
