"""The order of a run's rows: from a row to its cell and back, by arithmetic alone.

A phase starts at a whole block. In a block, slots 0..block_rows-1 belong to the cells one after the other, as many
each as the mixture says; a keyed permutation of the slots is the order within the block. An *ordinal* numbers the rows
of one cell over the whole run, so an epoch goes on where a phase ends.

Invariant: `row_of(*cell_of(row)) == row`, and the ordinals of a cell are 0, 1, 2, ... without gap or repetition.
"""

from __future__ import annotations

import numpy as np

from noonsight.tokens.mixture import Mixture, spread
from noonsight.tokens.permutation import make_key, mix, permute, unpermute


def lay_out(mixture: Mixture, seed: int, num_rows: int | None) -> tuple[PhaseOrder, ...]:
    """The phases of a run of `num_rows` rows, each from the nearest whole block on; without it, one endless phase."""
    block = mixture.block_rows
    starts = [0 if num_rows is None else round(p.start_fraction * num_rows / block) * block for p in mixture.phases]
    ends = [*starts[1:], num_rows]
    before = np.zeros(len(mixture.cells), np.int64)
    phases = []
    for number, (plan, start, end) in enumerate(zip(mixture.phases, starts, ends)):
        if end is not None and start >= end:
            raise ValueError(
                f"phase {plan.name!r} would have no rows: the run has {num_rows} rows and a phase is whole "
                f"blocks of {block}. Use a smaller block_rows, a longer run, or fewer phases."
            )
        key = make_key("block", seed, number)
        phases.append(PhaseOrder(start, end, np.array(plan.rows, np.int64), block, key, before))
        if end is not None:
            before = before + phases[-1].served_until(end)
    return tuple(phases)


class PhaseOrder:
    """The rows `start` to `end` of a run, which share one set of counts. N cells, K blocks in a period."""

    def __init__(self, start: int, end: int | None, rows: np.ndarray, block_rows: int, key: int, before: np.ndarray):
        self.start = start
        self.end = end
        self._rows = rows  # i64[N], in a period
        self._before = before  # i64[N], served by earlier phases
        self._block_rows = block_rows
        self._key = np.uint64(key)
        self._counts = spread(rows, block_rows)  # i64[K, N]
        self._first_slot = np.cumsum(self._counts, axis=1) - self._counts  # i64[K, N]
        self._served = np.cumsum(self._counts, axis=0) - self._counts  # i64[K, N], before the block, in the period

    def cell_of(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cell and ordinal, both i64[R], of rows i64[R] of this phase."""
        block, position = np.divmod(row - self.start, self._block_rows)
        slot = permute(position, np.full_like(row, self._block_rows), self._block_key(block)).astype(np.int64)
        period, block = np.divmod(block, len(self._counts))
        cell = (self._first_slot[block] + self._counts[block] <= slot[:, None]).sum(axis=1)
        rank = slot - self._first_slot[block, cell]
        return cell, self._before[cell] + period * self._rows[cell] + self._served[block, cell] + rank

    def row_of(self, cell: int, ordinal: int) -> int | None:
        """The row that is the `ordinal`-th of a cell, or None when it lies in another phase."""
        ordinal -= int(self._before[cell])
        if ordinal < 0 or not self._rows[cell]:
            return None
        period, ordinal = divmod(ordinal, int(self._rows[cell]))
        block = int(np.searchsorted(self._served[:, cell], ordinal, side="right")) - 1
        slot = self._first_slot[block, cell] + ordinal - self._served[block, cell]
        block += period * len(self._counts)
        position = unpermute(np.array([slot]), np.array([self._block_rows]), self._block_key(np.array([block])))
        row = self.start + block * self._block_rows + int(position[0])
        return row if self.end is None or row < self.end else None

    def served_until(self, row: int) -> np.ndarray:
        """Rows of each cell, i64[N], that this phase serves before `row` of the run."""
        last = row if self.end is None else min(row, self.end)
        blocks, rest = divmod(max(0, last - self.start), self._block_rows)
        periods, block = divmod(blocks, len(self._counts))
        cells, _ = self.cell_of(np.arange(last - rest, last, dtype=np.int64))
        return periods * self._rows + self._served[block] + np.bincount(cells, minlength=len(self._rows))

    def _block_key(self, block: np.ndarray) -> np.ndarray:
        return mix(self._key ^ mix(block.astype(np.uint64) + np.uint64(1)))
