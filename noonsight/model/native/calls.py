"""The kernels as JAX functions. Only `build.is_available()` says whether they may be called.

Under `vmap` they run one after the other. Inside `shard_map` they need `check_vma=False`, because XLA does not know how
their results vary; a program that XLA itself splits over devices gathers their operands, which is right and slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def product(
    a: Float[Array, "i j"], b: Float[Array, "k l"], *, a_transposed: bool = False, b_transposed: bool = False
) -> Float[Array, "m n"]:
    """a @ b in float32 from inputs rounded to bfloat16, either matrix transposed on the way. No derivative."""
    shape = (a.shape[1 if a_transposed else 0], b.shape[0 if b_transposed else 1])
    call = _call("noon_matmul", jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(a, b, a_transposed=a_transposed, b_transposed=b_transposed)


@jax.custom_vjp
def experts(
    x: Float[Array, "T Z"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    gate: Float[Array, "E Z F"],
    up: Float[Array, "E Z F"],
    down: Float[Array, "E F Z"],
) -> Float[Array, "T Z"]:
    """The dropless exchange (see `model.exchange`) in one call, float32 arrays, products of bfloat16."""
    return _experts_forward(x, chosen, weights, valid, gate, up, down)[0]


def _experts_forward(x, chosen, weights, valid, gate, up, down):
    saved = jax.ShapeDtypeStruct((chosen.size, gate.shape[2]), jnp.bfloat16)
    call = _call("noon_experts_forward", (jax.ShapeDtypeStruct(x.shape, jnp.float32), saved, saved))
    inputs = (x, chosen, weights, valid, gate, up, down)
    y, saved_gate, saved_up = call(*inputs)
    return y, (inputs, saved_gate, saved_up)


def _experts_backward(kept, dy):
    inputs, saved_gate, saved_up = kept
    x, _, weights, _, gate, up, down = inputs
    slopes = tuple(jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in (x, weights, gate, up, down))
    dx, d_weights, d_gate, d_up, d_down = _call("noon_experts_backward", slopes)(*inputs, saved_gate, saved_up, dy)
    return dx, None, d_weights, None, d_gate, d_up, d_down


experts.defvjp(_experts_forward, _experts_backward)


@jax.custom_vjp
def attend(
    q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], lower: Int[Array, "B S"]
) -> Float[Array, "B S N H"]:
    """`model.attention.attend` in one call, float32 arrays, products of bfloat16."""
    return _attend_forward(q, k, v, lower)[0]


def _attend_forward(q, k, v, lower):
    results = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    out, log_sum = _call("noon_attention_forward", results)(q, k, v, lower)
    return out, (q, k, v, lower, out, log_sum)


def _attend_backward(kept, d_out):
    slopes = tuple(jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in kept[:3])
    return (*_call("noon_attention_backward", slopes)(*kept, d_out), None)


attend.defvjp(_attend_forward, _attend_backward)


def cross_entropy(
    h: Float[Array, "T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    z_loss_weight: float,
) -> tuple[Float[Array, " T"], Float[Array, " T"], Float[Array, "T D"], Float[Array, "D V"]]:
    """Cross-entropy and log-sum-exp of each token, and the slopes of sum(weights * (ce + z * lse^2)) in h and head."""
    results = tuple(
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (targets.shape, targets.shape, h.shape, head.shape)
    )
    call = _call("noon_cross_entropy", results)
    return call(h, head, targets, weights, z_loss_weight=np.float32(z_loss_weight))


def newton_schulz(matrices: Float[Array, "n i j"], triples: Float[Array, "t 3"]) -> Float[Array, "n i j"]:
    """`train.muon.newton_schulz` of a stack, products of bfloat16. No derivative."""
    return _call("noon_newton_schulz", jax.ShapeDtypeStruct(matrices.shape, jnp.float32))(matrices, triples)


def _call(name: str, results: Any) -> Callable[..., Any]:
    return jax.ffi.ffi_call(name, results, vmap_method="sequential")
