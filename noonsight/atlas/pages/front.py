"""The front page: what is running, what is on course, what is unexplained; then each experiment at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from noonsight.atlas import charts, story
from noonsight.atlas.graph import lay_out
from noonsight.atlas.page import render_page, stage_link
from noonsight.atlas.pages import predictions
from noonsight.atlas.pages.stage import as_of
from noonsight.atlas.sight import sight
from noonsight.atlas.voyage import Folder, Voyage, open_voyages

HEADLINES = (
    "bits_per_byte",
    "tokens",
    "documents",
    "vocabulary",
    "duplicates",
    "bytes_per_token",
    "max_logit_difference",
)


def collect(root: Path, *, voyages: list[Voyage] | None = None) -> dict[str, Any]:
    """The state of everything below `root`, each claim with the page that shows it."""
    voyages = open_voyages(root) if voyages is None else voyages
    ledger = predictions.collect(root, voyages=voyages)
    running = [
        _running(voyage, folder)
        for voyage in voyages
        for folder in voyage.folders.values()
        if folder.status == "running"
    ]
    course = [note for voyage in voyages for note in _on_course(voyage)]
    unexplained = [note for voyage in voyages for note in _unexplained(voyage)]
    if ledger["fault"] or ledger["loose"] or any(row["intact"] is False for row in ledger["rows"]):
        unexplained.append({"text": ledger["sentence"], "link": "predictions.html"})
    return {
        "schema": 1,
        "kind": "front",
        "sentence": _sentence(voyages, running, course, unexplained),
        "running": running,
        "on_course": course,
        "unexplained": unexplained,
        "experiments": [_experiment(voyage) for voyage in voyages],
        "ledger": ledger["sentence"],
        "as_of": as_of([folder for voyage in voyages for folder in voyage.folders.values()]),
        "problems": [problem for voyage in voyages for problem in voyage.problems],
        "charts": None,
    }


def render(data: dict[str, Any]) -> str:
    """One self-contained HTML file."""
    return render_page("front.html", data)


def _experiment(voyage: Voyage) -> dict[str, Any]:
    predicted = [(folder, voyage.prediction_for(folder)) for folder in voyage.folders.values()]
    sights = [_sight(voyage, folder, prediction) for folder, prediction in predicted if prediction]
    graph = lay_out(list(voyage.folders), voyage.edges)
    for node in graph["nodes"]:
        folder = voyage.folders[node["stage"]]
        node |= {"status": folder.status, "link": stage_link(voyage.name, node["stage"]), "note": _time(folder)}
    return {
        "name": voyage.name,
        "question": voyage.record.question if voyage.record else "",
        "file": voyage.record.file if voyage.record else "",
        "expected": voyage.record.expected if voyage.record else "",
        "status": voyage.record.status if voyage.record else "unreadable",
        "started_at": voyage.record.started_at if voyage.record else None,
        "seconds": voyage.record.seconds if voyage.record else None,
        "sights": sights,
        "graph": graph,
        "runs": [_line(voyage, folder) for folder in voyage.folders.values()],
        "problems": voyage.problems,
    }


def _sight(voyage: Voyage, folder: Folder, prediction: Any) -> dict[str, Any]:
    verdict = voyage.verdict_for(prediction)
    metric = story.unit(prediction.metric)
    text = f"Before {folder.address.split('@')[0]} began, the ladder put it at {story.span(*prediction.interval)} {metric}."
    return {
        "stage": folder.address,
        "link": stage_link(voyage.name, folder.address),
        "prediction": text,
        "verdict": verdict.sentence if verdict else "No verdict yet.",
        "status": story.status_sentence(folder.run, folder.progress, folder.events, prediction, verdict),
        "drawing": sight(prediction, verdict),
    }


def _line(voyage: Voyage, folder: Folder) -> dict[str, Any]:
    facts = [(name, folder.facts[name]) for name in HEADLINES if isinstance(folder.facts.get(name), (int, float))][:3]
    return {
        "stage": folder.address,
        "name": folder.address.split("@")[0],
        "link": stage_link(voyage.name, folder.address),
        "status": folder.status,
        "sentence": folder.run.sentence if folder.run else "",
        "seconds": folder.run.seconds if folder.run else None,
        "facts": facts,
        "training": folder.is_training,
        "fingerprint": folder.run.fingerprint if folder.run else None,
    }


def _running(voyage: Voyage, folder: Folder) -> dict[str, str]:
    text = story.status_sentence(folder.run, folder.progress, folder.events, voyage.prediction_for(folder))
    return {"text": f"{voyage.name}, {folder.address}: {text}", "link": stage_link(voyage.name, folder.address)}


def _on_course(voyage: Voyage) -> list[dict[str, str]]:
    notes = []
    for folder in voyage.folders.values():
        prediction = voyage.prediction_for(folder)
        verdict = voyage.verdict_for(prediction)
        if verdict and verdict.inside and verdict.comparable:
            notes.append(
                {
                    "text": f"{voyage.name}, {folder.address}: {verdict.sentence}",
                    "link": stage_link(voyage.name, folder.address),
                }
            )
    return notes


def _unexplained(voyage: Voyage) -> list[dict[str, str]]:
    """Failures, verdicts outside their interval or not comparable, red lights, faults not recovered, unreadable files."""
    notes: list[tuple[str, str]] = []
    for folder in voyage.folders.values():
        if folder.status == "failed":
            notes.append((folder.address, f"failed: {story.first_line(folder.run.error if folder.run else None)}"))
        if folder.status == "interrupted":
            notes.append((folder.address, "was interrupted and has not gone on"))
        if folder.verdict and not folder.verdict.comparable:
            notes.append((folder.address, f"is not comparable with its prediction: {folder.verdict.reason}"))
        elif folder.verdict and not folder.verdict.inside:
            notes.append((folder.address, folder.verdict.sentence))
        lights = folder.tables["health"].records() if "health" in folder.tables else []
        notes += [
            (folder.address, f"{row.get('name')} is red: {row.get('rule')}")
            for row in lights
            if row.get("state") == "red"
        ]
        if folder.status != "running":
            lost = [item for item in charts.incidents(folder) if not item["recovered"]]
            notes += [(folder.address, f"did not recover: {item['texts'][-1]}") for item in lost]
        notes += [(folder.address, problem) for problem in folder.problems]
    return [
        {"text": f"{voyage.name}, {address}: {text}", "link": stage_link(voyage.name, address)}
        for address, text in notes
    ]


def _sentence(voyages: list[Voyage], running: list[Any], course: list[Any], unexplained: list[Any]) -> str:
    if not voyages:
        return "Nothing has sailed yet."
    parts = [
        story.plural(len(voyages), "voyage"),
        f"{len(running)} running" if running else "nothing running",
        f"{story.plural(len(course), 'prediction')} met" if course else "no prediction met yet",
        f"{story.plural(len(unexplained), 'thing')} unexplained" if unexplained else "nothing unexplained",
    ]
    return story.join(parts) + "."


def _time(folder: Folder) -> str:
    return story.duration(folder.run.seconds) if folder.run and folder.run.seconds else ""
