"""Every exchange over 1, 2, 4 and 8 virtual devices: `python -m proofs.exchange_matrix` prints JSON.

With room for everything, against the dense oracle in both precisions, recomputed or not; without it, against the
simulation of who is dropped, on many draws. Each row holds the worst relative error of a result or gradient; nothing
here judges. Some five minutes on two cores.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

DEVICES = 8
SHARDS = (1, 2, 4, 8)
REMATS = ("none", "block")
TOKENS = 24  # of one device
FACTORS = (0.5, 0.7, 1.0, 1.15)
DRAWS = 25
STEPS = 12  # of training; later ones only amplify roundings


def matrix() -> list[dict[str, Any]]:
    """{"exchange", "shards", "dtype", "remat", "error", "worst", "bound", "dropped"} with room, and {"exchange", "shards",
    "factor", "draws", "dropped", "wrong_counts", "error", "bound"} without.
    """
    return [*roomy(), *tight()]


def roomy() -> Iterator[dict[str, Any]]:
    """Nothing is dropped, and all is equal to one device that has every expert."""
    import numpy as np

    from noonsight.model.exchange import EXCHANGES
    from tests.model.exchange.running import WITH_EXPERT, arrays, errors, expected, run
    from tests.model.nearness import BOUNDS

    names = [name for name in EXCHANGES if name != "einsum"] + [WITH_EXPERT]
    for shards, dtype, remat in itertools.product(SHARDS, BOUNDS, REMATS):
        given = arrays(shards, TOKENS)
        wanted = expected(given, np.ones_like(given.weights), dtype)
        for name, found in run(names, given, shards, None, dtype, remat).items():
            worst = errors(found, wanted, dtype)
            yield {
                "exchange": name,
                "shards": shards,
                "dtype": dtype,
                "remat": remat,
                "error": max(worst.values()),
                "worst": max(worst, key=worst.__getitem__),
                "bound": BOUNDS[dtype][0],
                "dropped": int(np.sum(found[1])),
            }


def tight() -> Iterator[dict[str, Any]]:
    """The refusals of every device, by cause, are those of the simulation, and the rest is computed as if they were not."""
    import numpy as np

    from tests.model.exchange.running import arrays, errors, expected, run, simulated
    from tests.model.exchange.simulator import RULES
    from tests.model.nearness import BOUNDS

    for shards, factor in itertools.product(SHARDS, FACTORS):
        rows: dict[str, dict[str, Any]] = {}
        for draw in range(DRAWS):
            given = arrays(shards, TOKENS, seed=100 + draw, lean=draw / 5)
            for name, found in run(RULES, given, shards, factor).items():
                outcome, drops = simulated(name, given, shards, factor), np.asarray(found[1])
                told = np.stack([outcome.sender, outcome.receiver], axis=1)
                error = max(errors(found, expected(given, outcome.kept), "float32").values())
                row = rows.setdefault(name, {"dropped": 0, "wrong_counts": 0, "error": 0.0})
                row["dropped"] += int(drops.sum())
                row["wrong_counts"] += int(np.sum(drops != told))
                row["error"] = max(row["error"], error)
        for name, row in rows.items():
            labels = {"exchange": name, "shards": shards, "factor": factor, "draws": DRAWS}
            yield {**labels, **row, "bound": BOUNDS["float32"][0]}


def training() -> Iterator[dict[str, Any]]:
    """The miniature's model trained for some steps on four devices with each exchange: its losses beside one device's."""
    import jax
    import numpy as np

    from noonsight.model.exchange import EXCHANGES
    from noonsight.model.layout import ALONE, Layout, make_mesh

    alone = _losses("sorted", ALONE)
    over_four = Layout(make_mesh({"expert": 4}, jax.devices()[:4]))
    for name in EXCHANGES:
        losses = _losses(name, over_four)
        error = float(np.max(np.abs(losses / alone - 1)))
        yield {"exchange": name, "steps": STEPS, "first": alone[0], "last": alone[-1], "error": error}


def _losses(exchange: str, layout: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from noonsight.model.families import miniature
    from noonsight.model.transformer import make_program
    from noonsight.train.config import OptimizerConfig
    from noonsight.train.optim import make_optimizer
    from noonsight.train.step import init_state, make_train_step, state_shardings
    from tests.model.spread import documents

    config = replace(miniature(64, 2, 256), exchange=exchange, sequence_length=128)
    rates = OptimizerConfig(adam_lr=2e-3, matrix_lr=2e-2, beta2=0.95, epsilon=1e-12, warmup_fraction=0.0)
    program, key = make_program(config, layout), jax.random.key(0)
    shapes = jax.eval_shape(program.init, key)[0]
    optimizer = make_optimizer(rates, shapes, num_steps=STEPS, layout=layout)
    shardings = None if layout.mesh is None else state_shardings(program, optimizer, layout, host=False)
    state = jax.jit(lambda: init_state(program, optimizer, key), out_shardings=shardings)()
    step, losses = make_train_step(program, optimizer, shardings), []
    for number in range(STEPS):
        state, measured = step(state, jax.tree.map(jnp.asarray, documents(config, 8, seed=number)))
        losses.append(float(measured["loss"]))
    return np.asarray(losses)


def main() -> None:
    """Measure and print."""
    started = time.monotonic()
    from noonsight.model.exchange import transfer

    transfer.FILL = float("nan")  # receive buffers come poisoned
    found = {"rows": matrix(), "training": list(training())}
    print(json.dumps({**found, "seconds": round(time.monotonic() - started, 1)}, indent=1))


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
