"""When two results are the same.

float32: the largest error is within 1e-5 of the largest entry. bfloat16, whose rounding is random: the root mean
square of the errors is within 2e-2 of that of the entries. Arrays of experts are compared expert by expert, so that a
small expert's error cannot hide behind a large one.
"""

from __future__ import annotations

import jax
import numpy as np

from tests.model.tape import value

BOUNDS = {
    "float32": (1e-5, lambda x, axes: np.abs(x).max(axes)),
    "bfloat16": (2e-2, lambda x, axes: np.sqrt((x**2).mean(axes))),
}
SLACK = {"float32": 1, "bfloat16": 2}
"""How often the bound a gradient of a whole model may be off: every product on its way rounds to bfloat16. (Over a mesh
they round elsewhere than on one device; against float32 both are off by 2 to 3e-2.)
"""


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def precision_of(config):
    """The entry of BOUNDS: bfloat16 as soon as anything is."""
    return "bfloat16" if "bfloat16" in vars(config).values() else "float32"


def close(found, expected, dtype, name="", lead=0, slack=1):
    """Compare arrays, along the first `lead` axes one by one."""
    error = relative_error(found, expected, dtype, lead)
    assert error <= slack * BOUNDS[dtype][0], f"{name}: error {error:.1e}"


def relative_error(found, expected, dtype, lead=0):
    """The size of the difference over the size of what was expected, the largest along the first `lead` axes; infinite
    where anything is NaN, which `max` and `>` would pass over.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(value(expected))
    axes, size = tuple(range(lead, expected.ndim)), BOUNDS[dtype][1]
    error, scale = size(found - expected, axes), size(expected, axes)
    worst = float(np.max(error / np.maximum(scale, 1e-30), initial=0.0))
    return np.inf if np.isnan(worst) else worst


def all_close(found, expected, dtype, slack=1):
    """Compare trees leaf by leaf; `expected` has the gradients of traced arrays."""
    paths = jax.tree.leaves_with_path(found)
    traced = jax.tree.leaves(expected)
    assert len(paths) == len(traced)
    for (path, leaf), other in zip(paths, traced):
        name = jax.tree_util.keystr(path)
        lead = leaf.ndim - 2 if "expert" in name or "shared" in name else 0
        close(leaf, other.gradient, dtype, name, lead, slack)
