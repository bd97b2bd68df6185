"""Our side of the contest: the train step that `noon run` compiles, with its metrics, under AdamW or MuonH."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from benchmarks.worker import Built, serve
from noonsight.model import native
from noonsight.model.config import ModelConfig
from noonsight.model.transformer import make_program
from noonsight.tokens.batches import Batch
from noonsight.train.config import OptimizerConfig
from noonsight.train.optim import make_optimizer
from noonsight.train.step import compile_step, init_state, make_train_step

MANY_STEPS = 1000  # of the schedule: long enough that no measured step has a rate of 0


def build(job: dict[str, Any]) -> Built:
    """The contestant of `job`: {"config": fields of ModelConfig, "options": {"optimizer"}, "rate", "seed"}."""
    config = ModelConfig(**job["config"])
    program = make_program(config)
    rules = OptimizerConfig(
        kind=job["options"]["optimizer"],
        adam_lr=job["rate"],
        matrix_lr=10 * job["rate"],
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        warmup_fraction=0.0,  # as the peers
    )
    params = jax.eval_shape(lambda key: program.init(key)[0], jax.random.key(0))
    optimizer = make_optimizer(rules, params, num_steps=MANY_STEPS)
    state = jax.jit(lambda key: init_state(program, optimizer, key))(jax.random.key(job["seed"]))
    jax.block_until_ready(state)
    run: dict[str, Any] = {"state": state}
    del state  # a donated state must have one owner

    def step(tokens: np.ndarray) -> float:
        batch = jax.device_put(_batch(tokens))
        if "step" not in run:
            run["step"] = compile_step(make_train_step(program, optimizer), run["state"], batch)
        run["state"], measured = run["step"](run["state"], batch)
        jax.block_until_ready(run["state"])
        return float(measured["loss"])

    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    return Built(step, num_parameters, {"jax": jax.__version__, "kernels": native.description()})


def _batch(tokens: np.ndarray) -> Batch:
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0.0
    return Batch(tokens, np.zeros(tokens.shape, np.int32), weights)


if __name__ == "__main__":
    serve(build)
