"""What happens to matrices: Newton-Schulz, which makes a gradient orthogonal, and the hyperball, which keeps a norm.

    m <- 0.95 m + g;  u = g + 0.95 m;  U = NewtonSchulz(u)        (Muon's direction: a sum, not an average; Nesterov)
    W' = W - lr * U * |W| / |U|;   W+ = W' * |W| / |W'|           (hyperball; float32 norms of the W at hand)

A matrix under the hyperball turns on a sphere, so the rate is an angle and a recipe carries from small models to big
ones. Both come as optax transformations: `orthogonalize` is plain Muon's, `turn` makes an H of Muon or Adam.

On a mesh Newton-Schulz is the one part that needs a whole matrix at once: `shared_newton_schulz` gives each matrix to
one device. The hyperball needs sums only, over arrays whose split is pinned.

Sources: Muon (Jordan et al. 2024), Marin issues #8435, #8621, #8073.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from noonsight.model import native
from noonsight.model.layout import ALONE, FSDP, Layout
from noonsight.train.groups import Rule, by_path, like, spec_of

NEWTON_SCHULZ_TRIPLES = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Odd quintics, applied first to last. Composed, they map every singular value in [0.01, 1] into [0.978, 1.032];
reversed, into [0.027, 1.273].
"""


def orthogonalize(dtype: str, *, scaled: bool = False, layout: Layout = ALONE) -> optax.GradientTransformation:
    """Each matrix of each leaf replaced by its orthogonal factor. `scaled`: times sqrt(max(1, fan_out / fan_in)), as
    plain Muon wants it; under the hyperball that is one number per leaf, which cancels.
    """

    def orthogonal(path: str, u: jax.Array) -> jax.Array:
        fan_in, fan_out = u.shape[-2:]  # matrices act on the right: x W
        alone = layout.mesh is None
        factor = newton_schulz(u, dtype) if alone else shared_newton_schulz(u, dtype, layout, spec_of(path))
        return factor * (math.sqrt(max(1.0, fan_out / fan_in)) if scaled else 1.0)

    def update(updates: Any, params: Any) -> Any:
        return like(updates, {path: orthogonal(path, u) for path, u in by_path(updates).items()})

    return optax.stateless(update)


def turn(
    rules: Mapping[str, Rule], rate: Callable[[Any], jax.Array], *, pooled: bool, layout: Layout = ALONE
) -> optax.GradientTransformationExtraArgs:
    """Directions to updates on the hyperball, at `rate(step)`; `pooled`: a bank of experts has one norm per layer."""

    def update(directions: Any, state: Any, params: Any, *, step: Any) -> tuple[Any, Any]:
        lr, weights = rate(step), by_path(params)
        updates = {}
        for path, direction in by_path(directions).items():
            axes = (-3, -2, -1) if pooled and rules[path].experts else (-2, -1)
            weight, direction = (pinned(x, layout, path) for x in (weights[path], direction))
            updates[path] = hyperball(weight, direction, lr, axes=axes)
        return like(directions, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def pinned(x: jax.Array, layout: Layout, path: str) -> jax.Array:
    """`x`, on a mesh held in the split of the parameter at `path`: a sum over it then adds each part exactly once."""
    if layout.mesh is None or x.ndim == 0:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec_of(path)))


def shared_newton_schulz(matrices: jax.Array, dtype: str, layout: Layout, spec: PartitionSpec) -> jax.Array:
    """`newton_schulz` of an array split by `spec` over the layout's mesh: each matrix is made on one device of a rack.

    The devices that hold parts of the same matrices share them out: each sends its part of a matrix to the one that
    makes it (all-to-all) and gets its part of the result back, so that none ever holds the whole stack. Where the split
    leaves whole matrices on several devices (small leaves are replicated) these too share the stack, and gather the
    results. It is padded with zeros to a multiple of the sharers. Experts stay where they are, a matrix alone is made
    by all who have it, and every rack does the same (Marin, issue #8435).
    """
    names = [_split_axes(entry, layout) for entry in (*spec, *[None] * (matrices.ndim - len(spec)))]
    splits = [(dim, axes) for dim, axes in zip((1, 2), names[-2:]) if axes]
    idle = tuple(axis for axis in FSDP if layout.size(axis) > 1 and axis not in sum(names, ()))
    idle = idle if matrices.ndim > 2 else ()
    sharers = layout.size(*idle, *(axis for _, axes in splits for axis in axes))

    def local(part: jax.Array) -> jax.Array:
        if sharers == 1:
            return newton_schulz(part, dtype)
        stack = part.reshape(-1, *part.shape[-2:])
        count = len(stack)
        stack = jnp.pad(stack, ((0, -count % sharers), (0, 0), (0, 0)))
        for dim, axes in splits:
            stack = jax.lax.all_to_all(stack, axes, 0, dim, tiled=True)
        if idle:
            share = len(stack) // layout.size(*idle)
            stack = jax.lax.dynamic_slice_in_dim(stack, jax.lax.axis_index(idle) * share, share)
        stack = newton_schulz(stack, dtype)
        if idle:
            stack = jax.lax.all_gather(stack, idle, tiled=True)
        for dim, axes in reversed(splits):
            stack = jax.lax.all_to_all(stack, axes, dim, 0, tiled=True)
        return stack[:count].reshape(part.shape)

    return jax.shard_map(local, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)(matrices)


