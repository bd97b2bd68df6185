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
from noonsight.logbook.record import Prediction, Verdict

HEADLINES = (
    "bits_per_byte",
    "tokens",
    "documents",
    "exact",
    "fuzzy",
    "vocab_size",
    "bytes_per_token",
    "num_samples",
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
        unexplained.append({"where": "predictions", "text": ledger["sentence"], "link": "predictions.html"})
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


def _sight(voyage: Voyage, folder: Folder, prediction: Prediction) -> dict[str, Any]:
    verdict = voyage.verdict_for(prediction)
    name = folder.address.split("@")[0]
    interval = f"{story.span(*prediction.interval)} {story.unit(prediction.metric)}"
    return {
        "stage": folder.address,
        "link": stage_link(voyage.name, folder.address),
        "prediction": f"Before {name} began, the ladder put its end at {interval}. {_outcome(prediction, verdict)}",
        "status": story.status_sentence(folder.run, folder.progress, folder.events, prediction, verdict),
        "drawing": sight(prediction, verdict),
    }


def _outcome(prediction: Prediction, verdict: Verdict | None) -> str:
    if verdict is None:
        return "There is no verdict yet."
    if not verdict.comparable:
        return f"The result cannot be compared: {verdict.reason}"
    side = "above" if verdict.result > prediction.median else "below"
    better = "better" if verdict.log_score > verdict.log_score_baseline else "worse"
    return (
        f"It ended {story.number(abs(verdict.error_percent), 2)} % {side} the median, "
        f"{'inside' if verdict.inside else 'outside'} the interval; the forecast scored {better} than “same as the last rung”."
    )


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


def _note(voyage: Voyage, address: str, text: str) -> dict[str, str]:
    return {"where": f"{voyage.name}, {address.split('@')[0]}", "text": text, "link": stage_link(voyage.name, address)}


def _running(voyage: Voyage, folder: Folder) -> dict[str, str]:
    text = story.status_sentence(folder.run, folder.progress, folder.events, voyage.prediction_for(folder))
    return _note(voyage, folder.address, text)


def _on_course(voyage: Voyage) -> list[dict[str, str]]:
    """Runs whose verdict is inside the interval that was frozen for them."""
    notes = []
    for folder in voyage.folders.values():
        prediction = voyage.prediction_for(folder)
        verdict = voyage.verdict_for(prediction)
        if prediction and verdict and verdict.inside and verdict.comparable:
            text = f"{story.number(verdict.result)} {story.unit(verdict.metric)}, predicted {story.span(*prediction.interval)}"
            notes.append(_note(voyage, folder.address, text))
    return notes


def _unexplained(voyage: Voyage) -> list[dict[str, str]]:
    """Failures, verdicts outside their interval or not comparable, red lights, faults not recovered, unreadable files."""
    notes: list[dict[str, str]] = []
    for folder in voyage.folders.values():
        texts = list(folder.problems)
        if folder.status == "failed":
            texts.append(f"failed: {story.first_line(folder.run.error if folder.run else None)}")
        if folder.status == "interrupted":
            texts.append("was interrupted and has not gone on")
        if folder.verdict and not folder.verdict.comparable:
            texts.append(f"cannot be compared with its prediction: {folder.verdict.reason}")
        elif folder.verdict and not folder.verdict.inside:
            texts.append(folder.verdict.sentence)
        lights = folder.tables["health"].records() if "health" in folder.tables else []
        texts += [f"{row.get('name')} is red: {row.get('rule')}" for row in lights if row.get("state") == "red"]
        lost = [item for item in charts.incidents(folder) if not item["recovered"]]
        texts += [f"did not recover: {item['texts'][-1]}" for item in lost if folder.status != "running"]
        notes += [_note(voyage, folder.address, text) for text in texts]
    return notes


def _sentence(voyages: list[Voyage], running: list[Any], course: list[Any], unexplained: list[Any]) -> str:
    if not voyages:
        return "Nothing has sailed yet."
    met, open_questions = len(course), len(unexplained)
    parts = [
        f"{story.spelled(len(voyages))} {'voyage' if len(voyages) == 1 else 'voyages'}",
        f"{story.spelled(len(running))} running" if running else "nothing running",
        f"{story.spelled(met)} {'prediction' if met == 1 else 'predictions'} met"
        if course
        else "no prediction met yet",
        f"{story.spelled(open_questions)} left unexplained" if unexplained else "nothing unexplained",
    ]
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _time(folder: Folder) -> str:
    return story.duration(folder.run.seconds) if folder.run and folder.run.seconds else ""
