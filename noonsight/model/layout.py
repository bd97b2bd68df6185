"""How arrays are split over the mesh: one table, in the notation of the scaling book, read by whoever places an array.

`w[D_fsdp, F]` means: dim D of w is split over the mesh axes `fsdp` = (data, expert). Mesh axes: `replica` (racks;
pure data parallel), `data`, `expert` (inside a rack), `model` (tensor parallel), `context` (long sequences). A single
device is the mesh of all ones. Source of the assignment: Marin, #8435 (FSDP for dense matrices, experts split over
`expert`, small arrays replicated).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from noonsight.model.config import ModelConfig
from noonsight.model.params import Params, leaf_name, shapes

AXES = ("replica", "data", "expert", "model", "context")
FSDP = ("data", "expert")
BATCH = PartitionSpec(("replica", "data", "expert"), "context")  # tokens[B_batch, S_context], and segments, weights
EXTRA = PartitionSpec()  # pending_beta[L, E]: replicated

_WHOLE = PartitionSpec()
_INPUTS = PartitionSpec(None, FSDP, None)
_OUTPUTS = PartitionSpec(None, None, FSDP)
_EXPERTS = PartitionSpec(None, "expert", "data", None)
_SHARED = PartitionSpec(None, None, FSDP, None)

# Leaf of the parameter tree (without "layers.") -> its split. Every leaf is named: a new one must be placed on purpose.
SPECS: dict[str, PartitionSpec] = {
    "embed": _WHOLE,  # embed[V, D]: replicated, so that the lookup is local
    "head": PartitionSpec(FSDP, None),  # head[D_fsdp, V]
    "wq": _INPUTS,  # wq[L, D_fsdp, N*H]
    "wk": _INPUTS,  # wk[L, D_fsdp, K*H]
    "wv": _INPUTS,  # wv[L, D_fsdp, K*H]
    "wo": _OUTPUTS,  # wo[L, N*H, D_fsdp]
    "latent_down": _INPUTS,  # latent_down[L, D_fsdp, Z]
    "latent_up": _OUTPUTS,  # latent_up[L, Z, D_fsdp]
    "expert_gate": _EXPERTS,  # expert_gate[L, E_expert, Z_data, F]
    "expert_up": _EXPERTS,  # expert_up[L, E_expert, Z_data, F]
    "expert_down": _EXPERTS,  # expert_down[L, E_expert, F_data, Z]
    "shared_gate": _SHARED,  # shared_gate[L, J, D_fsdp, G]
    "shared_up": _SHARED,  # shared_up[L, J, D_fsdp, G]
    "shared_down": PartitionSpec(None, None, None, FSDP),  # shared_down[L, J, G, D_fsdp]
    "mlp_gate": _INPUTS,  # mlp_gate[L, D_fsdp, M]
    "mlp_up": _INPUTS,  # mlp_up[L, D_fsdp, M]
    "mlp_down": _OUTPUTS,  # mlp_down[L, M, D_fsdp]
    **dict.fromkeys(("router", "router_bias", "head_gate", "sconv_k", "sconv_attn", "sconv_moe"), _WHOLE),
    **dict.fromkeys(("embed_norm", "attn_norm", "moe_norm", "latent_norm", "final_norm", "q_norm", "k_norm"), _WHOLE),
    **{
        f"{gate}.{side}": _WHOLE
        for gate in ("embed_gate", "attn_gate", "moe_gate", "final_gate")
        for side in ("down", "up")
    },
}


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with the axes of `AXES`, absent ones of size 1. Raises ValueError for an unknown axis or a wrong number
    of devices.
    """
    if unknown := set(sizes) - set(AXES):
        raise ValueError(f"make_mesh: no mesh axis {sorted(unknown)}; the axes are {', '.join(AXES)}")
    shape = [sizes.get(axis, 1) for axis in AXES]
    if int(np.prod(shape)) != len(devices):
        raise ValueError(f"make_mesh: {sizes} needs {int(np.prod(shape))} devices, got {len(devices)}")
    return Mesh(np.asarray(devices).reshape(shape), AXES)


def param_specs(config: ModelConfig) -> Params:
    """A tree like the params of `config` with a PartitionSpec in place of each array."""
    return jax.tree.map_with_path(
        lambda path, _: SPECS[leaf_name(path).removeprefix("layers.")],
        shapes(config),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def param_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """The same as shardings of a mesh, for `jax.jit(..., out_shardings=...)` and `jax.device_put`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(config))


@dataclass(frozen=True)
class Layout:
    """How one device's code reaches the others. Without a mesh every question is answered by the device itself."""

    mesh: Mesh | None = None

    def size(self, *axes: str) -> int:
        """The product of the sizes of mesh axes; 1 without a mesh."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)


ALONE = Layout()
