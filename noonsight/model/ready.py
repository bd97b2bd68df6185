"""Parameters on their way into a forward pass: pending bias applied, cast, and put together from their parts.

Training, evaluation, decoding and export reach arrays through a `Ready` alone, which `prepare` makes, so none of them
can forget any of the three (F17). Cast and gathering happen at use, in a scan after the layer was sliced: what travels
between devices has the compute dtype, no cast copy of the tree exists, and gradients leave in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import GetAttrKey
from jaxtyping import Array

from noonsight.model.config import ModelConfig
from noonsight.model.layout import ALONE, Layout
from noonsight.model.moe import effective_bias
from noonsight.model.params import Params, is_precise, leaf_name

UNROLLED = 8
"""Layers of one turn of the scan where all of a layer is kept for its gradient: what is kept then stays where it is and
is not copied into a stack and out again, 5 to 17 % of a step on two cores. Recomputed layers keep little and gain
nothing.
"""


@dataclass(frozen=True)
class Ready:
    """Parameters as a forward pass may see them."""

    stored: Params  # as the optimiser has them, but for the pending bias
    config: ModelConfig
    layout: Layout

    def part(self, name: str) -> Any:
        """A field of `Params` that is no layer: an array, a gate, or None where the model has none."""
        return self._used(getattr(self.stored, name), GetAttrKey(name))

    def scan(self, one_layer: Callable[..., Any], x: Any, *scanned: Any, remat: str = "none") -> Any:
        """`jax.lax.scan` of one_layer(x, layer, *rest) -> (x, found) over the layers, with `scanned` stacked as they are.

        `remat` says what is kept of a layer for its backward pass: everything ("none"), its input ("block"), or its
        input in pinned host memory ("offload").
        """

        def step(x: Any, sliced: Any) -> Any:
            layer, *rest = sliced
            return one_layer(x, self._used(layer, GetAttrKey("layers")), *rest)

        unroll = UNROLLED if remat == "none" else 1
        return jax.lax.scan(_rematerialised(step, remat), x, (self.stored.layers, *scanned), unroll=unroll)

    def everything(self) -> Params:
        """The whole tree at once, for models that are small."""
        return self._used(self.stored)

    def _used(self, tree: Any, *lead: Any) -> Any:
        """`tree`, which stands at `lead` in `Params`, cast and whole."""

        def used(path: tuple[Any, ...], leaf: Array) -> Array:
            path = (*lead, *path)
            cast = leaf if is_precise(path) else leaf.astype(jnp.dtype(self.config.compute_dtype))
            return self.layout.whole(leaf_name(path).removeprefix("layers."), cast)

        return jax.tree.map_with_path(used, tree)


def prepare(params: Params, extra: dict[str, Array], config: ModelConfig, layout: Layout = ALONE) -> Ready:
    """The parameters a forward pass computes with. The bias is data, not trained: no gradient reaches it."""
    if "pending_beta" in extra:
        params = replace(params, layers=replace(params.layers, router_bias=effective_bias(extra["pending_beta"])))
    return Ready(params, config, layout)


def _rematerialised(step: Callable[[Any, Any], Any], remat: str) -> Callable[[Any, Any], Any]:
    """`step` of a scan that computes again in its backward pass what `remat` does not keep.

    The name stands on the layer's input: on the output it would do nothing, for a scan keeps the carry it was given
    (jax, #23869).
    """
    if remat == "none":
        return step
    if remat == "block":
        return jax.checkpoint(step)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["carry"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(lambda x, sliced: step(checkpoint_name(x, "carry"), sliced), policy=policy)
