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

Sources: Muon (Jordan et al. 2024), AdamW (Loshchilov & Hutter 2019), Marin issues #8435, #7856, #8621, #8818.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from noonsight.train.config import OptimizerConfig
from noonsight.train.groups import HERO_TABLE, Rule, by_path, group_of, like, rules_of
from noonsight.train.muon import orthogonalize, turn
from noonsight.train.schedule import decay_at, share_of_peak

Rate = Callable[[Any], jax.Array]


class Optimizer(NamedTuple):
    """An `optax.GradientTransformationExtraArgs` (`init`, `update`) with its groups and rates.

    `init(params) -> state`; `update(grads, state, params, *, step) -> (updates, state)` with the 0-based step,
    updates to be added to params; `groups`: path -> group, in the order of the leaves; `rates(step) -> {group: rate}`.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    groups: dict[str, str]
    rates: Callable[[Any], dict[str, jax.Array]]


def make_optimizer(
    config: OptimizerConfig, params: Any, *, num_steps: int, table: Mapping[str, Rule] = HERO_TABLE
) -> Optimizer:
    """The optimiser for the leaves of `params` (arrays or ShapeDtypeStructs, float32), over a run of `num_steps`.

    State that lies in host memory is fetched for the update and put back there. Raises ValueError when a leaf is in no
    group, when a matrix rule meets a vector, or when a master parameter is not float32.
    """
    rules = rules_of(params, table)
    groups = {path: group_of(rule, config.kind) for path, rule in rules.items()}
    used = sorted(set(groups.values()))

    def rate_of(group: str) -> Rate:
        return lambda step: config.peak(group) * share_of_peak(config, num_steps, step, jnp)

    chains = {group: _chain(group, config, rules, rate_of(group), num_steps) for group in used}
    pieces = optax.partition(chains, like(params, groups))

    def update(grads: Any, state: Any, params: Any, *, step: Any) -> tuple[Any, Any]:
        updates, after = pieces.update(grads, jax.tree.map(_fetched, state), params, step=step)
        return updates, jax.tree.map(_put_back, after, state)

    return Optimizer(pieces.init, update, groups, lambda step: {group: rate_of(group)(step) for group in used})


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
    group: str, config: OptimizerConfig, rules: Mapping[str, Rule], rate: Rate, num_steps: int
) -> optax.GradientTransformationExtraArgs:
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    momentum = optax.trace(config.momentum, nesterov=True)
    on_sphere = turn(rules, rate, pooled=config.expert_hyperball == "pooled")
    if group == "muonh":
        return optax.chain(momentum, orthogonalize(config.newton_schulz), on_sphere)
    if group == "adamh":
        return optax.chain(adam, on_sphere)
    decay = _decay(group, config, rules, num_steps)
    if group == "muon":
        return optax.chain(momentum, orthogonalize(config.newton_schulz, scaled=True), *decay, scale_by_rate(rate))
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


def _fetched(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, jax.memory.Space.Device) if _on_host(leaf) else leaf


def _put_back(after: jax.Array, before: jax.Array) -> jax.Array:
    return jax.device_put(after, jax.memory.Space.Host) if _on_host(before) else after


def _on_host(leaf: jax.Array) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host
