"""The mixture: how many rows of each cell are in every block, exactly, from the first block on.

A *block* is `block_rows` rows of training, a *period* a number of blocks. Weights become whole rows per period (largest
remainder), and the blocks of a period share them out by largest remainder again, each cell's deficit carried to the
next block. Nothing is drawn at random: a plan can be read, and the cell of row one billion is found without counting.

Invariants (q = rows so far x weight, at the end of any block):
- every block has exactly `block_rows` rows and every period exactly the planned rows of each cell;
- a cell of weight > 0 is served in the first block of every phase: none starves (Marin, issue #8373);
- a cell is never ahead of q by more than one row, nor behind by more than the number of cells.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from noonsight.logbook.record import Artifact, Record, encode
from noonsight.logbook.write import write_atomic
from noonsight.tokens.store import CellEntry, Store, open_store

SCHEMA = 1
MIN_PERIOD_BLOCKS, MAX_PERIOD_BLOCKS = 16, 4096


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training with weights of its own: by rule, or cell by cell."""

    name: str = "main"
    start_fraction: float = 0.0  # of the run
    start_step: int | None = None  # instead of the fraction; needs MixtureConfig.run_steps
    quality_tilt: float = 0.0  # weight is proportional to tokens * exp(tilt * level); 0 is proportional
    weights: tuple[tuple[str, float], ...] = ()  # (cell, weight) of every cell, instead of the rule


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """What is mixed. The seed belongs to the run, not to the mixture."""

    phases: tuple[Phase, ...] = (Phase(),)
    run_tokens: int | None = None  # of the longest run that will use the mixture; without it epochs are not capped
    run_steps: int | None = None  # of that run; only for phases that start at a named step
    max_epochs: float = 8.0  # a cell that would repeat more often gives its weight to the others
    simulate_epochs: bool = (
        False  # a shorter run sees each cell cut down, so that it repeats data as the longest run will
    )
    block_rows: int = 256


class PhasePlan(Record, kw_only=True):
    """A phase, ready to serve."""

    name: str
    start_fraction: float
    rows: tuple[int, ...]  # rows of each cell in one period; the realised weight is rows / period_rows


class Mixture(Record, kw_only=True):
    """`mixture.json`."""

    schema: int = SCHEMA
    store: str  # digest of the store it was planned for
    block_rows: int
    period_blocks: int
    run_tokens: int | None
    max_epochs: float
    simulate_epochs: bool
    cells: tuple[str, ...]  # in the order of the store
    phases: tuple[PhasePlan, ...]

    @property
    def period_rows(self) -> int:
        """Rows after which the counts repeat."""
        return self.block_rows * self.period_blocks


