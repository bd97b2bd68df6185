"""Verbs of the model: count."""

from __future__ import annotations

import json as json_format


def count(family: str, *, json: bool = False) -> int:
    """Parameters and FLOPs of a model family in closed form.

    Parameters
    ----------
    family
        Name of the family, such as hero.
    json
        Print JSON for scripts.
    """
    from noonsight.model.count import count_family

    counts = count_family(family)
    if json:
        print(json_format.dumps(counts, indent=1))
        return 0
    for name, value in counts.items():
        print(f"{name:32}  {value:>28,}" if isinstance(value, int | float) else f"{name:32}  {value!s:>28}")
    return 0
