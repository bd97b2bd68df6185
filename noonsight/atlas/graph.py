"""Where the stages of an experiment stand in the drawing of its graph. Pure geometry: stages and edges in, places out.

A stage's column is the length of the longest way to it from a source (so edges only go right); its row follows the
mean row of its inputs, which keeps chains straight. Cycles cannot occur in a plan; in a broken record they are ignored.
"""

from __future__ import annotations

from typing import Any

COLUMN, ROW, WIDTH, HEIGHT = 106, 54, 88, 40


def lay_out(stages: list[str], edges: list[tuple[str, str]]) -> dict[str, Any]:
    """Boxes `{stage, x, y, label}` (top left corners, in pixels), edges as SVG paths, and the size of the drawing."""
    order = {stage: place for place, stage in enumerate(stages)}
    forward = [(start, end) for start, end in edges if start in order and end in order and order[start] < order[end]]
    inputs = {stage: [start for start, end in forward if end == stage] for stage in stages}
    column: dict[str, int] = {}
    for stage in stages:
        column[stage] = 1 + max((column[item] for item in inputs[stage]), default=-1)
    rows = _rows(stages, inputs, column)
    tallest = max(rows.values(), default=0.0)
    corner = {stage: (column[stage] * COLUMN, rows[stage] * ROW) for stage in stages}
    nearest = [(start, end) for start, end in forward if not _implied(start, end, inputs)]
    return {
        "width": (max(column.values(), default=0)) * COLUMN + WIDTH,
        "height": int(tallest * ROW + HEIGHT),
        "box": {"width": WIDTH, "height": HEIGHT},
        "nodes": [
            {"stage": stage, "x": corner[stage][0], "y": corner[stage][1], "label": stage.split("@")[0]}
            for stage in stages
        ],
        "paths": [_curve(corner[start], corner[end]) for start, end in nearest],
    }


def _rows(stages: list[str], inputs: dict[str, list[str]], column: dict[str, int]) -> dict[str, float]:
    columns: dict[int, list[str]] = {}
    for stage in stages:
        columns.setdefault(column[stage], []).append(stage)
    middle = (max((len(group) for group in columns.values()), default=1) - 1) / 2
    rows: dict[str, float] = {}
    for number in sorted(columns):
        group = columns[number]
        wish = {stage: _mean([rows[item] for item in inputs[stage]], middle) for stage in group}
        group.sort(key=lambda stage: wish[stage])
        centre = _mean(list(wish.values()), middle)
        top = min(max(centre - (len(group) - 1) / 2, 0.0), max(0.0, 2 * middle - (len(group) - 1)))
        for place, stage in enumerate(group):
            rows[stage] = top + place
    return rows


def _implied(start: str, end: str, inputs: dict[str, list[str]]) -> bool:
    """An edge that a longer way already shows; drawing it would only cross other boxes."""
    frontier = [item for item in inputs[end] if item != start]
    seen: set[str] = set()
    while frontier:
        here = frontier.pop()
        if here == start:
            return True
        if here not in seen:
            seen.add(here)
            frontier += inputs[here]
    return False


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    x0, y0 = start[0] + WIDTH, start[1] + HEIGHT / 2
    x1, y1 = end[0], end[1] + HEIGHT / 2
    bend = max((x1 - x0) / 2, 12)
    return f"M{x0:g} {y0:g} C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
