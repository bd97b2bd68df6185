"""The state that an attempt starts from: the newest that can be trusted, a fork of another run, or a fresh one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from noonsight.train.checkpoint.reading import newest, restore, verify, with_counts
from noonsight.train.checkpoint.storage import folders, read_manifest, remove
from noonsight.train.groups import by_path, like
from noonsight.train.recover.skips import why_given_up


def choose(root: Any, passed_over: Mapping[int, int], event: Callable[..., None]) -> int | None:
    """The step of the checkpoint below `root` to go on from, None where there is none.

    One that holds the effect of a step which is passed over since then (`recover.skips`) is given up and removed. Every
    one that had to be passed over is told of by `event`. Raises NoValidCheckpoint when there are some and none verifies.
    """
    for path in folders(root):
        with contextlib.suppress(OSError, ValueError):  # a damaged one is told of below
            manifest = read_manifest(path)
            if why := why_given_up(manifest, passed_over):
                remove(path)
                event("checkpoint-given-up", f"{path.name} is removed: {why}.", step=manifest.step)
    found = newest(root)
    if found is None:
        return None
    for reason in found.rejected:
        text = f"{reason}; the one before it is used."
        event("checkpoint-rejected", text, cause="corrupt checkpoint", step=found.manifest.step)
    return found.manifest.step


def initial_or_restored(
    init: Callable[[], Any], path: Any, fork: Any, event: Callable[..., None], shardings: Any = None
) -> Any:
    """The state of the checkpoint `path`, or that of `fork` (of another run), or `init()` where both are None, laid out in
    `shardings`. A state that another mesh kept is the same state. Raises ValueError when the fork does not verify.
    """
    if path is None and fork is None:
        return jax.jit(init, out_shardings=shardings)()
    target = jax.eval_shape(init)
    if shardings is not None:
        target = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), target, shardings
        )
    if path is not None:
        state = restore(path, target)
        event("restored", f"Went on from {path.name}.", step=int(state.step))
        return state
    if reason := verify(fork):
        raise ValueError(f"{fork}, from which this run shall go on, cannot be trusted: {reason}")
    state = restore(fork, target)
    event("forked", f"Went on from {fork.name} of {fork.parent.parent.name}.", step=int(state.step))
    return state


def carried(state: Any, shapes: Any) -> Any:
    """The state of a run as that of another optimiser of the same kind (`shapes`): the same arrays, each in its place.

    Raises ValueError naming what is missing.
    """
    wanted, have = by_path(shapes), by_path(state)
    held = with_counts(have, wanted)
    if missing := sorted(wanted.keys() - held.keys()):
        raise ValueError(f"the optimiser of this phase needs {', '.join(missing[:4])}, which the run does not have")
    return like(shapes, {path: leaf if path in have else leaf + 0 for path, leaf in held.items()})
