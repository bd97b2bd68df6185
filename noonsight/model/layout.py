"""How arrays are split over the mesh, and how one device's code reaches the others.

`w[D_fsdp, F]` means: dim D of w is split over the mesh axes `fsdp` = (data, expert). Mesh axes: `replica` (racks;
pure data parallel), `data`, `expert` (inside a rack), `model` (tensor parallel), `context` (long sequences). A single
device is the mesh of all ones. Source of the assignment: Marin, #8435 (FSDP for dense matrices, experts split over
`expert`, small arrays replicated).

The whole loss runs inside one `jax.shard_map` over the whole mesh, so the model is code for one device that asks a
`Layout` a few questions, and every collective of its program is written here or in an exchange. Its gradient follows:
what enters unsplit along an axis gets its cotangent summed over that axis, `all_gather` becomes `psum_scatter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from noonsight.model.config import ModelConfig
from noonsight.model.params import Params, leaf_name, shapes

AXES = ("replica", "data", "expert", "model", "context")
FSDP = ("data", "expert")
ROWS = ("replica", "data", "expert")  # split the sequences of a batch
TOKENS = (*ROWS, "context")  # split its tokens
BATCH = PartitionSpec(ROWS, "context")  # tokens[B_rows, S_context], and segments, weights
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

Tree = TypeVar("Tree")  # an array or a pytree of arrays


@dataclass(frozen=True)
class Layout:
    """How one device's code reaches the others. Without a mesh every question is answered by the device itself.

    All but `size`, `check` and `spread` are asked inside the function that `spread` was given.
    """

    mesh: Mesh | None = None

    def size(self, *axes: str) -> int:
        """The product of the sizes of mesh axes; 1 without a mesh."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    def spread(
        self, local: Callable[[Params, Any, Any], Any], config: ModelConfig, out: PartitionSpec = PartitionSpec()
    ) -> Callable[[Params, Any, Any], Any]:
        """`local(params, extra, batch)`, written for one device and its parts, as a function of the whole arrays.

        Its results are put together as `out` says; by default every device has the same. Raises ValueError, at the
        first call too, when the mesh cannot hold the arrays (`check`).
        """
        if self.mesh is None:
            return local
        self.check(config)
        specs = (param_specs(config), EXTRA, BATCH)
        # Nothing here is tracked as equal on all devices (check_vma): neither the C++ kernels nor Pallas can say so.
        spread = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)

        def whole(params: Params, extra: Any, batch: Any) -> Any:
            self.check(config, batch.tokens.shape)
            return spread(params, extra, batch)

        return whole

    def check(self, config: ModelConfig, batch: tuple[int, ...] | None = None) -> None:
        """Raises ValueError when the mesh cannot hold a model of `config` or a batch of shape [B, S], with every array
        and dim it does not divide.
        """
        if self.size("model") > 1:
            raise ValueError(
                f"the mesh axis model has size {self.size('model')}, but no matrix of this model is split over it "
                "(tensor parallelism is not built): give these devices to data, expert or context"
            )
        if faults := list(self._faults(config, batch)):
            raise ValueError(f"the mesh {self} does not fit: {'; '.join(faults)}")

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1) or "of one device"

    # What all devices have together. For sums of counts that may pass 2^31 give float32 (F11).

    def total(self, x: Tree) -> Tree:
        """The sums of arrays over the devices that split the tokens of the global batch."""
        return self._joined(jax.lax.psum, x)

    def mean(self, x: Tree) -> Tree:
        """The means over the same devices."""
        return self._joined(jax.lax.pmean, x)

    def lowest(self, x: Tree) -> Tree:
        """The minima over the same devices. No gradient."""
        return self._joined(jax.lax.pmin, x)

    def highest(self, x: Tree) -> Tree:
        """The maxima over the same devices. No gradient."""
        return self._joined(jax.lax.pmax, x)

    def rows_of_all(self, x: Array) -> Array:
        """x[T, ...] of each of the same devices, one after the other."""
        return self._gathered(x, TOKENS, 0)

    # Parameters

    def whole(self, name: str, leaf: Array) -> Array:
        """A leaf put together from its parts in this device's rack; of experts, only those of this device.

        `name` is that of SPECS; `leaf` may be without its leading dim of layers.
        """
        spec = tuple(SPECS[name])
        for dim, axes in enumerate(spec[len(spec) - leaf.ndim :] if spec else ()):
            if axes != "expert":
                leaf = self._gathered(leaf, _names(axes), dim)
        return leaf

    # The sequence, where the axis `context` splits it

    def start(self, length: int) -> Array | None:
        """The position of the first of the `length` tokens of each row that are here; None where the row is whole."""
        return None if self.size("context") == 1 else jax.lax.axis_index("context") * length

    def positions(self, length: int) -> Array:
        """The positions of the `length` tokens of each row that are here."""
        start = self.start(length)
        return jnp.arange(length) if start is None else jnp.arange(length) + start

    def sequence(self, x: Array) -> Array:
        """x[B, S, ...] of the whole rows, from x[B, S_context, ...]."""
        return self._gathered(x, ("context",), 1)

    def own(self, x: Array) -> Array:
        """The part x[B, S_context, ...] that is here of x[B, S, ...]."""
        if self.size("context") == 1:
            return x
        length = x.shape[1] // self.size("context")
        return jax.lax.dynamic_slice_in_dim(x, self.start(length), length, axis=1)

    def before(self, x: Array, count: int, fill: int = 0) -> Array | None:
        """The `count` columns of x[B, S_context, ...] before the first one here: [B, count, ...], `fill` before the
        start of the row. None where the row is whole.
        """
        if self.size("context") == 1 or count <= 0:
            return None
        return self._neighbour(x[:, x.shape[1] - count :], 1, fill)

    def after(self, x: Array, count: int, fill: int = 0) -> Array:
        """The `count` columns after the last one here, `fill` after the end of the row."""
        if self.size("context") == 1:
            return jnp.full_like(x[:, :count], fill)
        return self._neighbour(x[:, :count], -1, fill)

    def _neighbour(self, x: Array, step: int, fill: int) -> Array:
        """x of the device `step` places back along the sequence, `fill` where there is none."""
        size = self.size("context")
        pairs = [(here, here + step) for here in range(size) if 0 <= here + step < size]
        edge = jax.lax.axis_index("context") == (0 if step > 0 else size - 1)
        return jnp.where(edge, jnp.asarray(fill, x.dtype), jax.lax.ppermute(x, "context", pairs))

    def _joined(self, collective: Callable[[Any, tuple[str, ...]], Any], x: Tree) -> Tree:
        axes = self._split(TOKENS)
        return collective(x, axes) if axes else x

    def _gathered(self, x: Array, axes: tuple[str, ...], dim: int) -> Array:
        axes = self._split(axes)
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x

    def _split(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `axes` that split anything."""
        return tuple(axis for axis in axes if self.size(axis) > 1)

    def _faults(self, config: ModelConfig, batch: tuple[int, ...] | None) -> Iterator[str]:
        """One sentence for each dim that the mesh does not divide."""
        arrays = [("batch", batch, BATCH)] if batch else []
        sizes = jax.tree.leaves_with_path(shapes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))
        arrays += [(leaf_name(path), shape, _spec(path)) for path, shape in sizes]
        for name, shape, spec in arrays:
            for dim, (size, axes) in enumerate(zip(shape, spec)):
                if size % (parts := self.size(*_names(axes))):
                    split = " x ".join(self._split(_names(axes)))
                    yield (
                        f"dim {dim} of {name}{list(shape)} is {size}, which {split} = {parts} does not divide; "
                        f"make the {_kind_of_dim(name, axes)} a multiple of {parts}, or {split} smaller"
                    )
        here, reach = batch[1] // self.size("context") if batch else math.inf, config.sconv_kernel - 1
        if self.size("context") > 1 and here < reach:
            yield (
                f"context {self.size('context')} leaves {here} of the {batch[1]} tokens of a row on each device, but "
                f"short convolutions reach {reach} back; make the sequence longer, or context smaller"
            )


ALONE = Layout()


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
        lambda path, _: _spec(path), shapes(config), is_leaf=lambda leaf: isinstance(leaf, tuple)
    )


def param_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """The same as shardings of a mesh, for `jax.jit(..., out_shardings=...)` and `jax.device_put`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(config))


def _spec(path: tuple[Any, ...]) -> PartitionSpec:
    return SPECS[leaf_name(path).removeprefix("layers.")]


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _kind_of_dim(name: str, axes: str | tuple[str, ...] | None) -> str:
    if name == "batch":
        return "sequence length" if axes == "context" else "number of rows of a batch"
    if name.startswith("layers.expert_"):
        return "number of experts" if axes == "expert" else "latent and expert width"
    return "width"
