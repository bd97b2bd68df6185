"""What shall be run: stages and the experiment that joins them.

A stage is a function with a config, and the stages whose folders it reads. Its address `name@version` is where its
result lies; its config, its inputs and its code are what the result is; its placement is where it happens to run.
The graph has no cycles because a stage can only be given stages that already exist.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from noonsight.logbook.record import Artifact, Placement

Function = Callable[[Any, Mapping[str, Path], Path], Artifact]
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """A node of the plan: `function(config, inputs, out) -> Artifact` in a folder of its own.

    `resumable` says that the function goes on from what it finds in its folder; otherwise the folder is emptied first.
    `prediction` names the input whose frozen prediction is about this stage: without it the stage cannot start.
    Raises ValueError, naming the stage, for anything that could not be run again from its record.
    """

    name: str
    version: str
    function: Function
    config: Any
    inputs: Mapping[str, Stage] = dataclasses.field(default_factory=dict)
    sentence: str = ""
    resumable: bool = False
    placement: Placement = Placement()  # noqa: RUF009 (frozen)
    prediction: str | None = None

    @property
    def address(self) -> str:
        """`name@version`: the folder of the stage inside its experiment."""
        return f"{self.name}@{self.version}"

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        for part, text in (("name", self.name), ("version", self.version)):
            if not isinstance(text, str) or not _NAME.fullmatch(text):
                raise ValueError(f"{where}: the {part} {text!r} must be lower-case letters, digits and . _ - only.")
        if "<" in getattr(self.function, "__qualname__", "<"):
            raise ValueError(f"{where}: {self.function!r} must be a function at the top level of a module, because a "
                             "process of its own loads it by name.")  # fmt: skip
        parameters = getattr(self.config, "__dataclass_params__", None)
        if isinstance(self.config, type) or parameters is None or not parameters.frozen:
            raise ValueError(f"{where}: its config must be a frozen dataclass, not {type(self.config).__name__}.")
        for name, stage in self.inputs.items():
            if not isinstance(stage, Stage):
                raise ValueError(f"{where}: input {name!r} must be a Stage, not {type(stage).__name__}.")
        if self.prediction is not None and self.prediction not in self.inputs:
            raise ValueError(
                f"{where}: prediction={self.prediction!r} is none of its inputs ({', '.join(self.inputs)})."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """A question and the stages that answer it; stages that others have as inputs need not be listed."""

    name: str
    question: str
    stages: tuple[Stage, ...]
    expected: str = ""

    def __post_init__(self) -> None:
        if self.name == "site" or self.name.startswith("predictions.jsonl"):
            raise ValueError(
                f"experiment {self.name!r}: the root keeps something of its own under this name; choose another."
            )
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"experiment {self.name!r}: the name must be lower-case letters, digits and . _ - only.")
        if not self.stages:
            raise ValueError(f"experiment {self.name!r} has no stages.")

    def ordered(self) -> list[Stage]:
        """Every stage once, inputs before users, otherwise as listed.

        Raises ValueError, naming both, when two different stages claim one address.
        """
        found: dict[str, Stage] = {}

        def visit(stage: Stage) -> None:
            known = found.get(stage.address)
            if known is stage:
                return
            for given in stage.inputs.values():
                visit(given)
            if known is not None and (difference := _difference(known, stage)):
                raise ValueError(
                    f"experiment {self.name!r} describes {stage.address} twice, differently: {difference}. The rule: "
                    "one address is one function, one config and one set of inputs, and a stage starts from its inputs "
                    "and its own folder, from nothing else. Give one of the two another name or version."
                )
            found.setdefault(stage.address, stage)

        for stage in self.stages:
            visit(stage)
        return list(found.values())


def _difference(one: Stage, other: Stage) -> str:
    for field in ("function", "config", "resumable", "placement", "prediction"):
        left, right = getattr(one, field), getattr(other, field)
        if left != right:
            return f"{field} is {left} and {right}"
    left, right = ({name: stage.address for name, stage in each.inputs.items()} for each in (one, other))
    return f"inputs are {left} and {right}" if left != right else ""
