"""Which leaf the optimiser treats how: a table over exact paths, asserted before the first step.

Every leaf of the parameter tree has one line, and a leaf without a line stops the run: never a pattern, because
`embed` is inside `embed_norm` and a substring once put parameters in the wrong group for a whole run (Marin, issue
#5639), and never the rank alone, because a gain stacked over layers is a matrix to look at. The same table, filled
with the shapes and rates of a run, is what the logbook keeps and `noon show` prints.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from noonsight.model.layout import SPECS
from noonsight.train.config import OptimizerConfig

Group = Literal["adam", "adamh", "muonh", "adamw", "muon"]
Leaves = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the hero treats one leaf. The last two dims of a matrix leaf are the matrix, all dims before them a stack."""

    group: Literal["adam", "adamh", "muonh"]
    experts: bool = False  # dim -3 is the bank of experts, over which the norm may be pooled
    decays: bool = False  # weight decay acts here although the leaf is no matrix to turn (Marin, issue #8818)


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


def rules_of(params: Any, table: Mapping[str, Rule] = HERO_TABLE) -> dict[str, Rule]:
    """The rule of every leaf of `params` (arrays or ShapeDtypeStructs), by path and in the order of the tree.

    Raises ValueError when a leaf is in no group, when a rule for matrices meets a vector, or when a master parameter
    is not float32.
    """
    rules: dict[str, Rule] = {}
    for path, leaf in by_path(params).items():
        if path not in table:
            near = difflib.get_close_matches(path, table, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"parameter {path!r} {tuple(leaf.shape)} is in no optimiser group{hint}: "
                "name it in HERO_TABLE of noonsight/train/groups.py, or hand in a table of your own"
            )
        if table[path].group != "adam":
            _require_matrix(path, leaf, table[path])
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"parameter {path!r} is {leaf.dtype}; the optimiser moves float32 masters: "
                "initialise in float32 and cast where the forward pass computes"
            )
        rules[path] = table[path]
    return rules


def group_of(rule: Rule, kind: str) -> Group:
    """The group of a leaf under one kind of optimiser: `muonh` follows the rule, `adamw` decays what the hero turns,
    `muon` moves what the hero gives to MuonH, and Adam has the rest. Raises ValueError for another kind.
    """
    if kind == "muonh":
        return rule.group
    if kind == "adamw":
        return "adam" if rule.group == "adam" else "adamw"
    if kind == "muon":
        return "muon" if rule.group == "muonh" else "adam"
    raise ValueError(f"group_of: there is no optimiser of kind {kind!r}; use muonh, adamw or muon")


def describe(config: OptimizerConfig, params: Any, table: Mapping[str, Rule] = HERO_TABLE) -> dict[str, Any]:
    """The groups of a run as a table of the logbook: leaf, shape, group, how its norm is kept, decay, peak rate."""
    leaves, rows = by_path(params), []
    for path, rule in rules_of(params, table).items():
        group, shape = group_of(rule, config.kind), leaves[path].shape
        kept = "free"
        if group in ("adamh", "muonh"):
            pooled = rule.experts and config.expert_hyperball == "pooled"
            kept = f"kept over {shape[-3]} experts" if pooled else "kept per matrix"
        decays = config.weight_decay > 0 and (rule.decays if config.kind == "muonh" else group != "adam")
        rows.append([path, "x".join(map(str, shape)), group, kept, "yes" if decays else "no", config.peak(group)])
    return {
        "title": "Optimiser groups",
        "columns": ["leaf", "shape", "group", "norm", "decays", "peak rate"],
        "rows": rows,
        "text": f"Kind {config.kind}. Every leaf is in exactly one group; checked before the first step.",
    }


def _require_matrix(path: str, leaf: Any, rule: Rule) -> None:
    stacked = path.startswith("layers.")  # a gain stacked over layers has two dims and is no matrix
    if leaf.ndim < 2 + stacked + rule.experts:
        what = "is a vector" if leaf.ndim < 2 + stacked else "has no dim of experts"
        raise ValueError(
            f"parameter {path!r} {tuple(leaf.shape)} is in group {rule.group!r}, which turns matrices"
            f"{' of every layer' if stacked else ''}, but this leaf {what}: correct its line in the table"
        )


def by_path(tree: Any) -> Leaves:
    """The leaves of a pytree by exact path, `layers.wq`, in the tree's own order. Absent (None) leaves do not
    appear.
    """
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def like(tree: Any, leaves: Leaves) -> Any:
    """A pytree shaped like `tree` with the leaves of `leaves` (path -> array)."""
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in by_path(tree)])


def spec_of(path: str) -> PartitionSpec:
    """How the parameter at `path` is split over a mesh, and with it its gradient and its moments.

    Raises ValueError for a parameter without a line in the table of the layout.
    """
    name = path.removeprefix("layers.")
    if name not in SPECS:
        raise ValueError(
            f"parameter {path!r} has no place on a mesh: name it in SPECS of noonsight/model/layout.py, "
            "or train on one device"
        )
    return SPECS[name]
