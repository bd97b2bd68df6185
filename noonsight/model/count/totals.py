"""One answer per model: the counts of a config, and those of a named family with its published run."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import Any

from noonsight.model.config import ModelConfig
from noonsight.model.count.flops import forward_flops, step_flops
from noonsight.model.count.parameters import active_parameters, idle_parameters, parameters_by_part
from noonsight.model.families import FAMILIES, HERO_LADDER, Family


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Exact counts of one config. FLOPs are per token of one forward pass."""

    total_parameters: int
    active_parameters: int
    touched_parameters: int  # everything a token passes, embedding, head and gains included
    forward_flops_per_token: int
    parts: dict[str, int]  # parameters by part, summing to the total

    def train_flops(self, tokens: int) -> int:
        """FLOPs of training on `tokens` tokens, recomputation not credited."""
        return 3 * self.forward_flops_per_token * tokens


def count(config: ModelConfig) -> Counts:
    """Counts of any config."""
    parts = parameters_by_part(config)
    total = sum(parts.values())
    return Counts(
        total_parameters=total,
        active_parameters=active_parameters(config),
        touched_parameters=total - idle_parameters(config),
        forward_flops_per_token=sum(forward_flops(config).values()),
        parts=parts,
    )


def family_named(name: str) -> Family:
    """The family of this name. Raises ValueError, with the nearest name and all of them, when there is none."""
    if name in FAMILIES:
        return FAMILIES[name]
    near = difflib.get_close_matches(name, FAMILIES, n=1)
    width = next((width for width in HERO_LADDER if name == f"ladder-{width}"), None)
    if width is not None:
        said = f"the ladder has a model of width {width}, but no run of it was published, so it is no family."
    else:
        said = f"there is no family named {name!r}" + (f"; did you mean {near[0]!r}?" if near else ".")
    raise ValueError(f"count: {said} The families are {', '.join(FAMILIES)}.")


def count_family(name: str, *, steps: int | None = None) -> dict[str, Any]:
    """Counts of a family by name with the tokens and FLOPs of its published run, or of `steps` steps of its batch.

    `steps` of the result is None where only the tokens of the run were published. `step_flops` is one step of its
    batch, each row one document without padding. Raises ValueError for an unknown name or fewer steps than one.
    """
    family = family_named(name)
    if steps is not None and steps < 1:
        raise ValueError(f"count: {steps} steps are no run; give 1 or more, or leave it out for the published run.")
    config = family.config()
    counts = count(config)
    batch_tokens = family.batch_size * config.sequence_length
    num_steps = family.num_steps if steps is None else steps
    published = family.tokens if steps is None else None
    tokens = num_steps * batch_tokens if published is None and num_steps is not None else published
    step = step_flops(config, family.batch_size, optimizer=family.optimizer)
    assert tokens is not None, f"{name} has neither steps nor tokens"
    return {
        "family": name,
        "width": config.width,
        "num_layers": config.num_layers,
        "total_parameters": counts.total_parameters,
        "active_parameters": counts.active_parameters,
        "touched_parameters": counts.touched_parameters,
        "forward_flops_per_token": counts.forward_flops_per_token,
        "train_flops": counts.train_flops(tokens),
        "tokens": tokens,
        "steps": num_steps,
        "batch_tokens": batch_tokens,
        "parts": counts.parts,
        "forward_flops_by_part": forward_flops(config),
        "step_flops": asdict(step) | {"executed": step.executed},
    }
