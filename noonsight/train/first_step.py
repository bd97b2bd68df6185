"""The first step held against a reference: guard against a scheduler that corrupts what it offloads (F7; Marin, #8753).

Where a layer's input waits on the host, the compiler moves it there and back beside the collectives. With more than one
collective in flight the public run saw the residual corrupted, with a loss that still fell. So the number in flight is
one there, and before a run's first step the gradient is computed twice on a few rows: by the program that trains, and by
the same program without offload. Both are reduced to two numbers per array, its norm and its sum along a wave over its dims,

    |g|   and   sum_ij g_ij cos(0.7 i + 1.11 j + 0.3),

so that no second gradient is held, and neither a swap of layers nor a sign goes unseen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from noonsight.train.groups import by_path

if TYPE_CHECKING:
    from noonsight.model.program import Program

BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Of the largest difference over the gradient's norm, by the number format of the products."""


class FirstStepWrong(RuntimeError):
    """The program that shall train does not compute the gradient of its reference."""

    symptom = "first-step"


def compiler_options(platform: str, remat: str) -> dict[str, Any]:
    """What the compiler of the step is told beyond its own choice, in a run and in a rehearsal alike."""
    if platform in ("gpu", "cuda") and remat == "offload":
        return {"xla_gpu_experimental_parallel_collective_overlap_limit": 1}
    return {}


def check(
    program: Program, reference: Program, params: Any, extra: Any, batch: Any, *, products: str
) -> dict[str, Any]:
    """Hold loss and gradient of `program` against those of `reference` for one small batch; the figures for an event.

    `products`: the number format of matrix products, which sets the bound. Raises FirstStepWrong naming the arrays.
    """
    found = [jax.device_get(_reduced(each, params, extra, batch)) for each in (program, reference)]
    (loss, sums), (right_loss, right) = found
    scale = float(np.sqrt(sum(norm**2 for norm, _ in right.values())))
    off = {path: max(abs(sums[path][0] - norm), abs(sums[path][1] - wave)) for path, (norm, wave) in right.items()}
    off = {path: float(value / scale) if np.isfinite(value) else float("inf") for path, value in off.items()}
    off["the loss"] = float(abs(loss - right_loss) / abs(right_loss))
    worst, bound = max(off, key=off.__getitem__), BOUNDS[products]
    if not off[worst] <= bound:
        bad = sorted((path for path in off if not off[path] <= bound), key=lambda path: -off[path])
        raise FirstStepWrong(
            f"the program that shall train does not compute what the same program without offload does: "
            f"{', '.join(f'{path} is off by {off[path]:.2g}' for path in bad[:4])} ({len(bad)} arrays; bound {bound:g}). "
            "Nothing was trained. Take remat 'block', or another version of the compiler"
        )
    return {"worst": worst, "off": off[worst], "bound": bound, "loss": float(loss)}


def _reduced(program: Program, params: Any, extra: Any, batch: Any) -> Any:
    def reduced(params: Any, extra: Any, batch: Any) -> Any:
        (loss, _), grads = jax.value_and_grad(program.loss, has_aux=True)(params, extra, batch)
        return loss, {path: _two_numbers(leaf) for path, leaf in by_path(grads).items()}

    model = jax.jit(reduced).lower(params, extra, batch)
    return model.compile(compiler_options(jax.default_backend(), "offload"))(params, extra, batch)


def _two_numbers(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = gradient.astype(jnp.float32)
    place = sum(
        jax.lax.broadcasted_iota(jnp.float32, wide.shape, axis) * (0.7 + 0.41 * axis) for axis in range(wide.ndim)
    )
    return jnp.sqrt(jnp.sum(wide * wide)), jnp.sum(wide * jnp.cos(place + 0.3))
