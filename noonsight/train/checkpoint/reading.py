"""Restoring: find the newest checkpoint that can be trusted, and lay its arrays out as this run wants them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
import xxhash

from noonsight.logbook.record import CheckpointManifest
from noonsight.train.checkpoint import storage
from noonsight.train.checkpoint.storage import folder, folders, patiently, read_manifest, read_range, size_of
from noonsight.train.groups import by_path, like

CHUNK_BYTES = 64 << 20


class NoValidCheckpoint(RuntimeError):
    """Checkpoints exist, none of them verifies."""

    symptom = "no-checkpoint"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest checkpoint that verifies, and what had to be passed over to reach it."""

    path: Any
    manifest: CheckpointManifest
    rejected: tuple[str, ...]  # one reason per newer folder that did not verify


def newest(root: Any) -> Found | None:
    """The newest checkpoint of `root` that verifies, or None when none was ever completed.

    Raises NoValidCheckpoint, with the reason for each folder, when there are some but none can be trusted.
    """
    rejected: list[str] = []
    for path in reversed(folders(root)):
        reason = verify(path)
        if reason is None:
            return Found(path=path, manifest=read_manifest(path), rejected=tuple(rejected))
        rejected.append(f"{path.name}: {reason}")
    if rejected:
        raise NoValidCheckpoint(
            f"{root} holds {len(rejected)} checkpoints and none verifies ({'; '.join(rejected)}). "
            "Training does not start again from random weights: put a good copy back, or remove the folder "
            "`checkpoints` if the run shall begin anew."
        )
    return None


def verify(path: Any) -> str | None:
    """Why the folder is no checkpoint, or None when manifest, files and the checksum of every slice hold."""
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        return f"manifest.json cannot be read ({error})"
    if folder(path.parent, manifest.step).name != path.name:
        return f"manifest.json says step {manifest.step}"
    for name, fact in manifest.files.items():
        size = patiently(lambda name=name: size_of(path / name), storage.INVISIBLE_S if _is_remote(path) else 0.0)
        if size is None:
            return f"{name} is missing"
        if size != fact["bytes"]:
            return f"{name} has {size} bytes instead of {fact['bytes']}"
    for name, array in manifest.arrays.items():
        for part in array["slices"]:
            if _checksum(path / part["file"], part["offset"], _num_bytes(part, array)) != part["xxh3"]:
                return f"{name} does not match its checksum in {part['file']}"
    return None


def restore(path: Any, target: Any) -> Any:
    """The state kept in the folder `path`, as arrays laid out like `target` (arrays or ShapeDtypeStructs, with their
    shardings): each device reads the slices it needs. A float32 array may be restored as bfloat16, never the reverse.
    Counts of updates may stand elsewhere (`with_counts`).

    It does not verify (`newest` and `verify` do). Raises ValueError naming the leaves that are missing, unexpected, or of
    another shape or dtype.
    """
    wanted = by_path(target)
    held = with_counts(read_manifest(path).arrays, wanted)
    faults = [f"{name} is missing from the checkpoint" for name in wanted if name not in held]
    faults += [f"{name} is in the checkpoint but not in this run" for name in held if name not in wanted]
    for name in wanted.keys() & held.keys():
        faults += _difference(name, held[name], wanted[name])
    if faults:
        raise ValueError(
            f"cannot restore {path}: {'; '.join(sorted(faults)[:4])} ({len(faults)} in all). "
            "It belongs to another model or optimiser: give this run another name or version."
        )
    return like(target, {name: _place(path, held[name], leaf) for name, leaf in wanted.items()})


def with_counts(held: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """What is `held` by path, as an optimiser wants it that counts its updates in other places: weight decay, begun at a
    fork or a phase, counts from where Adam of its group has come, and one that has ended leaves no count behind.
    """
    found = {path: leaf for path, leaf in held.items() if path in wanted or not path.endswith(".count")}
    for path in wanted:
        if path not in held and path.endswith(".count"):
            group = path.partition(".inner_state.")[0] + ".inner_state."
            beside = [name for name in held if name.startswith(group) and name.endswith(".count")]
            found |= {path: held[beside[0]]} if beside else {}
    return found


def arrays(path: Any) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, whole, on the host."""
    manifest = read_manifest(path)
    return {name: _read(path, array, (slice(None),) * len(array["shape"])) for name, array in manifest.arrays.items()}


def _difference(name: str, have: dict[str, Any], want: Any) -> list[str]:
    shape, dtype = tuple(have["shape"]), _dtype(have["dtype"])
    if shape != tuple(want.shape):
        return [f"{name} is {dtype}{list(shape)}, this run has {want.dtype}{list(want.shape)}"]
    if dtype == want.dtype or (dtype == np.float32 and want.dtype == ml_dtypes.bfloat16):
        return []
    if dtype == ml_dtypes.bfloat16 and want.dtype == np.float32:
        return [f"{name} was kept as bfloat16 and cannot become the float32 master of this run: its digits are gone"]
    return [f"{name} is {dtype}, this run has {want.dtype}"]


def _place(path: Any, array: dict[str, Any], leaf: Any) -> jax.Array:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        return _read(path, array, index).astype(leaf.dtype, copy=False)

    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return jax.device_put(read((slice(None),) * len(leaf.shape)))
    placed = jax.make_array_from_callback(tuple(leaf.shape), sharding, read)
    assert placed.sharding.memory_kind == sharding.memory_kind, "a restored array left its kind of memory (F10)"
    return placed


def _read(path: Any, array: dict[str, Any], index: tuple[slice, ...]) -> np.ndarray:
    """One block of an array, put together from the slices that overlap it."""
    shape, dtype = array["shape"], _dtype(array["dtype"])
    bounds = [each.indices(size)[:2] for each, size in zip(index, shape)]
    block = np.empty([stop - start for start, stop in bounds], dtype)
    for part in array["slices"]:
        ranges = [
            (max(low, start), min(high, start + size))
            for (low, high), start, size in zip(bounds, part["start"], part["shape"])
        ]
        if any(low >= high for low, high in ranges):
            continue
        there = tuple(slice(low - start, high - start) for (low, high), start in zip(ranges, part["start"]))
        here = tuple(slice(low - begin, high - begin) for (low, high), (begin, _) in zip(ranges, bounds))
        raw = read_range(path / part["file"], part["offset"], _num_bytes(part, array))
        block[here] = np.frombuffer(raw, dtype).reshape(part["shape"])[there]
    return block


def _num_bytes(part: dict[str, Any], array: dict[str, Any]) -> int:
    return math.prod(part["shape"]) * _dtype(array["dtype"]).itemsize


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _checksum(file: Any, offset: int, num_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    for at in range(0, num_bytes, CHUNK_BYTES):
        digest.update(read_range(file, offset + at, min(CHUNK_BYTES, num_bytes - at)))
    return digest.hexdigest()


def _is_remote(path: Any) -> bool:
    return hasattr(path, "storage_options")
