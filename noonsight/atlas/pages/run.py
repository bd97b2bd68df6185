"""The page of a training run: where it was predicted to go, where it went, what went wrong, and what it was made from."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from noonsight.atlas import charts, story
from noonsight.atlas.page import render_page
from noonsight.atlas.pages import stage as stage_page
from noonsight.atlas.sight import sight
from noonsight.atlas.voyage import Folder, Table, Voyage, open_voyage

STATES = {"green": ("●", "good"), "amber": ("◆", "watch"), "red": ("▲", "bad")}


def collect(root: Path, *, experiment: str, stage: str, voyage: Voyage | None = None) -> dict[str, Any]:
    """All that the run page shows, from the logbook alone. `voyage` saves reading the experiment again."""
    voyage = voyage or open_voyage(root, experiment)
    folder = voyage.folders[stage]
    prediction = voyage.prediction_for(folder)
    verdict = voyage.verdict_for(prediction)
    data = stage_page.describe(voyage, folder)
    drawn = _charts(voyage, folder, prediction, verdict)
    return {
        **data,
        "kind": "run",
        "sentence": story.status_sentence(folder.run, folder.progress, folder.events, prediction, verdict),
        "figures": _figures(folder),
        "sight": sight(prediction, verdict) if prediction else None,
        "prediction": msgspec.to_builtins(prediction) if prediction else None,
        "verdict": msgspec.to_builtins(verdict) if verdict else None,
        "incidents": charts.incidents(folder),
        "health": _health(folder),
        "flow": _flow(voyage, stage),
        "evaluation": _evaluation(voyage, stage),
        "samples": _samples(voyage, stage),
        "proofs": _proofs(voyage, stage),
        "tables": [table for table in data["tables"] if table["name"] not in ("health", "samples")],
        "charts": drawn,
        "groups": _groups(drawn["charts"]),
    }


def render(data: dict[str, Any]) -> str:
    """One self-contained HTML file."""
    return render_page("run.html", data)


def _charts(voyage: Voyage, folder: Folder, prediction: Any, verdict: Any) -> dict[str, Any]:
    found = charts.collect_charts(voyage, folder)
    main, axes = charts.loss_chart(voyage, folder, prediction, verdict)
    marks = [
        {"step": item["step"], "planned": item["planned"], "text": _mark(item)}
        for item in charts.incidents(folder)
        if item["step"] is not None
    ]
    drawn = ([main] if main else []) + found["charts"]
    return {"run": folder.address, "charts": drawn, "axes": {**found["axes"], **axes}, "marks": marks}


def _groups(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Small multiples by section, in the order of the panels."""
    small = [chart for chart in drawn if chart["id"] != "main"]
    return [
        {"section": section, "ids": [chart["id"] for chart in group]}
        for section, group in groupby(small, key=lambda chart: chart["section"])
    ]


def _mark(incident: dict[str, Any]) -> str:
    text = "killed on purpose" if incident["planned"] else (incident["cause"] or incident["kind"])
    if incident["steps_lost"] is not None:
        text += f", {story.plural(incident['steps_lost'], 'step')}"
    if incident["seconds_lost"] is not None:
        text += f", {story.duration(incident['seconds_lost'])} lost"
    return text


def _figures(folder: Folder) -> list[tuple[str, str]]:
    """The strip of large numbers: what was spent and how fast, as far as it is recorded."""
    facts, progress = folder.facts, folder.progress
    steps = facts.get("num_steps") or (progress.step if progress else None)
    wanted = [
        ("steps", story.number(steps) if steps else None),
        ("tokens", story.compact(facts["tokens"]) if facts.get("tokens") else None),
        ("tokens per second", story.number(float(facts["tokens_per_s"]), 4) if facts.get("tokens_per_s") else None),
        ("active parameters", story.compact(facts["active_parameters"]) if facts.get("active_parameters") else None),
        ("FLOPs", story.compact(facts["train_flops"]) if facts.get("train_flops") else None),
        ("time", story.duration(facts.get("seconds") or (folder.run.seconds if folder.run else None))),
    ]
    return [(name, text) for name, text in wanted if text]


