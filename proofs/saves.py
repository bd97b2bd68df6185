"""What saving costs: memory over a thousand saves, and how long a step waits for one.

python -m proofs.saves          (three minutes on an idle machine; prints JSON)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Placement
from noonsight.model.transformer import make_program
from noonsight.plan.runner import load_experiment
from noonsight.recipe.rehearsing import training_stage
from noonsight.tokens.batches import Batch
from noonsight.train import checkpoint, pretrain
from proofs.miniature import HOUSE

SAVES, WARM_UP = 1000, 100
STEPS, EVERY = 420, 20


def main() -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"memory": thousand_saves(Path(folder) / "saves"), "stall": stall(Path(folder) / "stall")}
    json.dump(found, sys.stdout, indent=1)
    return 0


def thousand_saves(out: Path) -> dict[str, Any]:
    """The slope of this process's memory over SAVES saves of a megabyte, MB a save, by least squares."""
    out.mkdir()
    state, held = {"w": jnp.ones((256, 1024)), "step": jnp.int32(0)}, []
    with claim(out, "worker") as owned:
        saver = checkpoint.Saver(checkpoint.root_of(out), owned, attempt=1, on_saved=lambda *_: None)
        for step in range(1, WARM_UP + SAVES + 1):
            saver.save(state, step=step, kind="temporary", tokens=0)
            saver.join()
            if step > WARM_UP:
                held.append(_resident_bytes() / 1e6)
            if step == WARM_UP:
                before = _handles()
        after = _handles()
    slope = float(np.polyfit(np.arange(len(held)), held, 1)[0])
    return {
        "saves": SAVES,
        "slope_mb_per_save": slope,
        "from_mb": held[0],
        "to_mb": held[-1],
        "more_handles": after - before,
    }


def stall(out: Path) -> dict[str, Any]:
    """The miniature's model, a checkpoint every EVERY steps: how much longer the step is that a save is beside.

    Beside a save: the time for which the loop was held up, and the step after it, during which the disk is written to,
    against the median of all steps. The same for steps far from any save shows how much steps wander by themselves.
    """
    out.mkdir()
    stage = training_stage(load_experiment(HOUSE / "experiments" / "miniature.py"), "target")
    config = replace(stage.config, num_steps=STEPS, checkpoint_every=EVERY, evaluate_every=0, hash_every=0)
    part = pretrain.Part(make_program(config.model), lambda step: _rows(config, step))
    with claim(out, "worker") as owned:
        pretrain.pretrain(config, lambda _: part, out, owned, Placement(temporary_every_s=0.0))
    measured = read.metrics(out)
    steps = dict(zip(measured["step_s"].steps, measured["step_s"].values))
    waited = dict(zip(measured["save_s"].steps, measured["save_s"].values))
    usual = statistics.median(list(steps.values())[20:])
    beside = [(waited[step] + steps[step]) / usual - 1 for step in sorted(waited) if 20 < step < STEPS]
    far = [steps[step + EVERY // 2] / usual - 1 for step in sorted(waited) if 20 < step < STEPS - EVERY]
    return {
        "step_s": usual,
        "saves": len(beside),
        "held_s": statistics.median(waited.values()),
        "beside_a_save": {"median": statistics.median(beside), "most": max(beside)},
        "far_from_one": {"median": statistics.median(far), "most": max(far)},
        "bytes": sum(path.stat().st_size for path in checkpoint.folders(checkpoint.root_of(out))[-1].iterdir()),
    }


def _rows(config: Any, step: int) -> Batch:
    shape = (config.batch_size, config.sequence_length)
    tokens = np.random.default_rng(step).integers(0, config.model.vocab_size, shape).astype(np.int32)
    return Batch(tokens, np.zeros(shape, np.int32), np.ones(shape, np.float32))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _handles() -> int:
    return len(os.listdir("/proc/self/fd")) + threading.active_count()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
