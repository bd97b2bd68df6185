"""From a position in training to the bytes it came from, and from a document to the steps that trained on it.

`batch(step)` is a pure function, so no log of what was served is needed: the place of a token in the store follows from
the step, its document from the spans, its bytes from the lengths of the tokens before it. The other way every link is
inverted, permutations included. (Marin's token store keeps no document ids, so this question has no answer there.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from noonsight.tokens.batches import open_batches
from noonsight.tokens.store import Store


@dataclass(frozen=True, kw_only=True)
class Position:
    """One token of one step, and where it comes from."""

    doc_uid: str
    source: str
    file: str
    start: int  # byte range in `file`: of the token when `exact`, else of the whole document
    end: int
    exact: bool  # the document's text is its bytes in `file`, unchanged
    text_start: int  # byte range of the token in the document's text; empty for EOS
    text_end: int
    token: int
    piece: str  # the token for a reader's eyes
    cell: str
    domain: str
    epoch: int  # of the cell, from 0
    position: int  # in train.bin


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A row of a step that held at least one token of a document."""

    step: int
    row: int


def trace(
    store: Path,
    mixture: Path,
    *,
    seed: int,
    sequence_length: int,
    batch_size: int,
    step: int,
    row: int,
    col: int,
    num_steps: int | None = None,
) -> Position:
    """Where the token at (row, col) of the batch of `step` comes from. The first arguments are those of `open_batches`.

    Raises ValueError when the step, row or column is outside the run, or the position is padding.
    """
    batches = open_batches(
        store, mixture, seed=seed, sequence_length=sequence_length, batch_size=batch_size, num_steps=num_steps
    )
    if not (0 <= row < batch_size and 0 <= col < sequence_length):
        raise ValueError(f"row {row}, column {col} is outside a batch of {batch_size} x {sequence_length}")
    one = slice(row, row + 1)
    if batches.batch(step, one).segments[0, col] < 0:
        raise ValueError(f"step {step}, row {row}, column {col} is padding: the cell is shorter than a row")
    places = batches.places(step, one)
    position = int(places.start[0]) + col
    span = _span_at(batches.store.spans("train"), position)
    tokenizer = batches.store.tokenizer()
    tokens = batches.store.tokens("train").read(span["start"], position + 1 - span["start"])
    lengths = tokenizer.byte_lengths[tokens].astype(np.int64)
    text_end = int(lengths.sum())
    text_start = text_end - int(lengths[-1])
    exact = span["num_bytes"] == span["text_end"] - span["text_start"]
    return Position(
        doc_uid=span["doc_uid"],
        source=span["source"],
        file=span["file"],
        start=span["text_start"] + (text_start if exact else 0),
        end=span["text_start"] + text_end if exact else span["text_end"],
        exact=exact,
        text_start=text_start,
        text_end=text_end,
        token=int(tokens[-1]),
        piece=tokenizer.name(int(tokens[-1])),
        cell=span["cell"],
        domain=span["domain"],
        epoch=int(places.epoch[0]),
        position=position,
    )


def where(
    store: Path, mixture: Path, *, seed: int, sequence_length: int, batch_size: int, num_steps: int, uid: str
) -> list[Visit]:
    """The rows of the run that held tokens of document `uid`, in order; empty when it never trained.

    Raises ValueError when the document is not in the store.
    """
    batches = open_batches(
        store, mixture, seed=seed, sequence_length=sequence_length, batch_size=batch_size, num_steps=num_steps
    )
    span = _span_of(batches.store, uid)
    if span is None:
        return []
    cell = batches.mixture.cells.index(span["cell"])
    visits = batches.visits(cell, span["start"], span["start"] + span["length"])
    return [Visit(step=step, row=row) for step, row in sorted(visits)]


def _span_at(spans: pq.ParquetFile, position: int) -> dict:
    """The span that holds a position: the row group by its statistics, the row by bisection."""
    starts = [spans.metadata.row_group(group).column(0).statistics.min for group in range(spans.num_row_groups)]
    table = spans.read_row_group(int(np.searchsorted(starts, position, side="right")) - 1)
    row = int(np.searchsorted(table.column("start").to_numpy(), position, side="right")) - 1
    return table.slice(row, 1).to_pylist()[0]


def _span_of(store: Store, uid: str) -> dict | None:
    """The span of a document in the train split; None when it is held out."""
    for split in ("train", "heldout"):
        found = pq.read_table(store.folder / f"{split}.spans.parquet", filters=[("doc_uid", "==", uid)]).to_pylist()
        if found:
            return found[0] if split == "train" else None
    raise ValueError(f"document {uid} is not in the store {store.folder}: it was not kept; the ledger says why")
