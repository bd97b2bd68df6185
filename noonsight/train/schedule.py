"""Schedules of the rate (warm-up, then linear, cosine or warmup-stable-decay, WSD) and of the weight decay.

A schedule is the share of the peak rate at the 0-based step t of N: t / n_w during the warm-up of n_w =
floor(fraction * N) steps, so that the first step of a warmed-up run has rate 0, and from there down to
`min_lr_fraction` at t = N (Marin, issue #8435). Every rate is `peak * schedule`: no rate is ever derived from another
step's rate.

WSD-S, as Marin 8B used it, is no schedule of its own: the decay starts from the run's own trajectory at any step, and
what comes after goes on from the decayed weights, rewarmed over a few steps.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from noonsight.train.config import OptimizerConfig


def num_warmup_steps(config: OptimizerConfig, num_steps: int) -> int:
    """floor(warmup_fraction * num_steps), immune to 0.29 * 100 = 28.999999999999996."""
    return math.floor(config.warmup_fraction * num_steps + 1e-9)


def share_of_peak(config: OptimizerConfig, num_steps: int, step: Any, xp: ModuleType = np) -> Any:
    """The schedule at `step` (0-based; an integer or a traced scalar): 0..1.

    `xp` is the array module: numpy for people and sentinels, jax.numpy inside the train step, one formula for both.
    Past the last step it stays at the minimum. Raises ValueError for a schedule that has no formula here.
    """
    warmup = num_warmup_steps(config, num_steps)
    lowest = config.min_lr_fraction
    rising = step / max(warmup, 1)
    passed = xp.clip((step - warmup) / max(num_steps - warmup, 1), 0.0, 1.0)
    if config.schedule == "linear":
        falling = 1.0 - (1.0 - lowest) * passed
    elif config.schedule == "cosine":
        falling = lowest + (1.0 - lowest) * 0.5 * (1.0 + xp.cos(math.pi * passed))
    elif config.schedule == "wsd":
        decay = max(math.floor(config.decay_fraction * num_steps + 1e-9), 1)
        falling = 1.0 - (1.0 - lowest) * xp.clip((step - (num_steps - decay)) / decay, 0.0, 1.0)
    else:
        raise ValueError(f"share_of_peak: schedule {config.schedule!r} has no formula; use linear, cosine or wsd")
    share = xp.where(step < warmup, rising, falling)
    if config.rewarm_steps:
        again = xp.clip((step - config.rewarm_from) / config.rewarm_steps, 0.0, 1.0)
        share = share * xp.where(step < config.rewarm_from, 1.0, again)
    return share


def decay_at(config: OptimizerConfig, num_steps: int, count: Any, xp: ModuleType = np) -> Any:
    """The weight decay of the update that `count` updates went before; the caller multiplies it by the rate.

    `muonh`: weight_decay * max(0, 1 - count / num_steps), which is 0.0170268 where the hero switched 0.02 on (Marin,
    issue #8818). Other kinds: constant. Always 0 before `weight_decay_from`.
    """
    falling = xp.maximum(0.0, 1.0 - count / num_steps) if config.kind == "muonh" else 1.0
    return xp.where(count < config.weight_decay_from, 0.0, config.weight_decay * falling)
