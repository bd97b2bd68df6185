"""MuonH, AdamH and Adam in one optimiser, and AdamW beside it.

Matrices turn on a sphere: their direction comes from Newton-Schulz (MuonH) or Adam (AdamH), their norm never changes,
so the rate is an angle and the recipe carries from small models to big ones. Embedding, router, head gate, gains and
convolutions move by plain Adam. Which leaf belongs to which group is a table over exact paths, never a pattern
(Marin, issue #5639: `embed` is inside `embed_norm`).

    W' = W - lr * U * |W| / |U|        W+ = W' * |W| / |W'|       (hyperball; float32 norms of the W at hand)
    m <- 0.95 m + g;  u = g + 0.95 m;  U = NewtonSchulz(u)        (MuonH direction: a sum, not an average)
    U = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)       (Adam direction; epsilon outside the root)

Sources: Muon (Jordan et al. 2024), Marin issues #8435, #7856, #8621, #8818.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from noonsight.train.config import OptimizerConfig
from noonsight.train.schedule import share_of_peak

Group = Literal["adam", "adamh", "muonh"]
Leaves = dict[str, jax.Array]

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


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one leaf is treated. The last two dims of a matrix leaf are the matrix, all dims before them a stack."""

    group: Group
    experts: bool = False  # dim -3 is the bank of experts, over which the norm may be pooled
    decays: bool = False  # the hero's late weight decay acts here (Marin, issue #8818)


_ADAM, _DECAYED = Rule(group="adam"), Rule(group="adam", decays=True)
_ADAMH, _MUONH, _EXPERTS = Rule(group="adamh"), Rule(group="muonh"), Rule(group="muonh", experts=True)

HERO_TABLE: Mapping[str, Rule] = {
    "embed": _ADAM,
    "embed_norm": _ADAM,
    "embed_gate.down": _MUONH,
    "embed_gate.up": _MUONH,
    "layers.attn_norm": _ADAM,
    "layers.attn_gate.down": _MUONH,
    "layers.attn_gate.up": _MUONH,
    "layers.wq": _MUONH,
    "layers.wk": _MUONH,
    "layers.wv": _MUONH,
    "layers.wo": _MUONH,
    "layers.q_norm": _ADAM,
    "layers.k_norm": _ADAM,
    "layers.head_gate": _DECAYED,
    "layers.sconv_k": _ADAM,
    "layers.sconv_attn": _ADAM,
    "layers.sconv_moe": _ADAM,
    "layers.moe_norm": _ADAM,
    "layers.moe_gate.down": _MUONH,
    "layers.moe_gate.up": _MUONH,
    "layers.router": _DECAYED,
    "layers.router_bias": _ADAM,
    "layers.latent_down": _MUONH,
    "layers.latent_norm": _ADAM,
    "layers.latent_up": _MUONH,
    "layers.expert_gate": _EXPERTS,
    "layers.expert_up": _EXPERTS,
    "layers.expert_down": _EXPERTS,
    "layers.shared_gate": _MUONH,
    "layers.shared_up": _MUONH,
    "layers.shared_down": _MUONH,
    "layers.mlp_gate": _MUONH,
    "layers.mlp_up": _MUONH,
    "layers.mlp_down": _MUONH,
    "final_norm": _ADAM,
    "final_gate.down": _MUONH,
    "final_gate.up": _MUONH,
    "head": _ADAMH,
}
"""The parameter tree of the hero family (docs/decisions/contracts.md), leaf by leaf. A leaf that a config switches
off is simply absent.
"""


class Optimizer(NamedTuple):
    """optax's pair `init`, `update` (with the 0-based `step` as extra argument), the groups, and the rates.

    `init(params) -> state`; `update(grads, state, params, *, step) -> (updates, state)`, updates to be added to params;
    `groups`: path -> group, in the order of the leaves; `rates(step) -> {group: learning rate}`.
    """

    init: Callable[[Any], dict[str, Any]]
    update: Callable[..., tuple[Any, dict[str, Any]]]
    groups: dict[str, str]
    rates: Callable[[Any], dict[str, jax.Array]]


