"""Learning-rate schedules: warm-up, then linear, cosine or warmup-stable-decay (WSD).

A schedule is the share of the peak rate at the 0-based step t of N: t / n_w during the warm-up of n_w =
floor(fraction * N) steps, so that the first step of a warmed-up run has rate 0, and from there down to
`min_lr_fraction` at t = N (Marin, issue #8435). Every rate is `peak * schedule`: no rate is ever derived from another
step's rate.
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
    Past the last step it stays at the minimum.
    """
    warmup = num_warmup_steps(config, num_steps)
    lowest = config.min_lr_fraction
    rising = step / max(warmup, 1)
    passed = xp.clip((step - warmup) / max(num_steps - warmup, 1), 0.0, 1.0)
    if config.schedule == "linear":
        falling = 1.0 - (1.0 - lowest) * passed
    elif config.schedule == "cosine":
        falling = lowest + (1.0 - lowest) * 0.5 * (1.0 + xp.cos(math.pi * passed))
    else:
        decay = max(math.floor(config.decay_fraction * num_steps + 1e-9), 1)
        falling = 1.0 - (1.0 - lowest) * xp.clip((step - (num_steps - decay)) / decay, 0.0, 1.0)
    return xp.where(step < warmup, rising, falling)
