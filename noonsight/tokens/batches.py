"""`batch(step)`: a pure function of (token store, mixture, seed, step).

Row i of a run is in block i // block_rows; the mixture says how many rows of each cell a block has and a keyed
permutation in which order. So the cell of row i, and how many rows of that cell came before it, follow without looking
at any other row. The n-th row of a cell is row n mod R of its stream, in an order of its own in every epoch n // R (a
cell that is used up starts over). Nothing is remembered between calls: resuming, replaying and asking what was trained
on are one call.

Rows are cut from the cell's contiguous stream: documents follow each other, each ended by EOS, and attention is kept
inside a document by `segments`. A stream of T tokens has R = T // S rows; the T mod S tokens left over are cut, at the
two ends of the stream in a proportion that changes with the epoch. A stream shorter than a row is one padded row.

Invariant: an epoch of a cell serves each token at most once and all but the T mod S cut tokens exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noonsight.tokens.mixture import Mixture, read_mixture
from noonsight.tokens.order import lay_out
from noonsight.tokens.permutation import make_key, mix, permute, unpermute
from noonsight.tokens.store import Store, StoreManifest, open_store


class Batch(NamedTuple):
    """One optimiser step's rows (contract 3). B rows, S positions."""

    tokens: np.ndarray  # i32[B, S]
    segments: np.ndarray  # i32[B, S]; EOS tokens before the position in its row, -1 on padding
    weights: np.ndarray  # f32[B, S]; 0 where the next token is not in the row, else 1


class Places(NamedTuple):
    """Where rows of a run come from. All i64[B]."""

    phase: np.ndarray
    cell: np.ndarray  # index into the cells of the train split
    epoch: np.ndarray  # of the cell
    start: np.ndarray  # position of the row's first token in train.bin


@dataclass(frozen=True, kw_only=True)
class HeldoutDocument:
    """A document that never trains, for bits per byte."""

    doc_uid: str
    domain: str
    tokens: np.ndarray  # i32[T], without EOS: exactly what stands for the text
    num_bytes: int  # of the text


def open_batches(
    store: Path, mixture: Path, *, seed: int, sequence_length: int, batch_size: int, num_steps: int | None = None
) -> Batches:
    """Opens the folders of a store and a mixture for one run of `num_steps` steps.

    `num_steps` is needed when the mixture has several phases or simulates epochs; the run is then cut into phases.
    Raises ValueError when a file is missing or damaged, the mixture belongs to another store, the run is longer than
    the mixture was planned for, or a phase would have no block.
    """
    opened = open_store(store)
    plan = read_mixture(mixture, opened)
    if sequence_length < 2 or batch_size < 1:
        raise ValueError(f"sequence_length {sequence_length} must be >= 2 and batch_size {batch_size} >= 1")
    if num_steps is None and (len(plan.phases) > 1 or plan.simulate_epochs):
        raise ValueError(f"{mixture}: its phases or simulated epochs depend on the length of the run: give num_steps")
    run_tokens = None if num_steps is None else num_steps * batch_size * sequence_length
    if run_tokens and plan.run_tokens and run_tokens > plan.run_tokens:
        raise ValueError(
            f"{mixture} was planned for runs of up to {plan.run_tokens} tokens and this run has {run_tokens}, so its "
            f"cap of {plan.max_epochs} epochs need not hold; plan it with run_tokens >= {run_tokens}"
        )
    return Batches(opened, plan, seed, sequence_length, batch_size, num_steps)


