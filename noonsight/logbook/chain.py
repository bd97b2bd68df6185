"""The ledger of predictions: an append-only chain in which no entry can be altered, dropped or slipped in unseen.

Each line holds the hash of the prediction, the hash of the entry before it and its own hash,
`hash = SHA-256(canonical JSON of {index, previous, prediction, at})`. Whoever knows the last hash can check all before
it. The chain proves order and content; the prediction itself lies in the folder of the stage that made it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

import msgspec

from noonsight.logbook import record
from noonsight.logbook.write import append_line, refusal

GENESIS = "0" * 64


class BrokenChain(ValueError):
    """An entry of the chain does not follow from those before it; the message names it."""


class Entry(record.Record, kw_only=True):
    """One line of `predictions.jsonl`."""

    index: int  # from 0
    previous: str  # `hash` of the entry before, or zeros
    prediction: str  # hash of the prediction
    at: str
    hash: str


def append(path: Path, prediction: record.Prediction) -> Entry:
    """Add `prediction` to the chain at `path` (created if absent) and return its entry.

    Verifies the whole chain first, under a lock that all processes of this machine share.
    Raises `BrokenChain`, and ValueError when the prediction's own hash does not recompute.
    """
    path = Path(path)
    if prediction.hash != content_hash(prediction):
        raise ValueError(
            f"the prediction of {prediction.metric} for {prediction.run} carries the hash {prediction.hash[:12]}..., "
            f"but its content hashes to {content_hash(prediction)[:12]}...: it was changed after it was hashed."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise refusal("append to", path, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        entries = verify(path)
        index, previous = len(entries), entries[-1].hash if entries else GENESIS
        entry = Entry(index=index, previous=previous, prediction=prediction.hash, at=record.now(), hash="")
        entry = msgspec.structs.replace(entry, hash=_entry_hash(entry))
        append_line(path, record.encode(entry))
        return entry
    finally:
        os.close(handle)


def verify(path: Path) -> list[Entry]:
    """Recompute every hash of the chain and return its entries (none if there is no file).

    A torn last line was never acknowledged and is not counted. Raises `BrokenChain`, naming the entry that fails.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    entries: list[Entry] = []
    for index, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines()):
        where = f"{path}, entry {index} (line {index + 1})"
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except msgspec.MsgspecError as error:
            raise BrokenChain(f"{where}: not an entry of the chain ({error}).") from None
        if entry.index != index:
            raise BrokenChain(f"{where}: says that it is entry {entry.index}; an entry is missing, added or moved.")
        if entry.previous != (entries[-1].hash if entries else GENESIS):
            raise BrokenChain(f"{where}: does not follow the entry before it; one of the two was changed.")
        if entry.hash != _entry_hash(entry):
            raise BrokenChain(f"{where}: its content does not match its hash; it was changed after it was written.")
        entries.append(entry)
    return entries


def content_hash(prediction: record.Prediction) -> str:
    """SHA-256 of the canonical JSON of the prediction without its field `hash`, in hex."""
    content = msgspec.to_builtins(prediction)
    del content["hash"]
    return hashlib.sha256(record.encode(content)).hexdigest()


def _entry_hash(entry: Entry) -> str:
    content = msgspec.to_builtins(entry)
    del content["hash"]
    return hashlib.sha256(record.encode(content)).hexdigest()