def newton_schulz(matrices: jax.Array, dtype: str = "bfloat16") -> jax.Array:
    """The nearest thing to an orthogonal matrix, by five quintic iterations: [..., M, N] -> [..., M, N] float32.

    Each matrix of the stack is divided by its own Frobenius norm and treated alone; a zero matrix stays zero.
    """
    if native.serves(dtype):
        stack = matrices.reshape(-1, *matrices.shape[-2:]).astype(jnp.float32)
        return native.newton_schulz(stack, jnp.array(NEWTON_SCHULZ_TRIPLES, jnp.float32)).reshape(matrices.shape)
    if matrices.ndim == 2:
        return _iterate(matrices, dtype)

    # One layer at a time, its experts together, written over the stack it came from. On two cores this is 1.7 to 2.2
    # times as fast as the whole stack at once (16 matrices of 256 x 256 stay in the cache, 96 do not), its temporaries
    # are one layer's, and it never loops over a dim that the layout splits. Joining leaves of equal shape makes the
    # stack longer still: 1.3 times slower.
    def one_layer(index: jax.Array, stack: jax.Array) -> jax.Array:
        layer = jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(stack, _iterate(layer, dtype), index, 0)

    return jax.lax.fori_loop(0, matrices.shape[0], one_layer, matrices.astype(jnp.float32))


def hyperball(weight: jax.Array, direction: jax.Array, lr: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """The update that turns `weight` by `lr` along `direction` and keeps its norm over `axes` (Marin, issue #8621).

    With a = lr |W| / |U| and |W'|^2 = |W|^2 (1 + d), d = a (a |U|^2 - 2 <W, U>) / |W|^2, the update W+ - W is
    (c - 1) W - c a U, c = 1 / sqrt(1 + d). Said so, a rounding error is a part of the step and not of the weight (the
    quotient of two norms drifted by up to 1e-5 in 1,000 steps), and one reading of W and U gives all three sums. Where the
    direction is zero the update is exactly zero, so an untouched expert does not wander; where it is not finite the
    update is not, so that nothing hides it.
    """
    radius, length, inner = norm(weight, axes), norm(direction, axes), _sum(weight * direction, axes)
    a = lr * radius / jnp.maximum(length, 1e-10)
    d = a * (a * length * length - 2.0 * inner) / jnp.maximum(radius * radius, 1e-30)
    root = jnp.sqrt(jnp.maximum(1.0 + d, 1e-20))
    return -d / (root * (1.0 + root)) * weight - (a / root) * direction


def norm(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Frobenius norm over `axes`, kept as dims of 1, as sqrt of the sum of float32 squares.

    Written on the whole array, so that on a sharded one the compiler adds each part exactly once (Marin, issue #8073:
    norms counted 2.5 to 7 times shrank the output projection to nothing).
    """
    return jnp.sqrt(_sum(jnp.square(x.astype(jnp.float32)), axes))


def _sum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sum(x, axis=axes, keepdims=True)


def _iterate(matrices: jax.Array, dtype: str) -> jax.Array:
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = jnp.swapaxes(matrices, -1, -2) if tall else matrices
    x = x.astype(jnp.float32)
    x = x / (norm(x, (-2, -1)) + 1e-8)

    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.matmul(left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32)

    def once(x: jax.Array, triple: jax.Array) -> tuple[jax.Array, None]:
        gram = dot(x, jnp.swapaxes(x, -1, -2))
        return triple[0] * x + dot(triple[1] * gram + triple[2] * dot(gram, gram), x), None

    triples = jnp.array(NEWTON_SCHULZ_TRIPLES, jnp.float32)
    x, _ = jax.lax.scan(once, x, triples)  # a loop, because it compiles in less than half the time
    return jnp.swapaxes(x, -1, -2) if tall else x


def _split_axes(entry: str | tuple[str, ...] | None, layout: Layout) -> tuple[str, ...]:
    """The mesh axes over which one dim is really split."""
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(axis for axis in axes if layout.size(axis) > 1)
