"""Two runs are bit-identical on one machine with one device count: two processes, each started afresh.

`python -m tests.model.test_determinism` is such a run: a few steps of the hero.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from noonsight.model.transformer import make_program
from tests.model.setting import compiled, packed_batch, shaken_extra, shaken_params, tiny_config


def three_steps() -> str:
    """Digest of parameters, pending quantiles and losses after three steps of plain descent."""
    config = tiny_config(expert_width=8, latent_width=16)
    program = make_program(config)

    @compiled
    def step(params, extra, batch):
        (loss, aux), gradient = jax.value_and_grad(program.loss, has_aux=True)(params, extra, batch)
        moved = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, params, gradient)
        return moved, program.after_step(extra, aux), loss

    params, extra = shaken_params(config), shaken_extra(config)
    digest = hashlib.sha256()
    for number in range(3):
        params, extra, loss = step(params, extra, packed_batch(config, seed=number, rows=3))
        for leaf in jax.tree.leaves((params, extra, loss)):
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def test_two_processes_give_the_same_bits():
    command = [sys.executable, "-m", "tests.model.test_determinism"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) for _ in "ab"]
    found = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len(found[0].strip()) == 64
    assert found[0] == found[1]


if __name__ == "__main__":
    print(three_steps())
