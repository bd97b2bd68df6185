"""The seam between a model and its training: three pure functions.

`model` makes one, `train` runs it, neither knows more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Program(NamedTuple):
    """A trainable computation.

    init(key) -> (params, extra): a pytree of trained arrays and a pytree of state without gradient.
    loss(params, extra, batch) -> (scalar float32, aux) with aux = {"metrics": {name: scalar}, "next": pytree}.
    after_step(extra, aux) -> extra: the state for the next step.
    """

    init: Callable[[Any], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], tuple[Any, dict[str, Any]]]
    after_step: Callable[[Any, dict[str, Any]], Any]