def _health(folder: Folder) -> dict[str, Any]:
    """The lights of the health table (columns name, rule, state, value), and what the sentinels reported on the way."""
    rows = []
    for row in folder.tables.get("health", Table()).records():
        glyph, word = STATES.get(str(row.get("state")), ("○", "unknown"))
        rows.append(
            {**{key: row.get(key, "") for key in ("name", "rule", "value", "state")}, "glyph": glyph, "word": word}
        )
    sentinels = [msgspec.to_builtins(event) for event in folder.events if event.kind == "sentinel"]
    counts = {state: sum(row["state"] == state for row in rows) for state in STATES}
    return {"rows": rows, "sentinels": sentinels, "counts": counts}


def _flow(voyage: Voyage, stage: str) -> dict[str, Any] | None:
    """How many documents and bytes of each source were left after each stage of curation: the tables of `select`."""
    folder = _nearest(voyage, stage, "select")
    if folder is None or not folder.tables:
        return None
    river = _river(folder.tables["flow"]) if "flow" in folder.tables else None
    others = [stage_page.table(folder, name) for name in folder.tables if name != "flow" or river is None]
    return {"stage": folder.address, "river": river, "tables": others}


def _river(table: Table) -> dict[str, Any] | None:
    """Table with columns stage, source, documents, bytes -> one bar per stage, cut by source; widths in percent."""
    if not {"stage", "source", "documents", "bytes"} <= set(table.columns):
        return None
    records = table.records()
    stages, sources = (list(dict.fromkeys(str(row[name]) for row in records)) for name in ("stage", "source"))
    cells = {(str(row["stage"]), str(row["source"])): row for row in records}
    totals = {stage: sum(row["bytes"] for row in records if str(row["stage"]) == stage) for stage in stages}
    most = max(totals.values(), default=0) or 1

    def part(stage: str, source: str) -> dict[str, Any]:
        row = cells.get((stage, source), {"documents": 0, "bytes": 0})
        return {"documents": row["documents"], "bytes": row["bytes"], "width": round(100 * row["bytes"] / most, 3)}

    bars = [
        {
            "stage": stage,
            "parts": [part(stage, source) for source in sources],
            "documents": sum(row["documents"] for row in records if str(row["stage"]) == stage),
            "bytes": totals[stage],
        }
        for stage in stages
    ]
    return {"title": table.title, "text": table.text, "sources": sources, "bars": bars}


def _evaluation(voyage: Voyage, stage: str) -> dict[str, Any] | None:
    """Bits per byte by domain, the hardest first: facts of an evaluation made from this run."""
    for folder in _made_from(voyage, stage):
        domains = folder.facts.get("by_domain")
        if isinstance(domains, dict) and domains:
            highest = max(domains.values())
            rows = [
                {"name": name, "value": value, "width": round(100 * value / highest, 2)}
                for name, value in sorted(domains.items(), key=lambda pair: -pair[1])
            ]
            micro, macro = folder.facts.get("bits_per_byte"), folder.facts.get("macro")
            return {"stage": folder.address, "rows": rows, "micro": micro, "macro": macro}
    return None


def _samples(voyage: Voyage, stage: str) -> dict[str, Any] | None:
    """Texts that the model wrote: `tables/samples.json` of a stage made from this run."""
    for folder in [voyage.folders[stage], *_made_from(voyage, stage)]:
        table = folder.tables.get("samples")
        if table is None or not table.rows:
            continue
        texts = []
        for row in table.records():
            prompt = str(row.pop("prompt", ""))
            body = next(
                (str(row.pop(name)) for name in ("completion", "continuation", "text", "sample") if name in row), ""
            )
            texts.append({"prompt": prompt, "text": body, "notes": [(name, value) for name, value in row.items()]})
        return {"stage": folder.address, "texts": texts, "text": table.text, "title": table.title}
    return None


def _proofs(voyage: Voyage, stage: str) -> list[dict[str, Any]]:
    """Receipts of this run and of everything made from it."""
    folders = [voyage.folders[stage], *_made_from(voyage, stage)]
    return [
        {"stage": folder.address, **msgspec.to_builtins(item)}
        for folder in folders
        for item in folder.receipts.values()
    ]


def _made_from(voyage: Voyage, stage: str) -> list[Folder]:
    """Stages that have this run among their ancestors but no later training between, in running order."""
    return [
        folder
        for address, folder in voyage.folders.items()
        if stage in (above := voyage.ancestors(address))
        and not any(voyage.folders[item].is_training for item in above[: above.index(stage)])
    ]


def _nearest(voyage: Voyage, stage: str, name: str) -> Folder | None:
    addresses = [address for address in voyage.ancestors(stage) if address.split("@")[0] == name]
    return voyage.folders[addresses[0]] if addresses else None
