"""The optimiser of a run, put together from optax's pieces and ours: MuonH, AdamH and Adam; AdamW; plain Muon.

`groups.py` says which leaf is in which group, `muon.py` what happens to matrices, `schedule.py` how rates and decay
move; here each group becomes a chain of optax transformations, and `optax.partition` hands every leaf to its chain.

    muonh   trace (a sum, Nesterov) -> Newton-Schulz -> turn on the hyperball at matrix_lr
    adamh   Adam direction                           -> turn on the hyperball at matrix_lr
    adam    Adam direction -> decay of head gate and router, by phase -> times -adam_lr
    adamw   Adam direction -> decay                                   -> times -adam_lr
    muon    trace -> Newton-Schulz * sqrt(max(1, fan_out / fan_in)) -> decay -> times -matrix_lr

Adam's direction is (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon), epsilon outside the root. Kind `muonh` uses
the first three groups, `adamw` the groups adamw and adam, `muon` the groups muon and adam.

Moments that lie in host memory are streamed: a leaf's come to the device, its parameter moves, they go back, and only
then does the next leaf begin.

Sources: Muon (Jordan et al. 2024), AdamW (Loshchilov & Hutter 2019), Marin issues #8435, #7856, #8621, #8818.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from noonsight.model.layout import ALONE, Layout
from noonsight.train.config import OptimizerConfig
from noonsight.train.groups import HERO_TABLE, Rule, by_path, group_of, like, rules_of
from noonsight.train.muon import orthogonalize, pinned, turn
from noonsight.train.schedule import decay_at, share_of_peak

Rate = Callable[[Any], jax.Array]


class Optimizer(NamedTuple):
    """An `optax.GradientTransformationExtraArgs` (`init`, `update`) with its groups and rates, and `apply`.

    `init(params) -> state`; `update(grads, state, params, *, step) -> (updates, state)` with the 0-based step,
    updates to be added to params; `apply(grads, state, params, *, step) -> (params, updates, state)` adds them, and
    takes and leaves in host memory what of `state` lies there; `groups`: path -> group, in the order of the leaves;
    `rates(step) -> {group: rate}`.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any, Any]]
    groups: dict[str, str]
    rates: Callable[[Any], dict[str, jax.Array]]


def make_optimizer(
    config: OptimizerConfig,
    params: Any,
    *,
    num_steps: int,
    table: Mapping[str, Rule] = HERO_TABLE,
    layout: Layout = ALONE,
    stream: bool = False,
) -> Optimizer:
    """The optimiser for the leaves of `params` (arrays or ShapeDtypeStructs, float32), over a run of `num_steps`.

    On the mesh of a `layout` the arrays lie as its table says, and each matrix is made orthogonal on one device.
    `stream`: leaf after leaf even where no moment is seen to lie on the host, as on devices that are only described.
    Raises ValueError when a leaf is in no group, when a matrix rule meets a vector, or when a master parameter is not float32.
    """
    rules = rules_of(params, table)
    groups = {path: group_of(rule, config.kind) for path, rule in rules.items()}
    used = sorted(set(groups.values()))

    def rate_of(group: str) -> Rate:
        return lambda step: config.peak(group) * share_of_peak(config, num_steps, step, jnp)

    chains = {group: _chain(group, config, rules, rate_of(group), num_steps, layout) for group in used}
    pieces = optax.partition(chains, like(params, groups))

    def apply(grads: Any, state: Any, params: Any, *, step: Any) -> tuple[Any, Any, Any]:
        if stream or any(map(_on_host, jax.tree.leaves(state))):
            return _streamed(chains, groups, layout, grads, state, params, step)
        updates, state = pieces.update(grads, state, params, step=step)
        return jax.tree.map(jnp.add, params, updates), updates, state

    def rates(step: Any) -> dict[str, jax.Array]:
        return {group: rate_of(group)(step) for group in used}

    return Optimizer(pieces.init, pieces.update, apply, groups, rates)


def moments_of(
    optimizer: Any, state: Any, change: Callable[[Any], Any], scalar: Callable[[Any], Any] | None = None
) -> Any:
    """The state of an optimiser (anything with optax's `init`) with `change(tree)` in place of each of its moments,
    which are trees like the parameters, and `scalar(leaf)` in place of what else it holds.
    """
    return optax.tree_map_params(optimizer, change, state, transform_non_params=scalar, is_leaf=lambda _: True)