def make_optimizer(
    config: OptimizerConfig, params: Any, *, num_steps: int, table: Mapping[str, Rule] = HERO_TABLE
) -> Optimizer:
    """The optimiser for the leaves of `params` (arrays or ShapeDtypeStructs, float32), over a run of `num_steps`.

    Raises ValueError when a leaf is in no group, when a matrix rule meets a vector, or when a master parameter is not
    float32.
    """
    rules = _rules_of(params, table)
    if config.kind == "adamw":
        return _make_adamw(config, rules, num_steps)
    matrices = {path for path, rule in rules.items() if rule.group == "muonh"}
    with_moments = rules.keys() - matrices

    def init(params: Any) -> dict[str, Any]:
        leaves = by_path(params)
        return {
            "count": jnp.zeros((), jnp.int32),
            "mu": {path: jnp.zeros_like(leaves[path]) for path in sorted(with_moments)},
            "nu": {path: jnp.zeros_like(leaves[path]) for path in sorted(with_moments)},
            "momentum": {path: jnp.zeros_like(leaves[path]) for path in sorted(matrices)},
        }

    def rates(step: Any) -> dict[str, jax.Array]:
        share = share_of_peak(config, num_steps, step, jnp)
        return {"adam": config.adam_lr * share, "adamh": config.matrix_lr * share, "muonh": config.matrix_lr * share}

    def update(grads: Any, state: dict[str, Any], params: Any, *, step: Any) -> tuple[Any, dict[str, Any]]:
        lr, gradients, weights = rates(step), by_path(grads), by_path(params)
        adam, moments = _adam_directions({path: gradients[path] for path in sorted(with_moments)}, state, config)
        decay = config.weight_decay * jnp.maximum(0.0, 1.0 - state["count"] / num_steps)
        momentum, updates = {}, {}
        for path, rule in rules.items():
            weight = weights[path]
            if rule.group == "adam":
                updates[path] = -lr["adam"] * (adam[path] + (decay * weight if rule.decays else 0.0))
                continue
            if rule.group == "adamh":
                direction = adam[path]
            else:
                momentum[path] = config.momentum * state["momentum"][path] + gradients[path]
                direction = newton_schulz(gradients[path] + config.momentum * momentum[path], config.newton_schulz)
            pooled = rule.experts and config.expert_hyperball == "pooled"
            updates[path] = hyperball(weight, direction, lr[rule.group], axes=(-3, -2, -1) if pooled else (-2, -1))
        return like(params, updates), {**moments, "momentum": {path: momentum[path] for path in sorted(matrices)}}

    return Optimizer(init, update, {path: rule.group for path, rule in rules.items()}, rates)


