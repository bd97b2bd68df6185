"""A model over meshes of eight virtual devices against the same model on one: `python -m proofs.layout_matrix` prints JSON.

The whole product of data, expert and context parallelism with accumulation and rematerialisation, and a few meshes for
every other kind of model. Each row holds the worst relative error of the loss, of a metric and of a gradient, and its
bound; nothing here judges. Some ten minutes on two cores.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

ROWS, DEVICES = 8, 8
REMATS = ("none", "block", "offload")
ACCUMULATIONS = (1, 2)  # batches of ROWS
FEW = ({"replica": 2, "data": 2, "expert": 2}, {"data": 2, "expert": 2, "context": 2}, {"expert": 4, "context": 2})


def matrix() -> list[dict[str, Any]]:
    """One row for each combination: {"model", "precision", "mesh", "devices", "remat", "accumulation", "loss",
    "metrics", "gradients", "worst", "bound", "seconds"}. Needs eight devices.
    """
    from tests.model.spread import small_config

    found = [
        _row("experts", small_config(remat=remat), sizes, accumulation)
        for sizes, remat, accumulation in itertools.product(meshes(), REMATS, ACCUMULATIONS)
    ]
    return found + [_row(*model, sizes, 1) for model, sizes in itertools.product(_others().items(), FEW)]


def meshes() -> Iterator[dict[str, int]]:
    """Every way to share 2, 4 or 8 devices among data, expert (1, 2, 4, 8) and context (1, 2, 4) parallelism; half of
    the data parallelism is across racks.
    """
    for data, expert, context in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)):
        if 1 < data * expert * context <= DEVICES:
            replica = 2 if data > 1 and (data > 2 or expert > 1) else 1
            yield {"replica": replica, "data": data // replica, "expert": expert, "context": context}


def _others() -> dict[str, Any]:
    """Models and precisions that the product leaves out."""
    from noonsight.model.families import delphi
    from tests.model.setting import PRECISIONS, dense_config
    from tests.model.spread import small_config

    block = {"remat": "block"}
    return {
        "experts, topk": small_config(balance="topk", **block),
        "experts, einsum": small_config(exchange="einsum", **block),
        "experts, full width, none shared": small_config(latent_width=0, num_shared_experts=0, **block),
        "experts, tied, long convolutions": small_config(
            tie_embeddings=True, head_init_scale=small_config().init_scale, sconv_kernel=7, **block
        ),
        "experts, longer than a block": small_config(sequence_length=192, window=70, **block),
        "experts, bfloat16": small_config(**block, **PRECISIONS["bfloat16"]),
        "experts, bfloat16 products": small_config(**block, **PRECISIONS["bfloat16 products"]),
        "dense": dense_config(delphi(512), sequence_length=48, **block),
        "dense, bfloat16": dense_config(delphi(512), sequence_length=48, **block, **PRECISIONS["bfloat16"]),
    }


def _row(name: str, config: Any, sizes: dict[str, int], accumulation: int) -> dict[str, Any]:
    from tests.model.nearness import BOUNDS, SLACK, precision_of
    from tests.model.spread import alone, errors, over, spread

    started, layout, precision = time.monotonic(), over(**sizes), precision_of(config)
    # of one device what is recomputed changes nothing: the tests see to it
    expected = alone(replace(config, remat="none"), ROWS * accumulation)
    worst = errors(spread(config, layout, ROWS * accumulation, accumulation), expected, config, accumulation)
    gradients = {name: error for name, error in worst.items() if name.startswith("gradient")}
    metrics = {name: error for name, error in worst.items() if name not in gradients and name != "loss"}
    return {
        "model": name,
        "precision": precision,
        "mesh": str(layout),
        "devices": layout.mesh.size,
        "remat": config.remat,
        "accumulation": accumulation,
        "loss": worst["loss"],
        "metrics": max(metrics.values()),
        "gradients": max(gradients.values()),
        "worst": max(worst, key=worst.__getitem__),
        "bound": SLACK[precision] * BOUNDS[precision][0],
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print(json.dumps(matrix(), indent=1))
