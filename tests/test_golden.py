"""A few steps of the miniature, held to the bit: a change that does not touch the mathematics leaves `golden/miniature.json` alone.

Bits are promised for equal jax, CPU type and device count; elsewhere the losses must agree to rounding. To record a numeric
change: `NOON_GOLDEN=write python -m pytest tests/test_golden.py`, and say so in the commit.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import jax
import numpy as np

from noonsight.model.families import miniature
from noonsight.model.transformer import make_program
from noonsight.tokens.batches import Batch
from noonsight.train.config import OptimizerConfig
from noonsight.train.optim import make_optimizer
from noonsight.train.step import init_state, make_train_step, params_hash

GOLDEN = Path(__file__).parent / "golden" / "miniature.json"
NUM_STEPS, ROWS, LENGTH, VOCABULARY = 6, 2, 64, 256


def machine() -> str:
    """jax, and the instruction sets that decide how XLA splits its sums."""
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith(("flags", "Features"))), "")
    chosen = sorted(flag for flag in flags.split() if flag.startswith(("avx", "amx", "fma", "sve", "asimd")))
    kind = hashlib.sha256(" ".join(chosen).encode()).hexdigest()[:8]
    return f"jax {jax.__version__}, cpu {kind}, {os.cpu_count()} cores, {jax.device_count()} devices"


def batch(step: int) -> Batch:
    generator = np.random.default_rng(step)
    tokens = generator.integers(1, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    tokens[:, ::17] = 0
    ends = np.cumsum(tokens == 0, axis=1)
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[:, -1] = 0
    return Batch(tokens, (ends - (tokens == 0)).astype(np.int32), weights)


class Voyage:
    """The pieces, compiled once; `sail` starts from the same weights each time."""

    def __init__(self):
        program = make_program(miniature(16, 2, VOCABULARY))
        key = jax.random.key(7)
        config = OptimizerConfig(
            adam_lr=4e-3, matrix_lr=0.02, beta2=0.98, epsilon=3e-16, newton_schulz="float32", warmup_fraction=0.2
        )
        optimizer = make_optimizer(config, jax.eval_shape(program.init, key)[0], num_steps=NUM_STEPS)
        self.start = jax.jit(lambda: init_state(program, optimizer, key))
        self.step = make_train_step(program, optimizer)

    def sail(self) -> tuple[list[str], str]:
        state, losses = self.start(), []
        for number in range(NUM_STEPS):
            state, measured = self.step(state, batch(number))
            losses.append(float(measured["loss"]).hex())
        return losses, params_hash(state.params)


def test_a_few_steps_are_stable_to_the_bit():
    voyage = Voyage()
    losses, weights = voyage.sail()
    assert (losses, weights) == voyage.sail(), "two runs in one process differ"
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("NOON_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps({**known, machine(): {"losses": losses, "params": weights}}, indent=1) + "\n")
        return
    assert known, "tests/golden/miniature.json is missing"
    if machine() in known:
        assert {"losses": losses, "params": weights} == known[machine()]
    recorded = [float.fromhex(loss) for loss in next(iter(known.values()))["losses"]]
    np.testing.assert_allclose([float.fromhex(loss) for loss in losses], recorded, rtol=2e-5)