def plan_mixture(config: MixtureConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: turns rule or weights into whole rows per period and writes `mixture.json`.

    Input: `store`. Raises ValueError on an unknown or unnamed cell, a weight that is not a finite number >= 0, phases
    out of order, a block too small to hold every cell, or a run so long that the cells cannot keep to `max_epochs`.
    """
    store = open_store(inputs["store"])
    cells = store.manifest.splits["train"].cells
    if config.simulate_epochs and config.run_tokens is None:
        raise ValueError("simulate_epochs needs run_tokens, the length of the run whose repetition is imitated")
    starts = _phase_starts(config)
    wanted = np.array([_weights(phase, cells) for phase in config.phases])
    lengths = np.diff([*starts, 1.0])
    if config.run_tokens is not None:
        wanted = _cap_epochs(wanted, lengths * config.run_tokens, cells, config.max_epochs)
    if (most := int((wanted > 0).sum(axis=1).max())) > config.block_rows:
        raise ValueError(
            f"block_rows {config.block_rows} cannot hold a row of each of {most} cells; set block_rows >= {most}"
        )
    blocks = _period_blocks(float(wanted[wanted > 0].min()), config.block_rows)
    rows = [apportion(weights, config.block_rows * blocks) for weights in wanted]
    mixture = Mixture(
        store=store.digest,
        block_rows=config.block_rows,
        period_blocks=blocks,
        run_tokens=config.run_tokens,
        max_epochs=config.max_epochs,
        simulate_epochs=config.simulate_epochs,
        cells=tuple(cell.name for cell in cells),
        phases=tuple(
            PhasePlan(name=phase.name, start_fraction=start, rows=tuple(int(n) for n in counts))
            for phase, start, counts in zip(config.phases, starts, rows)
        ),
    )
    realised = np.array(rows) / mixture.period_rows
    facts = {
        "num_cells": len(cells),
        "num_unused_cells": int((realised.max(axis=0) == 0).sum()),
        "weights": {p.name: dict(zip(mixture.cells, map(float, w))) for p, w in zip(config.phases, realised)},
    }
    epochs = None
    if config.run_tokens is not None:
        epochs = _epochs(realised, lengths * config.run_tokens, cells)
        _refuse_tiny_cells(epochs, cells, config)
        facts |= {"epochs": dict(zip(mixture.cells, map(float, epochs))), "max_epochs": float(epochs.max())}
    _write_table(out, mixture, cells, realised, epochs)
    write_atomic(out / "mixture.json", encode(mixture))
    return Artifact(facts=facts)


def read_mixture(folder: Path, store: Store) -> Mixture:
    """Reads `mixture.json`. Raises ValueError when it is missing, damaged, or was planned for another store."""
    file = folder / "mixture.json"
    try:
        mixture = msgspec.json.decode(file.read_bytes(), type=Mixture)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: run plan_mixture first") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is no mixture ({error}); restore it or run plan_mixture again") from error
    if mixture.schema != SCHEMA:
        raise ValueError(f"{file} has schema {mixture.schema}, this code reads {SCHEMA}; plan the mixture again")
    if mixture.store != store.digest:
        raise ValueError(
            f"{file} was planned for store {mixture.store}, but {store.folder} is {store.digest}: its cells may be "
            "others. Run plan_mixture again for this store."
        )
    return mixture


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers i64[N] that sum to `total` in the proportion of f64[N] `weights`, by largest remainder (Hamilton).

    A weight > 0 gets at least 1; equal remainders go to the first. `total` must be at least the number of weights > 0.
    """
    quota = weights / math.fsum(weights) * total
    return _fit((np.floor(quota)).astype(np.int64), quota - np.floor(quota), total, (weights > 0).astype(np.int64), 1.0)


def boundary_steps(batch_size: int, block_rows: int) -> int:
    """Steps from one place to the next where a step and a block end together: a phase may begin there exactly."""
    return block_rows // math.gcd(batch_size, block_rows)


def spread(rows: np.ndarray, block_rows: int) -> np.ndarray:
    """Counts i64[K, N] of N cells in the K blocks of a period, from the rows of each cell in the period, i64[N].

    Each block takes what its cells are owed: whole rows first, then by largest remainder. Integers only, so no drift.
    """
    period = int(rows.sum())
    served = np.zeros_like(rows)
    blocks = []
    for block in range(period // block_rows):
        owed = (block + 1) * block_rows * rows - served * period  # in rows / period
        least = (rows > 0).astype(np.int64) if block == 0 else np.zeros_like(rows)
        counts = _fit(owed // period, owed % period, block_rows, least, period)
        served = served + counts
        blocks.append(counts)
    assert (served == rows).all()
    return np.array(blocks)


def _fit(counts: np.ndarray, rest: np.ndarray, total: int, least: np.ndarray, unit: float) -> np.ndarray:
    """Raises `counts` to `least`, then adds to the largest rest or takes from the smallest until the sum is `total`."""
    raised = np.maximum(counts, least)
    rest = rest - (raised - counts) * unit
    counts = raised
    while (missing := total - int(counts.sum())) != 0:
        sign = 1 if missing > 0 else -1
        able = rest > 0 if sign > 0 else counts > least
        if not able.any():  # rounding of floats can leave a row for which no cell has a remainder
            able = least > 0
        order = np.argsort(-sign * rest, kind="stable")
        chosen = order[able[order]][: abs(missing)]
        counts[chosen] += sign
        rest[chosen] -= sign * unit
    return counts


def _write_table(
    out: Path, mixture: Mixture, cells: tuple[CellEntry, ...], weights: np.ndarray, epochs: np.ndarray | None
) -> None:
    columns = ["cell", "domain", "level", "tokens", *(f"weight in {phase.name}" for phase in mixture.phases)]
    rows = [
        [cell.name, cell.domain, cell.level, cell.num_tokens, *map(float, weights[:, n])]
        for n, cell in enumerate(cells)
    ]
    text = f"Each block of {mixture.block_rows} rows has whole rows of each cell, the same every {mixture.period_rows}."
    if epochs is not None:
        columns.append("epochs")
        rows = [[*row, float(number)] for row, number in zip(rows, epochs)]
        text += f" Epochs are those of a run of {mixture.run_tokens} tokens; the cap is {mixture.max_epochs}."
    table = {"title": "Mixture", "text": text, "columns": columns, "rows": rows}
    (out / "tables").mkdir(exist_ok=True)
    write_atomic(out / "tables" / "mixture.json", encode(table))


def _phase_starts(config: MixtureConfig) -> list[float]:
    starts = []
    for phase in config.phases:
        if phase.start_step is not None and config.run_steps is None:
            raise ValueError(
                f"phase {phase.name!r} starts at step {phase.start_step}: set run_steps, the length of the run"
            )
        starts.append(phase.start_fraction if phase.start_step is None else phase.start_step / config.run_steps)
    names = [phase.name for phase in config.phases]
    if len(set(names)) != len(names):
        raise ValueError(f"phases {names} share a name; each needs its own")
    if not starts or starts[0] != 0.0 or any(b <= a for a, b in zip(starts, [*starts[1:], 1.0])):
        raise ValueError(
            f"phases {names} start at {starts} of the run; the first must start at 0, the others ascend below 1"
        )
    return starts


def _weights(phase: Phase, cells: tuple[CellEntry, ...]) -> np.ndarray:
    names = [cell.name for cell in cells]
    if not phase.weights:
        level = np.array([cell.level for cell in cells], np.float64)
        weights = np.array([cell.num_tokens for cell in cells]) * np.exp(phase.quality_tilt * (level - level.max()))
        return weights / weights.sum()
    given = dict(phase.weights)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the store has {names}"
            raise ValueError(f"phase {phase.name!r} weighs cell {name!r}, which is not in the store{hint}")
    if missing := sorted(set(names) - set(given)):
        raise ValueError(f"phase {phase.name!r} gives no weight to {missing}; name every cell, with 0 to leave one out")
    weights = np.array([given[name] for name in names], np.float64)
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
        raise ValueError(f"phase {phase.name!r}: weights must be finite, >= 0 and not all 0, got {given}")
    return weights / weights.sum()


def _epochs(weights: np.ndarray, phase_tokens: np.ndarray, cells: tuple[CellEntry, ...]) -> np.ndarray:
    """Times each cell is seen, f64[N], from weights f64[P, N] and the tokens of each phase f64[P]."""
    return phase_tokens @ weights / np.array([cell.num_tokens for cell in cells])


def _cap_epochs(weights: np.ndarray, phase_tokens: np.ndarray, cells: tuple[CellEntry, ...], cap: float) -> np.ndarray:
    """Weights f64[P, N] under which no cell exceeds `cap` epochs; what a capped cell loses, the others share."""
    capped = np.zeros(len(cells), bool)
    while (over := (_epochs(weights, phase_tokens, cells) > cap * (1 + 1e-9)) & ~capped).any():
        epochs = _epochs(weights, phase_tokens, cells)
        weights = weights * np.where(over, cap / np.maximum(epochs, cap), 1.0)
        capped |= over
        free = weights[:, ~capped].sum(axis=1)
        if (free <= 0).any():
            available = sum(cell.num_tokens for cell in cells)
            raise ValueError(
                f"a run of {int(phase_tokens.sum())} tokens repeats the store ({available} tokens) more than "
                f"max_epochs {cap} times in some phase; add text, shorten the run, or raise max_epochs"
            )
        scale = (1 - weights[:, capped].sum(axis=1)) / free
        weights = np.where(capped, weights, weights * scale[:, None])
    return weights


def _refuse_tiny_cells(epochs: np.ndarray, cells: tuple[CellEntry, ...], config: MixtureConfig) -> None:
    """The smallest share is one row a period; a cell too small even for that would break the cap (1/8 is rounding)."""
    worst = int(epochs.argmax())
    if epochs[worst] > config.max_epochs * 9 / 8:
        raise ValueError(
            f"cell {cells[worst].name!r} has only {cells[worst].num_tokens} tokens: the smallest share a block of "
            f"{config.block_rows} rows allows repeats it {epochs[worst]:.1f} times in this run, and max_epochs is "
            f"{config.max_epochs}. Give it weight 0, or raise block_rows."
        )


def _period_blocks(smallest: float, block_rows: int) -> int:
    """Blocks in a period, a power of two: enough that the smallest weight is 8 rows or more, within bounds."""
    needed = 8 / (smallest * block_rows)
    return int(min(MAX_PERIOD_BLOCKS, max(MIN_PERIOD_BLOCKS, 2 ** math.ceil(math.log2(needed)))))
