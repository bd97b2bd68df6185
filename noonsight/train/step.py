"""One optimiser step as one pure, jitted function, and the state it carries.

    (loss, aux), g = value_and_grad(program.loss)(params, extra, batch)
    updates, opt   = optimizer.update(g, opt, params, step=step);  params <- params + updates
    extra          <- program.after_step(extra, aux);              step   <- step + 1

Invariants: the state goes in and comes out with the same shapes and dtypes and is donated; a run compiles this once
and calls that executable only (`compile_step`); whatever a page wants to know about a step is computed here, where
the gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from noonsight.model.layout import AXES, Layout
from noonsight.train.groups import by_path, like, spec_of
from noonsight.train.optim import Optimizer, moments_of
from noonsight.train.ranks import whole

if TYPE_CHECKING:
    from noonsight.model.program import Program

SKIPPED_CAPACITY = 64
"""How many skipped steps a run can remember; a run that needs more has another problem."""

Measured = dict[str, jax.Array]


class State(NamedTuple):
    """Everything a run is between two steps. There is no loader state: `batch(step)` gives the data."""

    params: Any
    opt: Any
    extra: Any
    step: jax.Array  # i32[], steps completed = the next step's number
    skipped: jax.Array  # i32[SKIPPED_CAPACITY], numbers of the steps whose batch was passed over, padded with -1


def init_state(program: Program, optimizer: Optimizer, key: jax.Array) -> State:
    """The state before step 0."""
    params, extra = program.init(key)
    skipped = jnp.full((SKIPPED_CAPACITY,), -1, jnp.int32)
    return State(params, optimizer.init(params), extra, jnp.zeros((), jnp.int32), skipped)


def state_shardings(program: Program, optimizer: Optimizer, layout: Layout, *, host: bool) -> State:
    """Where each leaf of the state lies, as a State of shardings.

    Parameters as the table of the layout says, moments as their parameter and with `host` in the memory kind
    pinned_host, all else on every device. Without a mesh: on the first device. Raises ValueError when the mesh does not
    divide a parameter, naming it.
    """
    shapes = jax.eval_shape(lambda: init_state(program, optimizer, jax.random.key(0)))
    _require_division(shapes.params, layout)

    def placed(tree: Any, kind: str | None = None) -> Any:
        return like(tree, {path: _sharding(layout, path, kind) for path in by_path(tree)})

    def whole(_: Any) -> Sharding:
        return _sharding(layout, None)

    opt = moments_of(optimizer, shapes.opt, lambda tree: placed(tree, "pinned_host" if host else None), whole)
    rest = jax.tree.map(whole, (shapes.extra, shapes.step, shapes.skipped))
    return State(placed(shapes.params), opt, *rest)


def make_train_step(
    program: Program, optimizer: Optimizer, shardings: State | None = None
) -> Callable[[State, Any], tuple[State, Measured]]:
    """`train_step(state, batch) -> (state, metrics)`, jitted with the state donated, which comes and goes in `shardings`
    (those of `state_shardings`) or, without them, stays as it lies. Metrics are f32 scalars:

    those of the program, `loss`, `finite` (1 when loss and gradient are), `norm/grad`, `norm/param`, and per optimiser
    group `norm/grad/G`, `norm/param/G` (after the step) and `rate/G`; of the group `adam` also `norm/update/G` and
    `ratio/update/G`. Names are those of `logbook.vocabulary`.
    """

    def train_step(state: State, batch: Any) -> tuple[State, Measured]:
        (loss, aux), grads = jax.value_and_grad(program.loss, has_aux=True)(state.params, state.extra, batch)
        if shardings is not None:  # a norm over it adds each part once
            grads = jax.lax.with_sharding_constraint(grads, shardings.params)
        params, updates, opt = optimizer.apply(grads, state.opt, state.params, step=state.step)
        after = State(params, opt, program.after_step(state.extra, aux), state.step + 1, state.skipped)
        measured = dict(aux["metrics"]) | _measure(optimizer, state.step, grads, params, updates)
        measured["loss"] = loss
        measured["finite"] = jnp.isfinite(loss) & jnp.isfinite(measured["norm/grad"])
        return after, {name: jnp.asarray(value, jnp.float32) for name, value in measured.items()}

    if shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    after = (shardings, shardings.step)  # metrics lie as the step number: on every device
    return jax.jit(train_step, donate_argnums=0, in_shardings=(shardings, None), out_shardings=after)


def compile_step(
    train_step: Callable[[State, Any], tuple[State, Measured]],
    state: State,
    batch: Any,
    options: Mapping[str, Any] | None = None,
) -> Callable[[State, Any], tuple[State, Measured]]:
    """The one executable of a run, made with these compiler `options`. It accepts these shapes, dtypes and layouts only, so a second compilation cannot
    happen.

    Raises TypeError when the state would come out of a step different from how it went in, by shape, dtype or kind of
    memory (Marin, issue #8443: optimiser state that left the host).
    """
    before = {path: (x.shape, x.dtype) for path, x in by_path(state).items()}
    after = {path: (x.shape, x.dtype) for path, x in by_path(jax.eval_shape(train_step, state, batch)[0]).items()}
    _same(before, after, "every leaf with its shape and dtype")
    compiled = train_step.lower(state, batch).compile(dict(options or {}))
    kinds = {path: x.sharding.memory_kind for path, x in by_path(state).items()}
    kept = {path: sharding.memory_kind for path, sharding in by_path(compiled.output_shardings[0]).items()}
    _same(kinds, kept, "every leaf in its kind of memory")  # a donated buffer in the wrong memory ends the process
    return compiled


def skip_step(state: State) -> State:
    """The state after a step that was passed over: it consumes its number and its batch, and nothing else changes."""
    return state._replace(step=state.step + 1)


def pass_over(state: State, steps: Iterable[int]) -> State:
    """The state that will pass over `steps` when it comes to them; the first SKIPPED_CAPACITY of those not behind it, and of
    those behind it as many as there is room for.
    """
    now = int(state.step)
    known = {int(step) for step in whole(state.skipped) if step >= 0} | set(steps)
    kept = sorted(sorted(known, key=lambda step: (step < now, abs(step - now)))[:SKIPPED_CAPACITY])
    values = np.full((SKIPPED_CAPACITY,), -1, np.int32)
    values[: len(kept)] = kept
    return state._replace(skipped=jax.device_put(values, state.skipped.sharding))


def params_hash(params: Any) -> str:
    """xxh3-128 over path, dtype, shape and bytes of every leaf, in the order of the tree. Equal hash: equal bits."""
    digest = xxhash.xxh3_128()
    for path, leaf in by_path(params).items():
        array = np.ascontiguousarray(whole(leaf))
        digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _sharding(layout: Layout, path: str | None, kind: str | None = None) -> Sharding:
    """Of the parameter at `path`, or of what is whole on every device."""
    if layout.mesh is None:
        return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    return NamedSharding(layout.mesh, spec_of(path) if path else PartitionSpec(), memory_kind=kind)


def _require_division(params: Any, layout: Layout) -> None:
    if layout.mesh is None:
        return
    faults = []
    for path, leaf in by_path(params).items():
        for size, names in zip(leaf.shape, spec_of(path)):
            axes = (names,) if isinstance(names, str) else names or ()
            if size % layout.size(*axes):
                faults.append(f"{path} {tuple(leaf.shape)}: {size} over {layout.size(*axes)} ({' x '.join(axes)})")
    if faults:
        sizes = " x ".join(f"{axis} {layout.size(axis)}" for axis in AXES if layout.size(axis) > 1)
        raise ValueError(
            f"the mesh {sizes} does not divide {len(faults)} parameters: {'; '.join(faults[:4])}. "
            "Choose sizes of the mesh that divide these dims, or another width of the model."
        )


def _same(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    if before != after:
        moved = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        raise TypeError(
            f"the train step changes the state it carries at {', '.join(moved[:4])}: "
            f"`after_step` and `update` must keep {what}"
        )


def _measure(optimizer: Optimizer, step: jax.Array, grads: Any, params: Any, updates: Any) -> Measured:
    # Each norm reads its array once more and does nothing else. Without the barriers XLA shares the squares of the
    # gradients with Adam's second moment and keeps them as a tree. The update is measured in the group `adam` alone,
    # which is small in every kind of optimiser: to measure it, XLA keeps the parameters of before beside the new ones,
    # which made AdamW's whole update 1.6 times as long. (Under the hyperball the ratio is the rate, by construction.)
    gradient, size = (_group_squares(optimizer, jax.lax.optimization_barrier(tree)) for tree in (grads, params))
    measured = {"norm/grad": jnp.sqrt(sum(gradient.values())), "norm/param": jnp.sqrt(sum(size.values()))}
    measured |= _expert_gradients(grads)
    rates = optimizer.rates(step)
    for group in gradient:
        measured[f"norm/grad/{group}"] = jnp.sqrt(gradient[group])
        measured[f"norm/param/{group}"] = jnp.sqrt(size[group])
        measured[f"rate/{group}"] = rates[group]
    if "adam" in gradient:
        update = _group_squares(optimizer, updates)["adam"]  # the other sums have no reader and are not computed
        measured["norm/update/adam"] = jnp.sqrt(update)
        measured["ratio/update/adam"] = jnp.sqrt(update / jnp.maximum(size["adam"], 1e-30))
    return measured


def _expert_gradients(grads: Any) -> Measured:
    """Gradient norm of the expert with the smallest over the mean of its layer, in the worst layer (arrays [L, E, ., .])."""
    leaves = [leaf for path, leaf in by_path(grads).items() if "expert_" in path and leaf.ndim == 4]
    if not leaves:
        return {}
    squares = sum(jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=(2, 3)) for leaf in leaves)
    norms = jnp.sqrt(squares)
    least = norms.min(axis=1) / jnp.maximum(norms.mean(axis=1), 1e-30)
    return {"router/grad_min_over_mean": least.min()}


def _group_squares(optimizer: Optimizer, tree: Any) -> dict[str, jax.Array]:
    totals: dict[str, jax.Array] = {}
    for path, leaf in by_path(tree).items():
        group = optimizer.groups[path]
        totals[group] = totals.get(group, 0.0) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return totals
