"""Reading the logbook: the files are the truth, everything here only looks at them.

No reader writes, and none needs the process that wrote: a record that says "running" while nobody holds its lock is
read as "interrupted". A torn last line is ignored; any other damage is an error that names file and line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from noonsight.logbook import claim, record
from noonsight.logbook.write import LogbookError, refusal

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over steps: four tuples of equal length, ordered by step (all attempts: as written)."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    attempts: tuple[int, ...]
    at: tuple[str, ...]  # when it was written, ISO 8601 in UTC


def run(out: Path) -> record.Run | None:
    """The record of the stage folder `out`, or None where no stage ran."""
    found = _document(Path(out) / "record.json", record.Run)
    if found is not None and found.status == "running" and claim.holder(out, "stage") is None:
        return msgspec.structs.replace(found, status="interrupted")
    return found


def metrics(out: Path, *, attempts: Literal["surviving", "all"] = "surviving") -> dict[str, Series]:
    """Measurements of `out` by name.

    "surviving" is the line that led to the result: for each step the value of the highest attempt, and nothing of what
    a later attempt rewound past. "all" is every line in the order written.
    """
    assert attempts in ("surviving", "all"), attempts
    rows = _lines(Path(out) / "metrics.jsonl", dict[str, Any])
    if attempts == "surviving":
        rows = _surviving(rows)
    points: dict[str, list[tuple[int, float, int, str]]] = {}
    for row in rows:
        step, attempt, at = row.pop("step"), row.pop("attempt"), row.pop("at")
        for name, value in row.items():
            points.setdefault(name, []).append((step, float(value), attempt, at))
    return {name: _series(found) for name, found in points.items()}


def events(out: Path) -> list[record.Event]:
    """What happened in the stage folder `out`, in order."""
    return _lines(Path(out) / "events.jsonl", record.Event)


def last_progress(out: Path) -> record.Progress | None:
    """The latest heartbeat of `out`; reads only the end of the file, unless its lines are very long.

    A line that is no heartbeat is passed over: a damaged sign of life must not end the run that it is about.
    """
    try:
        with open(Path(out) / "progress.jsonl", "rb") as file:
            size, reach = file.seek(0, os.SEEK_END), 8192
            while True:
                file.seek(max(0, size - reach))
                for line in reversed(file.read(min(reach, size)).split(b"\n")[:-1]):
                    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                        return msgspec.json.decode(line, type=record.Progress, strict=False)
                if reach >= size:
                    return None
                reach *= 16
    except (FileNotFoundError, NotADirectoryError):
        return None


def placement(out: Path) -> record.Placement:
    """Where the stage of `out` runs; the default placement where nobody chose one."""
    return _document(Path(out) / "placement.json", record.Placement) or record.Placement()


def prediction(out: Path) -> record.Prediction | None:
    """The prediction that the stage of `out` froze, if it is a prediction stage."""
    return _document(Path(out) / "prediction.json", record.Prediction)


def verdict(out: Path) -> record.Verdict | None:
    """The verdict that the stage of `out` passed, if it is a verdict stage."""
    return _document(Path(out) / "verdict.json", record.Verdict)


def receipts(out: Path) -> list[record.Receipt]:
    """Proofs of parity that the stage of `out` left, by file name."""
    found = [_document(path, record.Receipt) for path in sorted(Path(out).glob("receipts/*.json"))]
    return [receipt for receipt in found if receipt is not None]


def tables(out: Path) -> dict[str, dict[str, Any]]:
    """Small tables of `out` by name: {"title", "columns", "rows", "text"}."""
    paths = sorted(Path(out).glob("tables/*.json"))
    return {path.stem: table for path in paths if (table := _document(path, dict[str, Any])) is not None}


def experiment(folder: Path) -> record.ExperimentRecord | None:
    """The record of one experiment folder, or None."""
    found = _document(Path(folder) / "experiment.json", record.ExperimentRecord)
    if found is not None and found.status == "running" and claim.holder(folder, "runner") is None:
        return msgspec.structs.replace(found, status="interrupted")
    return found


def experiments(root: Path) -> list[record.ExperimentRecord]:
    """All experiments of `root`, oldest first. Raises `LogbookError` when `root` cannot be read."""
    found = [experiment(path.parent) for path in _glob(Path(root), "*/experiment.json")]
    return sorted((each for each in found if each is not None), key=lambda each: (each.started_at, each.name))


def stage_folders(root: Path, name: str) -> list[Path]:
    """Folders of the stages that experiment `name` has now, in running order, whether they ran or not."""
    found = experiment(Path(root) / name)
    return [Path(root) / name / address for address in found.stages] if found else []


def all_folders(root: Path) -> list[Path]:
    """Every stage folder of `root` that has a record, cited by an experiment or not."""
    return [path.parent for path in _glob(Path(root), "*/*/record.json")]


def sql(root: Path, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Answer one SELECT over the logbook below `root`: tables runs, events, metrics, predictions, verdicts."""
    from noonsight.logbook.query import select  # DuckDB loads only here

    return select(root, query)


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of any file of the logbook, without a torn last one. Raises `LogbookError` naming the line."""
    return _lines(Path(path), dict[str, Any])


def _document(path: Path, kind: type[T]) -> T | None:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise refusal("read", path, error) from error
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.MsgspecError as error:
        raise LogbookError(
            f"cannot read {path}: {error}. It was changed by hand or by another version of noonsight: put it back, "
            f"or move the folder away and run its stage again."
        ) from None


def _lines(path: Path, kind: type[T]) -> list[T]:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise refusal("read", path, error) from error
    decoder = msgspec.json.Decoder(kind, strict=False)
    whole = data[: data.rfind(b"\n") + 1]
    try:
        return decoder.decode_lines(whole)
    except msgspec.MsgspecError:
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise LogbookError(f"cannot read {path}, line {number}: {error}. Cut that line out by hand.") from None
        raise


def _surviving(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first: dict[int, int] = {}  # attempt -> its first step
    for row in rows:
        first[row["attempt"]] = min(row["step"], first.get(row["attempt"], row["step"]))
    cut: dict[int, float] = {}  # attempt -> first step that a later attempt measured again
    bound = float("inf")
    for attempt in sorted(first, reverse=True):
        cut[attempt] = bound
        bound = min(bound, first[attempt])
    latest: dict[tuple[int, str], tuple[int, int]] = {}
    kept = [row for row in rows if row["step"] < cut[row["attempt"]]]
    for index, row in enumerate(kept):
        for name in row:
            key = (row["step"], name)
            latest[key] = max(latest.get(key, (-1, -1)), (row["attempt"], index))
    fixed = ("step", "attempt", "at")
    alive = [
        {name: value for name, value in row.items() if name in fixed or latest[row["step"], name][1] == index}
        for index, row in enumerate(kept)
    ]
    return sorted(alive, key=lambda row: row["step"])


def _series(points: list[tuple[int, float, int, str]]) -> Series:
    steps, values, attempts, at = zip(*points)
    return Series(steps=steps, values=values, attempts=attempts, at=at)


def _glob(root: Path, pattern: str) -> list[Path]:
    try:
        os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refusal("read", root, error) from error
    return sorted(root.glob(pattern))
