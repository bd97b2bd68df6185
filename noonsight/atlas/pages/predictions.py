"""The ledger of predictions: every forecast ever frozen here, whether its chain holds, and how each one was scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from noonsight.atlas import story
from noonsight.atlas.page import render_page, stage_link
from noonsight.atlas.voyage import Folder, Voyage, open_voyages
from noonsight.logbook import chain
from noonsight.logbook.record import Prediction, Verdict


def collect(root: Path, *, voyages: list[Voyage] | None = None) -> dict[str, Any]:
    """Ledger lines in order, each with its prediction, its verdict, and whether the content still has its hash."""
    voyages = open_voyages(root) if voyages is None else voyages
    entries, fault = _entries(root)
    made = {
        folder.prediction.hash: (voyage, folder, folder.prediction)
        for voyage in voyages
        for folder in voyage.folders.values()
        if folder.prediction
    }
    rows = [_row(entry, made.get(entry["prediction"])) for entry in entries]
    chained = {entry["prediction"] for entry in entries}
    loose = [item[2].run for digest, item in made.items() if digest not in chained]
    return {
        "schema": 1,
        "kind": "predictions",
        "rows": rows,
        "fault": fault,
        "loose": loose,
        "summary": _summary(rows),
        "sentence": _sentence(rows, fault, loose),
        "last": entries[-1]["hash"] if entries else None,
        "as_of": max((entry["at"] for entry in entries), default=None),
        "problems": [],
        "charts": None,
    }


def render(data: dict[str, Any]) -> str:
    """One self-contained HTML file."""
    return render_page("predictions.html", data)


def _entries(root: Path) -> tuple[list[dict[str, Any]], str | None]:
    try:
        return [msgspec.to_builtins(entry) for entry in chain.verify(root / "predictions.jsonl")], None
    except (chain.BrokenChain, OSError) as error:
        return [], str(error)


def _row(entry: dict[str, Any], made: tuple[Voyage, Folder, Prediction] | None) -> dict[str, Any]:
    row = {
        **entry,
        "prediction": None,
        "verdict": None,
        "strip": None,
        "intact": None,
        "link": None,
        "hash_of": entry["prediction"],
    }
    if made is None:
        return row
    voyage, _, prediction = made
    verdict = voyage.verdict_for(prediction)
    return {
        **row,
        "prediction": msgspec.to_builtins(prediction),
        "verdict": msgspec.to_builtins(verdict) if verdict else None,
        "strip": _strip(prediction, verdict),
        "intact": chain.content_hash(prediction) == prediction.hash,
        "link": stage_link(voyage.name, prediction.run) if prediction.run in voyage.folders else None,
    }


def _strip(prediction: Prediction, verdict: Verdict | None) -> dict[str, float | None]:
    """The interval laid on a common scale (it spans 25 to 75 percent), with the result where it fell."""
    low, high = prediction.interval
    width = (high - low) or 1.0

    def place(value: float) -> float:
        return round(min(98.0, max(2.0, 25 + 50 * (value - low) / width)), 2)

    return {"median": place(prediction.median), "result": place(verdict.result) if verdict else None}


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    scored = [row["verdict"] for row in rows if row["verdict"]]
    counted = [verdict for verdict in scored if verdict["comparable"] and not verdict["late"]]
    gains = [verdict["log_score"] - verdict["log_score_baseline"] for verdict in counted]
    return {
        "made": len(rows),
        "scored": len(scored),
        "inside": sum(verdict["inside"] for verdict in counted),
        "counted": len(counted),
        "gain": sum(gains) / len(gains) if gains else None,
    }


def _sentence(rows: list[dict[str, Any]], fault: str | None, loose: list[str]) -> str:
    if fault:
        return f"The chain is broken: {fault}"
    if not rows and not loose:
        return "No prediction has been frozen yet."
    summary = _summary(rows)
    scored = story.spelled(summary["scored"]) if summary["scored"] else "none"
    text = f"{story.counted(summary['made'], 'prediction')} frozen, {scored} scored"
    if summary["counted"]:
        inside, counted = story.spelled(summary["inside"]), story.spelled(summary["counted"])
        text += f", {inside} of {counted} inside the 90 % interval"
    text = text[0].upper() + text[1:]
    changed = sum(row["intact"] is False for row in rows)
    if changed:
        return f"{text}; {story.counted(changed, 'prediction')} changed since it was hashed."
    if loose:
        return f"{text}; {story.counted(len(loose), 'prediction')} missing from the chain."
    return f"{text}; the chain of hashes holds."