class Batches:
    """The batches of one run; made by `open_batches`. Safe to call from several threads: it holds no state."""

    def __init__(self, store: Store, mixture: Mixture, seed: int, length: int, batch_size: int, num_steps: int | None):
        self.store = store
        self.mixture = mixture
        self.sequence_length = length
        self.batch_size = batch_size
        self.num_steps = num_steps
        self._tokens = store.tokens("train")
        cells = store.manifest.splits["train"].cells
        self._cell_keys = np.array([make_key("cell", seed, cell.name) for cell in cells], np.uint64)
        self._cell_start = np.array([cell.start for cell in cells], np.int64)
        self._cell_tokens = np.array([cell.num_tokens for cell in cells], np.int64)
        if mixture.simulate_epochs and mixture.run_tokens:
            share = num_steps * batch_size * length / mixture.run_tokens
            self._cell_tokens = np.maximum(1, np.floor(self._cell_tokens * share).astype(np.int64))
        self._cell_rows = np.maximum(1, self._cell_tokens // length)
        self._phases = lay_out(mixture, seed, None if num_steps is None else num_steps * batch_size)
        self._phase_starts = np.array([phase.start for phase in self._phases])

    @property
    def manifest(self) -> StoreManifest:
        """The manifest of the store."""
        return self.store.manifest

    @property
    def num_steps_per_epoch(self) -> int:
        """Steps that have as many rows as all cells together: the length of an epoch if weights are proportional."""
        return max(1, int(self._cell_rows.sum()) // self.batch_size)

    @property
    def cut_tokens(self) -> dict[str, int]:
        """Tokens of each cell that one epoch does not serve: the last partial row."""
        cut = np.maximum(0, self._cell_tokens - self._cell_rows * self.sequence_length)
        return dict(zip(self.mixture.cells, map(int, cut)))

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step (the first is 0), or only the given rows of it: those that a host feeds."""
        places = self.places(step, rows)
        length = self.sequence_length
        tokens = np.zeros((len(places.cell), length), np.int32)
        filled = np.minimum(length, self._cell_tokens[places.cell])
        for row, (start, count) in enumerate(zip(places.start, filled)):
            tokens[row, :count] = self._tokens.read(start, count)
        ends = tokens == self.manifest.eos
        segments = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        position = np.arange(length)
        segments = np.where(position < filled[:, None], segments, -1).astype(np.int32)
        weights = (position < filled[:, None] - 1).astype(np.float32)
        return Batch(tokens, segments, weights)

    def sources(self, step: int) -> dict[str, tuple[float, float]]:
        """Cell -> (rows of the step's batch that come from it, rows that the mixture means it to have in a batch)."""
        places = self.places(step)
        served = np.bincount(places.cell, minlength=len(self.mixture.cells))
        meant = np.zeros(len(self.mixture.cells))
        for phase, count in zip(*np.unique(places.phase, return_counts=True)):
            rows = np.array(self.mixture.phases[phase].rows, np.float64)
            meant += count * rows / rows.sum()
        return {name: (float(got), float(want)) for name, got, want in zip(self.mixture.cells, served, meant)}

    def places(self, step: int, rows: slice = slice(None)) -> Places:
        """Cell, epoch and first position of the rows of a step."""
        if step < 0 or (self.num_steps is not None and step >= self.num_steps):
            end = "" if self.num_steps is None else f" and ends before step {self.num_steps}"
            raise ValueError(f"step {step} is outside the run, which starts at step 0{end}")
        index = np.arange(self.batch_size, dtype=np.int64)[rows] + np.int64(step) * self.batch_size
        phase = np.searchsorted(self._phase_starts, index, side="right") - 1
        cell, ordinal = np.zeros_like(index), np.zeros_like(index)
        for number in np.unique(phase):
            here = phase == number
            cell[here], ordinal[here] = self._phases[number].cell_of(index[here])
        epoch, within = np.divmod(ordinal, self._cell_rows[cell])
        key = self._epoch_key(cell, epoch)
        row = permute(within, self._cell_rows[cell], key).astype(np.int64)
        start = self._cell_start[cell] + self._offset(cell, key) + row * self.sequence_length
        return Places(phase, cell, epoch, start)

    def visits(self, cell: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(step, row) of every row of the run that holds one of the positions first to last - 1 of a cell."""
        end = self._run_rows(None)
        served = int(sum(phase.served_until(end)[cell] for phase in self._phases))
        rows, length = int(self._cell_rows[cell]), self.sequence_length
        for epoch in range(-(-served // rows)):
            key = self._epoch_key(np.array([cell]), np.array([epoch]))
            begin = int(self._cell_start[cell] + self._offset(np.array([cell]), key)[0])
            held = np.arange(max(0, (first - begin) // length), min(rows, -(-(last - begin) // length)), dtype=np.int64)
            for within in unpermute(held, np.full(held.shape, rows), key).astype(np.int64):
                for phase in self._phases:
                    if (row := phase.row_of(cell, epoch * rows + int(within))) is not None and row < end:
                        yield divmod(row, self.batch_size)

    def describe(self, step: int) -> dict[str, Any]:
        """Phase, and for each cell in the step its rows and its epoch, for pages."""
        places = self.places(step)
        rows = Counter(self.mixture.cells[cell] for cell in places.cell)
        epochs = {self.mixture.cells[cell]: int(epoch) for cell, epoch in zip(places.cell, places.epoch)}
        return {
            "step": step,
            "phase": self.mixture.phases[places.phase[0]].name,
            "cells": {name: {"rows": rows[name], "epoch": epochs[name]} for name in sorted(rows)},
        }

    def epochs(self, num_steps: int | None = None) -> dict[str, float]:
        """Times each cell is served in the first `num_steps` steps (default: in the run)."""
        end = self._run_rows(num_steps)
        served = sum(phase.served_until(end) for phase in self._phases)
        return dict(zip(self.mixture.cells, map(float, served / self._cell_rows)))

    def _run_rows(self, num_steps: int | None) -> int:
        num_steps = self.num_steps if num_steps is None else num_steps
        if num_steps is None:
            raise ValueError("this is counted over a run: open the batches with num_steps")
        return num_steps * self.batch_size

    def _epoch_key(self, cell: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        return mix(self._cell_keys[cell] ^ mix(epoch.astype(np.uint64) + np.uint64(1)))

    def _offset(self, cell: np.ndarray, key: np.ndarray) -> np.ndarray:
        """How many of the cut tokens lie before the first row: 0 to all of them."""
        cut = np.maximum(0, self._cell_tokens[cell] - self._cell_rows[cell] * self.sequence_length)
        return (mix(key) % (cut.astype(np.uint64) + np.uint64(1))).astype(np.int64)


def heldout(store: Path) -> list[HeldoutDocument]:
    """The held-out documents in the order of the store (by cell, then uid)."""
    opened = open_store(store)
    tokens = opened.tokens("heldout")
    spans = opened.spans("heldout").read(["start", "length", "doc_uid", "domain", "num_bytes"]).to_pylist()
    return [
        HeldoutDocument(
            doc_uid=span["doc_uid"],
            domain=span["domain"],
            tokens=tokens.read(span["start"], span["length"] - 1).astype(np.int32),
            num_bytes=span["num_bytes"],
        )
        for span in spans
    ]
