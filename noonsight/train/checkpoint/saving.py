"""Saving: copy the state off the device, then write it in the background.

The loop waits for the copy and for the save before, never for the disk. Each rank writes the slices that it alone holds;
rank 0 waits for all, writes the manifest last and gives the folder its name. Whatever kills whom in between, a folder
with a manifest is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np
import xxhash

from noonsight.logbook.record import CheckpointManifest, encode, now
from noonsight.train.checkpoint import reading
from noonsight.train.checkpoint.storage import (
    MANIFEST,
    Kind,
    StorageRefused,
    folder,
    folders,
    is_local,
    patiently,
    read_manifest,
    relabel,
    remove,
    require_space,
    sync,
    write_manifest,
)
from noonsight.train.groups import by_path

if TYPE_CHECKING:
    from noonsight.logbook.claim import Claim

CHUNK_BYTES = 1 << 20
REST = 10.0
"""While the loop goes on, the writer rests for so many times as it worked: on a machine whose cores all train, each
second of its work is one that a step waits for. Whoever waits for it hurries it."""
RANKS_S = 1800.0  # how long rank 0 waits for the parts of the others
BACKGROUND_NICE = 19
_C_LIBRARY, _WRITE_NOW = ctypes.CDLL(None), 2  # SYNC_FILE_RANGE_WRITE
_FORMAT_NAMES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}


class NonFiniteState(RuntimeError):
    """A state with a NaN or an infinity was about to be kept."""

    symptom = "bad-state"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A block of one array, as the rank that writes it holds it on the host."""

    path: str
    start: tuple[int, ...]
    of: tuple[int, ...]  # shape of the whole array
    data: np.ndarray


