"""Measures the products of `ceiling.py`, each alone: XLA in float32 and bfloat16, and our native kernels if there are.

A worker of its own, so that it can take turns with the contestants:

    {"build": {"products": [[batch, m, k, n], ...]}}  ->  {"ready": {}}
    {"seconds": s}  ->  {"rates": {way: [[FLOP/s of forward, rows, matrix], ...]}}, about s seconds in all
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noonsight.model import native


class Way(NamedTuple):
    """One way to multiply: `product(a, b, a_transposed, b_transposed)` of arrays of `dtype`."""

    product: Callable[..., jax.Array]
    dtype: Any
    batches: bool  # whether it takes a leading batch dim


def main() -> None:
    """Answer the conductor until it closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())["build"]
    ways = {"xla-float32": _xla("float32"), "xla-bfloat16": _xla("bfloat16")} | _native()
    calls = {name: [_calls(way, *shape) for shape in job["products"]] for name, way in ways.items()}
    answers.write(json.dumps({"ready": {}}) + "\n")
    for line in sys.stdin:
        share = json.loads(line)["seconds"] / (3 * len(job["products"]) * len(calls))
        rates = {
            way: [[_rate(call, flops, share) for call in three] for three, flops in table]
            for way, table in calls.items()
        }
        answers.write(json.dumps({"rates": rates}) + "\n")


def _calls(way: Way, batch: int, m: int, k: int, n: int) -> tuple[list[Callable[[], Any]], int]:
    """The three products of one shape, compiled and called once, and the FLOPs of each."""
    rng = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(rng.standard_normal((batch, *shape), np.float32), way.dtype) for shape in ((m, k), (k, n), (m, n))
    )
    pairs = ((x, w, (False, False)), (g, w, (False, True)), (x, g, (True, False)))
    if batch == 1 or not way.batches:  # as the model multiplies them: plain matrices
        pairs = tuple((a[0], b[0], transposed) for a, b, transposed in pairs)
    multiplied = batch if way.batches else 1
    return [_compiled(way, *pair) for pair in pairs], 2 * multiplied * m * k * n


def _compiled(way: Way, a: jax.Array, b: jax.Array, transposed: tuple[bool, bool]) -> Callable[[], Any]:
    product = jax.jit(lambda a, b: way.product(a, b, *transposed))
    jax.block_until_ready(product(a, b))
    return lambda: jax.block_until_ready(product(a, b))


def _xla(dtype: str) -> Way:
    def product(a: jax.Array, b: jax.Array, a_transposed: bool, b_transposed: bool) -> jax.Array:
        batch = tuple(range(a.ndim - 2))
        contracted = (a.ndim - 2 if a_transposed else a.ndim - 1,), (b.ndim - 1 if b_transposed else b.ndim - 2,)
        return jax.lax.dot_general(a, b, (contracted, (batch, batch)), preferred_element_type=jnp.float32)

    return Way(product, jnp.dtype(dtype), batches=True)


def _native() -> dict[str, Way]:
    """Our kernels, one matrix of a batch at a time; float32 in, rounding inside. None where they are not available."""
    if not native.is_available():
        return {}

    def product(a: jax.Array, b: jax.Array, a_transposed: bool, b_transposed: bool) -> jax.Array:
        return native.product(a, b, a_transposed=a_transposed, b_transposed=b_transposed)

    return {"native": Way(product, jnp.dtype("float32"), batches=False)}


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
