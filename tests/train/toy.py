"""A two-matrix model with a norm, and a worker that trains it: everything `train` needs, in milliseconds.

Run as `python -m tests.train.toy OUT` it is a worker, told by `OUT/toy.json`: {"num_steps", ...}.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noonsight.model.families import miniature
from noonsight.train.config import OptimizerConfig, PretrainConfig

WIDTH, ROWS = 8, 16


class Program(NamedTuple):
    """The contract's triple."""

    init: Any
    loss: Any
    after_step: Any


def optimizer_config(**changes: Any) -> OptimizerConfig:
    """MuonH with a short warm-up."""
    values = {"adam_lr": 1e-2, "matrix_lr": 5e-2, "beta2": 0.95, "epsilon": 1e-12, "newton_schulz": "float32"}
    return OptimizerConfig(**{**values, "warmup_fraction": 0.1, **changes})


def pretrain_config(**changes: Any) -> PretrainConfig:
    """Forty steps, a checkpoint every ten."""
    values = {
        "model": replace(miniature(WIDTH, 1, 61), sequence_length=WIDTH),  # named, never made: the program is our own
        "optimizer": optimizer_config(),
        "num_steps": 40,
        "batch_size": ROWS,
        "sequence_length": WIDTH,
    }
    return PretrainConfig(**{**values, "seed": 0, "checkpoint_every": 10, "hash_every": 5, **changes})


def table() -> dict[str, Any]:
    """Both matrices by MuonH and AdamH, the gain by Adam."""
    from noonsight.train.groups import Rule

    return {"inner": Rule(group="muonh"), "outer": Rule(group="adamh"), "gain": Rule(group="adam")}


def make_program() -> Program:
    """y = (gain * tanh(x inner)) outer, least squares; `extra` counts tokens seen, to be restored too."""
    import jax
    import jax.numpy as jnp

    def init(key: Any) -> tuple[Any, Any]:
        one, two = jax.random.split(key)
        params = {
            "inner": 0.3 * jax.random.normal(one, (WIDTH, 2 * WIDTH)),
            "outer": 0.3 * jax.random.normal(two, (2 * WIDTH, WIDTH)),
            "gain": jnp.ones((2 * WIDTH,)),
        }
        return params, {"seen": jnp.zeros((), jnp.float32)}

    def loss(params: Any, extra: Any, batch: Any) -> tuple[Any, Any]:
        hidden = params["gain"] * jnp.tanh(batch["x"] @ params["inner"])
        error = jnp.mean((hidden @ params["outer"] - batch["y"]) ** 2)
        return error, {"metrics": {"cross_entropy": error}, "next": extra["seen"] + batch["x"].size}

    return Program(init, loss, lambda extra, aux: {"seen": aux["next"]})


def make_batch(step: int, bad_step: int | None = None) -> dict[str, np.ndarray]:
    """A pure function of the step; the batch of `bad_step` holds a NaN."""
    x = np.random.default_rng(step).standard_normal((ROWS, WIDTH)).astype(np.float32)
    if step == bad_step:
        x[0, 0] = np.nan
    return {"x": x, "y": np.sin(x[:, ::-1])}


def toy_part(bad_step: int | None = None) -> Any:
    """What every phase trains with."""
    from noonsight.train.pretrain import Part

    def evaluate(params: Any, extra: Any, step: int) -> dict[str, float]:
        return {"eval/loss": float(params["gain"][0])}

    return Part(make_program(), lambda step: make_batch(step, bad_step), evaluate, 100.0)


def main(out: Path) -> None:
    """The worker."""
    from noonsight.train import recover
    from noonsight.train.pretrain import pretrain

    told = json.loads((out / "toy.json").read_text())
    bad_step = told.pop("bad_step", None)
    recover.work(
        lambda out, claim, placement: pretrain(
            pretrain_config(**told), lambda part: toy_part(bad_step), out, claim, placement, table=table()
        ),
        out,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
