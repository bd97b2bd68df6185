"""How large a model is and what it costs, in closed form, from the config alone. JAX is not imported.

Files, lowest first: `parameters` (every array of the tree) -> `flops` (forward, one step part by part, the optimiser,
utilisation), `devices` (what one device holds, sends and receives) -> `totals` (a config or a named family in one
answer). Tests hold all of it against the real arrays, the compiler's own count and the published figures.
"""

from noonsight.model.count.totals import Counts, count, count_family

__all__ = ["Counts", "count", "count_family"]
