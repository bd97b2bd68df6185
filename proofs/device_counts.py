"""One run, continued on other numbers of devices: the same samples, and losses equal to rounding.

python -m proofs.device_counts          (two minutes; prints JSON)
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import numpy as np

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Placement
from noonsight.model.families import miniature
from noonsight.model.transformer import make_program
from noonsight.tokens.batches import Batch
from noonsight.train import checkpoint, pretrain
from noonsight.train.config import OptimizerConfig, PretrainConfig
from noonsight.train.placement import layout_of

STEPS, SPLIT = 24, 12
COUNTS = (1, 2, 4, 8)
MODEL = replace(miniature(32, 2, 256), sequence_length=64, matmul_dtype="float32")


def main() -> int:
    """Train once on every number of devices from one checkpoint, and once more on each."""
    with tempfile.TemporaryDirectory() as folder:
        json.dump(measure(Path(folder)), sys.stdout, indent=1)
    return 0


def measure(root: Path) -> list[dict[str, Any]]:
    """Per number of devices: whether the samples are those of one device, the largest relative difference of the losses
    from it, and whether a second run gives the same bits.
    """
    whole = _train(root / "start", 1, None)
    rows = []
    for count in COUNTS:
        first, second = (_train(root / f"{count}-{number}", count, root / "start") for number in (1, 2))
        off = np.abs(np.array(first["loss"]) / np.array(whole["loss"][SPLIT:]) - 1).max()
        rows.append(
            {
                "devices": count,
                "same_samples": first["batch_digest"] == whole["batch_digest"][SPLIT:],
                "losses_off": float(off),
                "same_bits_again": first["loss"] == second["loss"],
            }
        )
    return rows


def _train(out: Path, count: int, source: Path | None) -> dict[str, tuple[float, ...]]:
    """The losses and digests of a run; from the state that `source` kept at SPLIT where one is given."""
    out.mkdir(parents=True)
    if source is not None:
        kept = checkpoint.folder(checkpoint.root_of(source), SPLIT)
        shutil.copytree(kept, checkpoint.folder(checkpoint.root_of(out), SPLIT))
    told = OptimizerConfig(adam_lr=4e-3, matrix_lr=2e-2, beta2=0.98, epsilon=1e-10, newton_schulz="float32")
    config = PretrainConfig(
        model=MODEL,
        optimizer=told,
        num_steps=STEPS,
        batch_size=8,
        sequence_length=64,
        seed=0,
        checkpoint_every=SPLIT,
        hash_every=0,
    )
    placement = Placement(num_devices=count, record_batches=True, temporary_every_s=0.0)
    layout = layout_of(placement, MODEL)
    part = pretrain.Part(make_program(MODEL, layout), _rows)
    with claim(out, "worker") as owned:
        pretrain.pretrain(config, lambda _: part, out, owned, placement, layout=layout)
    return {name: series.values for name, series in read.metrics(out).items() if name in ("loss", "batch_digest")}


def _rows(step: int, rows: slice = slice(None)) -> Batch:
    tokens = np.random.default_rng(step).zipf(1.5, (8, 64)).astype(np.int64) % 255 + 1
    return Batch(tokens.astype(np.int32)[rows], np.zeros((8, 64), np.int32)[rows], np.ones((8, 64), np.float32)[rows])


if __name__ == "__main__":
    sys.exit(main())
