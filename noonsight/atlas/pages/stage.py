"""The page of any stage: what it is for, what came out, what it was made from. The run page begins from the same facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from noonsight.atlas import story
from noonsight.atlas.page import render_page, stage_link
from noonsight.atlas.voyage import Folder, Voyage, open_voyage


def collect(root: Path, *, experiment: str, stage: str, voyage: Voyage | None = None) -> dict[str, Any]:
    """All that the logbook says of one stage. `voyage` saves reading the experiment again."""
    voyage = voyage or open_voyage(root, experiment)
    data = describe(voyage, voyage.folders[stage])
    return {**data, "sentence": _sentence(voyage.folders[stage])}


def render(data: dict[str, Any]) -> str:
    """One self-contained HTML file."""
    return render_page("stage.html", data)


def describe(voyage: Voyage, folder: Folder) -> dict[str, Any]:
    """What every stage's page shows: identity, facts, tables, receipts, lineage, config, files, problems."""
    run = folder.run
    return {
        "schema": 1,
        "kind": "stage",
        "experiment": voyage.name,
        "stage": folder.address,
        "name": folder.address.split("@")[0],
        "purpose": run.sentence if run else "",
        "status": folder.status,
        "error": run.error if run else None,
        "seconds": run.seconds if run else None,
        "started_at": run.started_at if run else None,
        "ended_at": run.ended_at if run else None,
        "facts": outline(run.facts) if run else [],
        "tables": [table(folder, name) for name in folder.tables],
        "receipts": [{"name": name, **_plain(receipt)} for name, receipt in folder.receipts.items()],
        "events": [_plain(event) for event in folder.events],
        "lineage": lineage(voyage, folder),
        "identity": _identity(folder),
        "config": outline(run.config) if run else [],
        "files": [{"path": path, **about} for path, about in sorted(run.files.items())] if run else [],
        "code": sorted(run.code.items()) if run else [],
        "machine": flatten(run.machine) if run else [],
        "problems": [*folder.problems, *voyage.problems],
        "neighbours": _neighbours(voyage, folder),
        "as_of": as_of([folder]),
        "charts": None,
    }


def table(folder: Folder, name: str) -> dict[str, Any]:
    """One table as a page shows it; a column is set as figures when it holds only numbers."""
    found = folder.tables[name]
    figures = [
        all(isinstance(row[place], (int, float)) for row in found.rows if place < len(row))
        for place in range(len(found.columns))
    ]
    return {
        "name": name,
        "title": found.title or name,
        "columns": found.columns,
        "rows": found.rows,
        "text": found.text,
        "figures": figures,
    }


def lineage(voyage: Voyage, folder: Folder) -> dict[str, Any]:
    """What a stage was made from, nearest first, and what was made from it; each by address and fingerprint."""
    above = [_citizen(voyage, address, folder) for address in voyage.ancestors(folder.address)]
    below = [_citizen(voyage, end, folder) for start, end in voyage.edges if start == folder.address]
    return {"made_from": above, "made_into": below}


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested facts or config as rows (path, plain value)."""
    if isinstance(value, dict) and value:
        return [row for key, item in value.items() for row in flatten(item, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, (list, tuple)):
        return [(prefix, ", ".join(story.exact(item) for item in value) if value else "none")]
    return [(prefix, value if value != {} else "none")]


def outline(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Plain values first, under no title, then one titled group for each nested one; a page folds the long groups."""
    plain = {name: value for name, value in values.items() if not isinstance(value, dict) or not value}
    nested = {name: value for name, value in values.items() if name not in plain}
    groups = [{"title": "", "rows": flatten(plain)}] if plain else []
    return groups + [{"title": name, "rows": flatten(value)} for name, value in nested.items()]


def as_of(folders: list[Folder]) -> str | None:
    """The latest moment that the records speak of; a page is dated by its data, not by when it was rendered."""
    times = [time for folder in folders if folder.run for time in (folder.run.started_at, folder.run.ended_at) if time]
    times += [folder.progress.at for folder in folders if folder.progress]
    return max(times, default=None)


def _sentence(folder: Folder) -> str:
    run = folder.run
    if run is None:
        return "Its record cannot be read." if folder.problems else "Not started: it waits for its inputs."
    match run.status:
        case "done":
            return f"Done in {story.duration(run.seconds)}."
        case "failed":
            return f"Failed after {story.duration(run.seconds)}: {story.first_line(run.error)}"
        case "interrupted":
            return f"Interrupted after {story.duration(run.seconds)}; the same command goes on."
        case "running":
            at = folder.progress
            return f"Running: {at.step:,} of {at.of:,} {at.unit}." if at and at.of else "Running."
    return "Not started: it waits for its inputs."


def _identity(folder: Folder) -> list[tuple[str, Any]]:
    run = folder.run
    if run is None:
        return []
    rows = [("fingerprint", run.fingerprint), ("function", run.function), ("version", run.version)]
    return rows + ([("prediction", run.prediction_hash)] if run.prediction_hash else [])


def _citizen(voyage: Voyage, address: str, viewer: Folder) -> dict[str, Any]:
    folder = voyage.folders.get(address)
    used = viewer.run.inputs.values() if viewer.run else ()
    recorded = next((source.get("fingerprint") for source in used if source.get("stage") == address), None)
    now = folder.run.fingerprint if folder and folder.run else None
    return {
        "stage": address,
        "purpose": folder.run.sentence if folder and folder.run else "",
        "status": folder.status if folder else "waiting",
        "fingerprint": recorded or now,
        "direct": recorded is not None,
        "moved": recorded is not None and now is not None and recorded != now,
        "link": stage_link(voyage.name, address) if folder else None,
    }


def _neighbours(voyage: Voyage, folder: Folder) -> dict[str, str | None]:
    order = list(voyage.folders)
    place = order.index(folder.address)
    return {
        "before": order[place - 1] if place else None,
        "after": order[place + 1] if place + 1 < len(order) else None,
    }


def _plain(record: Any) -> dict[str, Any]:
    return msgspec.to_builtins(record)