def scale_by_rate(rate: Rate) -> optax.GradientTransformationExtraArgs:
    """Updates times -rate(step).

    Not `optax.scale_by_learning_rate`: its schedules count the updates they see, and a step that was skipped for a bad
    batch is a step of the schedule all the same.
    """

    def update(updates: Any, state: Any, params: Any = None, *, step: Any) -> tuple[Any, Any]:
        lr = rate(step)
        return jax.tree.map(lambda u: -lr * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _chain(
    group: str, config: OptimizerConfig, rules: Mapping[str, Rule], rate: Rate, num_steps: int, layout: Layout
) -> optax.GradientTransformationExtraArgs:
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    momentum = optax.trace(config.momentum, nesterov=True)
    on_sphere = turn(rules, rate, pooled=config.expert_hyperball == "pooled", layout=layout)
    if group == "muonh":
        return optax.chain(momentum, orthogonalize(config.newton_schulz, layout=layout), on_sphere)
    if group == "adamh":
        return optax.chain(adam, on_sphere)
    decay = _decay(group, config, rules, num_steps)
    if group == "muon":
        orthogonal = orthogonalize(config.newton_schulz, scaled=True, layout=layout)
        return optax.chain(momentum, orthogonal, *decay, scale_by_rate(rate))
    return optax.chain(adam, *decay, scale_by_rate(rate))


def _decay(
    group: str, config: OptimizerConfig, rules: Mapping[str, Rule], num_steps: int
) -> list[optax.GradientTransformation]:
    """Weight decay of one group. Its clock counts updates, as Adam's does: that is the hero's `count`."""
    if config.weight_decay == 0 or (group == "adam" and config.kind != "muonh"):
        return []

    def decaying(tree: Any) -> Any:
        return like(tree, {path: group != "adam" or rules[path].decays for path in by_path(tree)})

    return [optax.add_decayed_weights(lambda count: decay_at(config, num_steps, count, jnp), mask=decaying)]


# Moments in host memory


def _streamed(
    chains: Mapping[str, optax.GradientTransformationExtraArgs],
    groups: Mapping[str, str],
    layout: Layout,
    grads: Any,
    state: Any,
    params: Any,
    step: Any,
) -> tuple[Any, Any, Any]:
    """`Optimizer.apply`, one leaf after the other: the barrier lets the moments of a leaf come only when the leaf
    before has its new parameter and moments, so that the device holds the moments of one leaf at a time.
    """
    weights, updates, before = by_path(params), {}, ()
    kept = {group: held.inner_state for group, held in state.inner_states.items()}
    for path, group in groups.items():
        mine = _moments_of_leaf(chains[group], state.inner_states[group].inner_state, path)
        mine, _ = jax.lax.optimization_barrier((mine, before))
        fetched = _fetched(mine, layout, path)
        update, after = chains[group].update(_alone(grads, path), fetched, _alone(params, path), step=step)
        updates[path] = by_path(update)[path]
        weights[path] = weights[path] + updates[path]
        before = (weights[path], after)
        kept[group] = _merged(kept[group], _put_back(after, mine))
    inner_states = {group: held._replace(inner_state=kept[group]) for group, held in state.inner_states.items()}
    return like(params, weights), like(params, updates), state._replace(inner_states=inner_states)


def _moments_of_leaf(chain: Any, state: Any, path: str) -> Any:
    return moments_of(chain, state, lambda tree: _alone(tree, path))


def _alone(tree: Any, path: str) -> Any:
    """A tree like the parameters with every leaf but one masked."""
    return like(tree, {name: leaf if name == path else optax.MaskedNode() for name, leaf in by_path(tree).items()})


def _merged(kept: Any, new: Any) -> Any:
    """`kept` with what `new` does not mask."""

    def masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return jax.tree.map(lambda old, now: old if masked(now) else now, kept, new, is_leaf=masked)


def _fetched(state: Any, layout: Layout, path: str) -> Any:
    """What of the moments of one leaf lies on the host, on the device."""

    def here(leaf: jax.Array) -> jax.Array:
        return pinned(jax.device_put(leaf, jax.memory.Space.Device), layout, path) if _on_host(leaf) else leaf

    return jax.tree.map(here, state)


def _put_back(after: Any, before: Any) -> Any:
    """Each leaf of `after` in the memory in which that of `before` lies."""

    def there(new: jax.Array, old: jax.Array) -> jax.Array:
        return jax.device_put(new, jax.memory.Space.Host) if _on_host(old) else new

    return jax.tree.map(there, after, before)


def _on_host(leaf: jax.Array) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host