class Saver:
    """Saves in one background thread per rank. A save that failed is raised in the caller's thread, by the next `save`,
    `poll` or `join`. A context manager: leaving it finishes the save in flight. The first save of a process is read back
    and compared, so that a state that cannot be restored is found at once.
    """

    def __init__(
        self,
        root: Any,
        claim: Claim,
        *,
        attempt: int,
        on_saved: Callable[[Any, Kind], None],
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """`on_saved(path, kind)` is called in rank 0's background thread once a checkpoint is complete."""
        self._root, self._claim, self._attempt, self._on_saved = root, claim, attempt, on_saved
        self._rank, self._num_ranks = rank, num_ranks
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._proven = False
        self._temporaries: set[int] | None = None  # steps; None: nobody has looked yet
        self._hurry = threading.Event()
        self._slices: list[Slice] = []  # of the save before: their memory is used again

    def save(self, state: Any, *, step: int, kind: Kind, tokens: int) -> None:
        """Start keeping `state`. Raises the error of the save before."""
        self.join()
        slices = self._slices = to_host(state, self._slices)
        work = {"step": step, "kind": kind, "tokens": tokens, "rest": self._rest}
        self._hurry.clear()
        self._thread = threading.Thread(target=self._write, args=(slices, work), name=f"save-{step}")
        self._thread.start()

    def poll(self) -> None:
        """Raise the error of a save that has failed; return at once otherwise."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def join(self) -> None:
        """Wait for the save in flight, then raise its error if it had one."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
        self.poll()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Whatever ends the run, a save in flight is finished first; its own error counts only if there is no other."""
        if kind is None:
            self.join()
        elif self._thread is not None:
            self._hurry.set()
            self._thread.join()

    def _rest(self, worked_s: float) -> None:
        self._hurry.wait(REST * worked_s)

    def _write(self, slices: list[Slice], work: dict[str, Any]) -> None:
        _make_way()
        try:
            ranks = {"rank": self._rank, "num_ranks": self._num_ranks}
            path = write(self._root, slices, claim=self._claim, attempt=self._attempt, **ranks, **work)
            if path is None:
                return
            if not self._proven:
                if reason := reading.verify(path):
                    raise RuntimeError(f"the first checkpoint does not read back as it was written: {reason} in {path}")
                self._proven = True
            if self._temporaries is None:
                self._temporaries = _temporaries(self._root)
            self._temporaries -= _prune(self._root, self._temporaries, newest_kept=work["step"])
            if work["kind"] == "temporary":
                self._temporaries.add(work["step"])
            self._on_saved(path, work["kind"])
        except BaseException as error:  # handed to the caller's thread by `poll`
            self._error = error


def to_host(state: Any, before: Sequence[Slice] = ()) -> list[Slice]:
    """Own copies of the slices that this rank writes of every leaf: of all replicas of a slice, the first. A view would
    change under the writer when the next step reuses the donated buffers. They take the place of those of `before`, an
    earlier copy that nobody reads any more: fresh memory costs as much time as the copy.
    """
    slices, used = [], {(each.path, each.start, each.data.shape, each.data.dtype): each.data for each in before}
    for path, leaf in by_path(state).items():
        if not isinstance(leaf, jax.Array):
            leaf = np.asarray(leaf)
            slices.append(Slice(path=path, start=(0,) * leaf.ndim, of=leaf.shape, data=np.array(leaf, copy=True)))
            continue
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                start = tuple(index.indices(size)[0] for index, size in zip(shard.index, leaf.shape))
                fresh = np.asarray(shard.data)
                data = used.get((path, start, fresh.shape, fresh.dtype))
                data = np.empty_like(fresh, order="C") if data is None else data
                np.copyto(data, fresh)
                slices.append(Slice(path=path, start=start, of=leaf.shape, data=data))
    return slices


def write(
    root: Any,
    slices: list[Slice],
    *,
    step: int,
    kind: Kind,
    tokens: int,
    claim: Claim,
    attempt: int,
    rank: int = 0,
    num_ranks: int = 1,
    rest: Callable[[float], object] = lambda worked_s: None,
) -> Any:
    """Write one checkpoint, or one rank's part of it, blocking; returns its folder in rank 0, None in the others. A valid
    one of the same step is kept, at the stronger kind.

    Raises NonFiniteState before there is a manifest, Fenced when another process owns the run by now, StorageRefused
    when the storage takes no writes, TimeoutError naming the ranks whose part is missing.
    """
    claim.check()
    final = folder(root, step)
    if num_ranks == 1 and (final / MANIFEST).exists():
        if reading.verify(final) is None:
            if kind != "temporary":
                relabel(final, kind)
            return final
        remove(final)
    work = final.with_name(final.name + ".tmp") if is_local(final) else final
    with _refusals(root):
        require_space(root, sum(each.data.nbytes for each in slices) + CHUNK_BYTES)
        work.mkdir(parents=True, exist_ok=True)
        name = f"part_{rank:05d}_of_{num_ranks:05d}_f{claim.fence}"
        described = _write_part(work / f"{name}.safetensors", slices, step, rest)
        if rank > 0:
            _publish(work / f"{name}.json", described)
            return None
        parts = [described, *(_await_part(work, other, num_ranks, claim.fence) for other in range(1, num_ranks))]
        manifest = CheckpointManifest(
            step=step,
            kind=kind,
            attempt=attempt,
            fence=claim.fence,
            arrays=_joined(parts),
            files={part["file"]: {"bytes": part["bytes"]} for part in parts},
            tokens=tokens,
            at=now(),
        )
        _tidy(work, manifest)
        claim.check()
        return _complete(work, final, manifest)


def _write_part(file: Any, slices: list[Slice], step: int, rest: Callable[[float], object]) -> dict[str, Any]:
    """One rank's arrays as a safetensors file: 8 bytes of header size, the header as JSON, then the raw arrays."""
    header, offset = {}, 0
    for number, each in enumerate(slices):
        header[f"{each.path}|{number}"] = {
            "dtype": _FORMAT_NAMES[each.data.dtype.name],
            "shape": list(each.data.shape),
            "data_offsets": [offset, offset + each.data.nbytes],
        }
        offset += each.data.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    begin, found = 8 + len(head), []
    with file.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        stream.flush()
        for each in slices:
            flat = np.ascontiguousarray(each.data).reshape(-1)
            digest, raw = xxhash.xxh3_128(), flat.view(np.uint8)
            for at in range(0, raw.size, CHUNK_BYTES):
                began = time.perf_counter()
                chunk = memoryview(raw[at : at + CHUNK_BYTES])
                _require_finite(chunk, flat.dtype, each.path, step)
                digest.update(chunk)
                stream.write(chunk)
                if is_local(file):
                    _start_writing(stream, begin + at, len(chunk))
                rest(time.perf_counter() - began)
            found.append(
                {
                    "path": each.path,
                    "dtype": each.data.dtype.name,
                    "of": list(each.of),
                    "start": list(each.start),
                    "shape": list(each.data.shape),
                    "file": file.name,
                    "offset": begin,
                    "xxh3": digest.hexdigest(),
                }
            )
            begin += each.data.nbytes
        stream.flush()
        if is_local(file):
            os.fsync(stream.fileno())
    return {"file": file.name, "bytes": begin, "slices": found}


def _start_writing(stream: Any, start: int, size: int) -> None:
    """Let the disk begin with these bytes while the next are made ready (Linux): fsync finds little left to do, which
    takes a third off the time of a save.
    """
    if (begin := getattr(_C_LIBRARY, "sync_file_range", None)) is not None:
        stream.flush()
        begin(stream.fileno(), ctypes.c_int64(start), ctypes.c_int64(size), _WRITE_NOW)


def _require_finite(chunk: memoryview, dtype: np.dtype, path: str, step: int) -> None:
    """A sum is finite unless a part of it is not, or it overflows: then every number is looked at."""
    if not jax.numpy.issubdtype(dtype, np.inexact):
        return
    flat = np.frombuffer(chunk, dtype)
    with np.errstate(all="ignore"):
        if np.isfinite(flat.sum(dtype=np.float32)) or np.isfinite(flat.astype(np.float32)).all():
            return
    raise NonFiniteState(
        f"the state after {step} steps holds non-finite numbers in {path}; it is not saved, the checkpoint before it stands"
    )


def _publish(file: Any, described: dict[str, Any]) -> None:
    """Tell rank 0 that a part is whole: the description appears at once or not at all."""
    if not is_local(file):
        file.write_bytes(encode(described))
        return
    temporary = file.with_name(file.name + ".new")
    temporary.write_bytes(encode(described))
    os.replace(temporary, file)


def _await_part(work: Any, rank: int, num_ranks: int, fence: int) -> dict[str, Any]:
    name = f"part_{rank:05d}_of_{num_ranks:05d}_f{fence}.json"

    def look() -> dict[str, Any] | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((work / name).read_bytes())
        return None

    found = patiently(look, RANKS_S)
    if found is None:
        raise TimeoutError(
            f"rank {rank} has not written its part of {work.name} within {RANKS_S:.0f} s ({name} is missing); the "
            "checkpoint before it stands"
        )
    return found


def _joined(parts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Array -> its shape, dtype and slices, of all parts. Raises AssertionError when slices do not add up to it."""
    arrays: dict[str, dict[str, Any]] = {}
    for part in parts:
        for each in part["slices"]:
            known = arrays.setdefault(each["path"], {"shape": each["of"], "dtype": each["dtype"], "slices": []})
            known["slices"].append({key: each[key] for key in ("file", "offset", "start", "shape", "xxh3")})
    for path, array in arrays.items():
        held = sum(int(np.prod(each["shape"])) for each in array["slices"])
        assert held == int(np.prod(array["shape"])), f"{path}: its slices have {held} numbers of {array['shape']}"
    return arrays


def _tidy(work: Any, manifest: CheckpointManifest) -> None:
    """Remove what earlier attempts and the ranks' descriptions left beside the parts."""
    for file in list(work.iterdir()):
        if file.name not in manifest.files:
            file.unlink()


def _complete(work: Any, final: Any, manifest: CheckpointManifest) -> Any:
    write_manifest(work, manifest)
    if work == final:
        return final
    if final.exists():
        remove(final)
    sync(work)
    os.rename(work, final)
    sync(final.parent)
    return final


def _temporaries(root: Any) -> set[int]:
    """The steps of the temporary checkpoints that are there."""
    found = set()
    for path in folders(root):
        with contextlib.suppress(OSError, ValueError):  # what cannot be read is left for whoever looks into it
            if (manifest := read_manifest(path)).kind == "temporary":
                found.add(manifest.step)
    return found


def _prune(root: Any, temporaries: set[int], *, newest_kept: int) -> set[int]:
    """Remove what a newer checkpoint has made needless: older temporaries, whose steps are returned, and torn folders.

    One that was made permanent meanwhile (a fork goes on from it) stays (F25).
    """
    old = {step for step in temporaries if step < newest_kept}
    for step in old:
        with contextlib.suppress(OSError, ValueError):
            if read_manifest(folder(root, step)).kind == "temporary":
                remove(folder(root, step))
    if is_local(root):
        for path in root.glob("step_*.tmp"):
            remove(path)
    return old


@contextlib.contextmanager
def _refusals(root: Any) -> Iterator[None]:
    """An error of the storage as one message that says what to do."""
    try:
        yield
    except (StorageRefused, TimeoutError):
        raise
    except OSError as error:
        refused = StorageRefused(
            f"a checkpoint cannot be written to {root}: {error.strerror or error}. The one before it is safe; the run goes "
            "on when the storage takes writes again"
        )
        refused.errno = error.errno
        raise refused from error


def _make_way() -> None:
    """Let the writing thread have what the training leaves over (Linux gives each thread a priority of its own)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)
