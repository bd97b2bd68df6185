"""One experiment as the atlas sees it: the records of all its stages, and everything that could not be read.

A page must be possible after any failure, so reading here never raises for the content of a file: what is torn,
missing or of an unknown form becomes a sentence in `problems`, and the page shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from noonsight.logbook import read
from noonsight.logbook.record import (
    Event,
    ExperimentRecord,
    Prediction,
    Progress,
    Receipt,
    Run,
    Verdict,
)

T = TypeVar("T")
NOT_STAGES = {"site"}


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One file of `tables/`: a small table, or a text, that a page shows."""

    title: str = ""
    columns: list[str] = []
    rows: list[list[Any]] = []
    text: str = ""

    def records(self) -> list[dict[str, Any]]:
        """The rows as `{column: value}`."""
        return [dict(zip(self.columns, row)) for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What the logbook knows of one stage. `run` is None when the stage never started or its record is unreadable."""

    path: Path
    address: str
    run: Run | None = None
    events: list[Event] = field(default_factory=list)
    progress: Progress | None = None
    prediction: Prediction | None = None
    verdict: Verdict | None = None
    receipts: dict[str, Receipt] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        return self.run.facts if self.run else {}

    @property
    def status(self) -> str:
        if self.run:
            return self.run.status
        return "unreadable" if (self.path / "record.json").exists() else "waiting"

    @property
    def is_training(self) -> bool:
        """A stage with a metrics file trained something; it gets the run page."""
        return (self.path / "metrics.jsonl").exists()


@dataclass(frozen=True, kw_only=True)
class Voyage:
    """One experiment: its question, its stages by address in running order, and what could not be read."""

    root: Path
    name: str
    record: ExperimentRecord | None
    folders: dict[str, Folder]
    edges: list[tuple[str, str]]
    problems: list[str]

    def prediction_for(self, folder: Folder) -> Prediction | None:
        """The frozen prediction that this stage ran under, or, before it starts, the one that names it."""
        frozen = [other.prediction for other in self.folders.values() if other.prediction]
        if folder.run and folder.run.prediction_hash:
            return next((item for item in frozen if item.hash == folder.run.prediction_hash), None)
        return next((item for item in frozen if item.run == folder.address), None)

    def verdict_for(self, prediction: Prediction | None) -> Verdict | None:
        """The verdict on a prediction, once one exists."""
        verdicts = [folder.verdict for folder in self.folders.values() if folder.verdict]
        return next((item for item in verdicts if prediction and item.prediction_hash == prediction.hash), None)

    def ancestors(self, address: str) -> list[str]:
        """All stages that a stage was made from, nearest first."""
        found: list[str] = []
        frontier = [address]
        while frontier:
            parents = [start for here in frontier for start, end in self.edges if end == here]
            frontier = [parent for parent in dict.fromkeys(parents) if parent not in found and parent != address]
            found += frontier
        return found


def open_voyages(root: Path) -> list[Voyage]:
    """All experiments below `root`, the newest first. A folder counts when it holds a record of the logbook."""
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name not in NOT_STAGES)
    voyages = [open_voyage(root, name) for name in names if _is_experiment(root / name)]
    return sorted(voyages, key=lambda item: item.record.started_at if item.record else "", reverse=True)


def open_voyage(root: Path, name: str) -> Voyage:
    """Read all records of one experiment. Never raises for what a file contains."""
    folder, problems = root / name, []
    record = _attempt(problems, folder / "experiment.json", lambda _: read.experiment(folder))
    planned = [address for address in (record.stages if record else ()) if _is_folder_name(address, problems)]
    found = sorted(path.parent.name for path in folder.glob("*/record.json"))
    folders = {address: open_folder(folder / address) for address in dict.fromkeys([*planned, *found])}
    edges = [(str(start), str(end)) for start, end in record.edges] if record else []
    recorded = [
        (source["stage"], item.address)
        for item in folders.values()
        if item.run
        for source in item.run.inputs.values()
        if source.get("stage") in folders
    ]
    return Voyage(
        root=root,
        name=name,
        record=record,
        folders=folders,
        edges=list(dict.fromkeys([*edges, *recorded])),
        problems=problems,
    )


def open_folder(path: Path) -> Folder:
    """Read the records of one stage's folder; what cannot be read is named in `problems`."""
    problems: list[str] = []
    return Folder(
        path=path,
        address=path.name,
        run=_attempt(problems, path / "record.json", lambda _: read.run(path)),
        events=_attempt(problems, path / "events.jsonl", lambda _: list(read.events(path))) or [],
        progress=_attempt(problems, path / "progress.jsonl", lambda _: read.last_progress(path)),
        prediction=_attempt(problems, path / "prediction.json", lambda _: read.prediction(path)),
        verdict=_attempt(problems, path / "verdict.json", lambda _: read.verdict(path)),
        receipts=_each(problems, path / "receipts", Receipt),
        tables=_each(problems, path / "tables", Table),
        problems=problems,
    )


def read_series(folder: Folder, *, attempts: str = "surviving") -> dict[str, read.Series]:
    """The metrics of a stage by name; an unreadable file gives no series and one more problem."""
    return (
        _attempt(folder.problems, folder.path / "metrics.jsonl", lambda _: read.metrics(folder.path, attempts=attempts))
        or {}
    )


def _is_experiment(path: Path) -> bool:
    return (path / "experiment.json").exists() or any(path.glob("*/record.json"))


def _is_folder_name(address: str, problems: list[str]) -> bool:
    """An address becomes the name of a folder and of a page; one that would leave its place is no address."""
    sound = Path(address).name == address and not address.startswith(".")
    if not sound:
        problems.append(f"experiment.json names a stage {address!r}, which is no name of a folder")
    return sound


def _decode(path: Path, kind: type[T]) -> T:
    return msgspec.json.decode(path.read_bytes(), type=kind)


def _each(problems: list[str], folder: Path, kind: type[T]) -> dict[str, T]:
    items = {
        path.stem: _attempt(problems, path, lambda file: _decode(file, kind)) for path in sorted(folder.glob("*.json"))
    }
    return {name: item for name, item in items.items() if item is not None}


def _attempt(problems: list[str], path: Path, reader: Callable[[Path], T]) -> T | None:
    if not path.exists():
        return None
    try:
        return reader(path)
    except (OSError, ValueError, TypeError, KeyError, msgspec.MsgspecError) as error:
        problem = f"{path.parent.name}/{path.name} cannot be read: {error}"
        if problem not in problems:
            problems.append(problem)
        return None