def newton_schulz(matrices: jax.Array, dtype: str = "bfloat16") -> jax.Array:
    """The nearest thing to an orthogonal matrix, by five quintic iterations: [..., M, N] -> [..., M, N] float32.

    Each matrix of the stack is divided by its own Frobenius norm and treated alone; a zero matrix stays zero. The
    scalar sqrt(max(1, fan_out / fan_in)) of Muon is left out: it is one number per leaf and the hyperball cancels it.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = jnp.swapaxes(matrices, -1, -2) if tall else matrices
    x = x.astype(jnp.float32)
    x = x / (_norm(x, (-2, -1)) + 1e-8)

    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.matmul(left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32)

    def iterate(x: jax.Array, triple: jax.Array) -> tuple[jax.Array, None]:
        gram = dot(x, jnp.swapaxes(x, -1, -2))
        return triple[0] * x + dot(triple[1] * gram + triple[2] * dot(gram, gram), x), None

    x, _ = jax.lax.scan(
        iterate, x, jnp.array(NEWTON_SCHULZ_TRIPLES, jnp.float32)
    )  # a loop, because it compiles in less than half the time
    return jnp.swapaxes(x, -1, -2) if tall else x


def hyperball(weight: jax.Array, direction: jax.Array, lr: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """The update that turns `weight` by `lr` along `direction` and keeps its norm over `axes` (Marin, issue #8621).

    Where the direction is zero the update is exactly zero: no rescaling, so an untouched expert does not wander by
    rounding.
    """
    radius, length = _norm(weight, axes), _norm(direction, axes)
    moved = weight - lr * direction * (radius / jnp.maximum(length, 1e-10))
    back = moved * (radius / jnp.maximum(_norm(moved, axes), 1e-10))
    return jnp.where(length > 0, back - weight, 0.0)


def by_path(tree: Any) -> Leaves:
    """The leaves of a pytree by exact path, `layers.wq`, in the tree's own order. Absent (None) leaves do not
    appear.
    """
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def like(tree: Any, leaves: Leaves) -> Any:
    """A pytree shaped like `tree` with the leaves of `leaves` (path -> array)."""
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in by_path(tree)])


def _rules_of(params: Any, table: Mapping[str, Rule]) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for path, leaf in by_path(params).items():
        if path not in table:
            near = difflib.get_close_matches(path, table, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"parameter {path!r} {tuple(leaf.shape)} is in no optimiser group{hint}: "
                "name it in HERO_TABLE of noonsight/train/optim.py, or hand in a table of your own"
            )
        if table[path].group != "adam" and leaf.ndim < (3 if table[path].experts else 2):
            raise ValueError(
                f"parameter {path!r} {tuple(leaf.shape)} is in group {table[path].group!r}, which turns matrices, "
                "but it is none: correct its line in the table"
            )
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"parameter {path!r} is {leaf.dtype}; the optimiser moves float32 masters: "
                "initialise in float32 and cast where the forward pass computes"
            )
        rules[path] = table[path]
    return rules


def _adam_directions(grads: Leaves, state: dict[str, Any], config: OptimizerConfig) -> tuple[Leaves, dict[str, Any]]:
    count = state["count"] + 1
    mu = {path: config.beta1 * state["mu"][path] + (1 - config.beta1) * g for path, g in grads.items()}
    nu = {path: config.beta2 * state["nu"][path] + (1 - config.beta2) * g * g for path, g in grads.items()}
    bias1, bias2 = 1 - config.beta1 ** count.astype(jnp.float32), 1 - config.beta2 ** count.astype(jnp.float32)
    direction = {path: (mu[path] / bias1) / (jnp.sqrt(nu[path] / bias2) + config.epsilon) for path in grads}
    return direction, {"count": count, "mu": mu, "nu": nu}


def _make_adamw(config: OptimizerConfig, rules: dict[str, Rule], num_steps: int) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019): every leaf by `adam_lr`, decay on what the other optimiser would turn."""

    def init(params: Any) -> dict[str, Any]:
        zeros = {path: jnp.zeros_like(leaf) for path, leaf in by_path(params).items()}
        return {
            "count": jnp.zeros((), jnp.int32),
            "mu": zeros,
            "nu": {path: jnp.zeros_like(z) for path, z in zeros.items()},
        }

    def rates(step: Any) -> dict[str, jax.Array]:
        lr = config.adam_lr * share_of_peak(config, num_steps, step, jnp)
        return {"adamw": lr, "adam": lr}

    def update(grads: Any, state: dict[str, Any], params: Any, *, step: Any) -> tuple[Any, dict[str, Any]]:
        lr, weights = rates(step)["adamw"], by_path(params)
        direction, state = _adam_directions(by_path(grads), state, config)
        decay = {path: 0.0 if rule.group == "adam" else config.weight_decay for path, rule in rules.items()}
        return like(params, {path: -lr * (direction[path] + decay[path] * weights[path]) for path in rules}), state

    groups = {path: "adam" if rule.group == "adam" else "adamw" for path, rule in rules.items()}
    return Optimizer(init, update, groups, rates)


def _norm(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Frobenius norm as sqrt of the sum of float32 squares: on a sharded array the compiler adds the parts once
    (Marin, issue #8073).
    """
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))
