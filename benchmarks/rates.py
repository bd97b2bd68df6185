"""Measures the products of `ceiling.py` with XLA (and with our native kernels where they are chosen), each alone.

A worker of its own, so that it can take turns with the contestants:

    {"build": {"products": [[batch, m, k, n], ...], "ways": [...]}}  ->  {"ready": {...}}
    {"seconds": s}  ->  {"rates": {way: [[FLOP/s of forward, rows, matrix], ...]}}, about s seconds in all
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FORWARD = (((2,), (1,)), ((0,), (0,)))  # [e,m,k] x [e,k,n]
ROWS = (((2,), (2,)), ((0,), (0,)))  # [e,m,n] x [e,k,n]
MATRIX = (((1,), (1,)), ((0,), (0,)))  # [e,m,k] x [e,m,n]


def main() -> None:
    """Answer the conductor until it closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())["build"]
    calls = {way: [_calls(way, *shape) for shape in job["products"]] for way in job["ways"]}
    answers.write(json.dumps({"ready": {}}) + "\n")
    for line in sys.stdin:
        share = json.loads(line)["seconds"] / (3 * len(job["products"]) * len(calls))
        rates = {
            way: [[_rate(call, flops, share) for call in three] for three, flops in table]
            for way, table in calls.items()
        }
        answers.write(json.dumps({"rates": rates}) + "\n")


def _calls(way: str, batch: int, m: int, k: int, n: int) -> tuple[list[Callable[[], Any]], int]:
    """The three products of one shape, compiled and called once, and their FLOPs."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(way.removeprefix("xla-"))
    x, w, g = (
        jnp.asarray(rng.standard_normal((batch, *shape), np.float32), dtype) for shape in ((m, k), (k, n), (m, n))
    )
    if batch == 1:  # as the model multiplies them: plain matrices
        x, w, g = x[0], w[0], g[0]
    made = []
    for a, b, (contracted, batched) in ((x, w, FORWARD), (g, w, ROWS), (x, g, MATRIX)):
        if batch == 1:
            contracted, batched = tuple((dim - 1,) for (dim,) in contracted), ((), ())
        made.append(_compiled(a, b, (contracted, batched)))
    return made, 2 * batch * m * k * n


def _compiled(a: jax.Array, b: jax.Array, dims: Any) -> Callable[[], Any]:
    product = jax.jit(lambda a, b: jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32))
    jax.block_until_ready(product(a, b))
    return lambda: jax.block_until_ready(product(a, b))


def _rate(call: Callable[[], Any], flops: int, seconds: float) -> float:
    """The fastest of the calls that fit into `seconds`, at least three, FLOP/s: a ceiling is not an average."""
    best, end, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best, calls = min(best, time.perf_counter() - start), calls + 1
    return flops / best


if __name__ == "__main__":
    main()
