"""Demands with verdicts, and the page on which the proofs are shown: `proofs/README.md`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "=": operator.eq,
}
WORDS = {True: "yes", False: "**no**", None: "not measured"}


def line(demand: str, value: Any, relation: str, bound: Any) -> dict[str, Any]:
    """One demand; the verdict follows from value, relation and bound and from nothing else. No value: not measured."""
    holds = None if value is None else bool(RELATIONS[relation](value, bound))
    return {"demand": demand, "value": value, "relation": relation, "bound": bound, "holds": holds}


def origin(figures: dict[str, Any]) -> str:
    """Where and when the figures were measured."""
    about = figures["machine"]
    return (
        f"\nCommit {figures['commit']}, {figures['at']}, {about['cpu']}, {about['cores']} cores, Python {about['python']}, "
        f"jax {about['jax']}; {figures['minutes']} minutes.\n"
    )


def verdicts(summary: list[dict[str, Any]]) -> list[str]:
    """The demands as lines of a Markdown table."""
    lines = ["| what must hold | measured | bound | holds |", "|---|---|---|---|"]
    for each in summary:
        bound = "" if each["bound"] is None else f"{each['relation']} {short(each['bound'])}"
        lines.append(f"| {each['demand']} | {short(each['value'])} | {bound} | {WORDS[each['holds']]} |")
    return lines


def with_section(page: str, heading: str, row: str, section: str) -> str:
    """The page with a proof's section, new ones before the last, and its row in the table at the top."""
    top, *sections = re.split(r"(?m)^(?=## )", page)
    if row not in top:
        top = top.rstrip("\n") + "\n" + row + "\n"
    kept = [each for each in sections if not each.startswith(heading)]
    where = next((at for at, each in enumerate(sections) if each.startswith(heading)), len(kept) - 1)
    return top + "".join([*kept[:where], heading + section.rstrip("\n") + "\n\n", *kept[where:]])


def section_of(page: str, heading: str) -> str | None:
    """The text below a heading, to the next; None where there is none."""
    found = [each for each in re.split(r"(?m)^(?=## )", page) if each.startswith(heading)]
    return found[0].removeprefix(heading).rstrip("\n") + "\n" if found else None


def short(value: Any) -> str:
    """A figure in four digits."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
