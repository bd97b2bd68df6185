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
from noonsight.logbook.goodput import account
from noonsight.logbook.record import Prediction
from noonsight.logbook.write import LogbookError

ROUTINE = ("params-hash", "checkpoint")  # written by the clock; told in one line, listed on demand
HEALTH = {"name", "rule", "state", "value"}
STATES = {"green": ("●", "good"), "amber": ("◆", "watch"), "red": ("▲", "bad"), "unmeasured": ("○", "not measured")}


def collect(root: Path, *, experiment: str, stage: str, voyage: Voyage | None = None) -> dict[str, Any]:
    """All that the run page shows, from the logbook alone. `voyage` saves reading the experiment again."""
    voyage = voyage or open_voyage(root, experiment)
    folder = voyage.folders[stage]
    prediction = voyage.prediction_for(folder)
    verdict = voyage.verdict_for(prediction)
    data = stage_page.describe(voyage, folder)
    drawn = _charts(voyage, folder, prediction)
    return {
        **data,
        "kind": "run",
        "sentence": story.status_sentence(folder.run, folder.progress, folder.events, prediction, verdict),
        "figures": _figures(folder),
        "sight": sight(prediction, verdict) if prediction else None,
        "prediction": msgspec.to_builtins(prediction) if prediction else None,
        "verdict": msgspec.to_builtins(verdict) if verdict else None,
        "incidents": charts.incidents(folder),
        "time": _time(folder),
        "routine": [event for event in data["events"] if event["kind"] in ROUTINE],
        "events": [event for event in data["events"] if event["kind"] not in ROUTINE],
        "health": _health(folder),
        "flow": _flow(voyage, stage),
        "evaluation": _evaluation(voyage, stage),
        "samples": _samples(voyage, stage),
        "proofs": _proofs(voyage, stage),
        "tables": [
            table for table in data["tables"] if not HEALTH <= set(table["columns"]) and table["name"] != "samples"
        ],
        "charts": drawn,
        "groups": _groups(drawn["charts"]),
    }


def render(data: dict[str, Any]) -> str:
    """One self-contained HTML file."""
    return render_page("run.html", data)


def _charts(voyage: Voyage, folder: Folder, prediction: Prediction | None) -> dict[str, Any]:
    lines = charts.read_lines(folder)
    context = [voyage.folders[name] for name in (prediction.inputs if prediction else ()) if name in voyage.folders]
    others = [charts.read_lines(other) for other in context]
    maker = next((other for other in voyage.folders.values() if prediction and other.prediction == prediction), None)
    main = charts.course_chart(lines, others, maker.tables.get("band") if maker else None)
    marks = [
        {"step": item["step"], "planned": item["planned"], "text": _mark(item)}
        for item in charts.incidents(folder)
        if item["step"] is not None
    ]
    return {
        "run": folder.address,
        "charts": ([main] if main else []) + charts.panel_charts(lines),
        "axes": {item.run: item.axes for item in [lines, *others]},
        "marks": marks,
    }


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
        ("time", story.duration(folder.run.seconds if folder.run else None)),
    ]
    return [(name, text) for name, text in wanted if text]


def _time(folder: Folder) -> dict[str, Any] | None:
    """Where the wall clock went, by part and by cause of loss; widths in percent."""
    try:
        found = account(folder.path)
    except LogbookError:  # told among the problems of the page
        return None
    if found is None or found.wall_s <= 0:
        return None
    parts = [
        {"name": name, "seconds": seconds, "width": round(100 * seconds / found.wall_s, 2)}
        for name, seconds in found.parts.items()
        if seconds > 0
    ]
    lost = [
        {"cause": cause, "times": each.times, "steps": each.steps, "seconds": each.seconds}
        for cause, each in sorted(found.lost.items(), key=lambda pair: -pair[1].seconds)
    ]
    return {"wall_s": found.wall_s, "share": round(100 * found.share, 1), "parts": parts, "lost": lost}


def _health(folder: Folder) -> dict[str, Any]:
    """The lights of the health table (columns name, rule, state, value), and what the sentinels reported on the way."""
    rows = []
    table = folder.tables.get("health", Table())
    for row in table.records() if HEALTH <= set(table.columns) else ():
        glyph, word = STATES.get(str(row.get("state")), ("○", "unknown"))
        rows.append(
            {**{key: row.get(key, "") for key in ("name", "rule", "value", "state")}, "glyph": glyph, "word": word}
        )
    sentinels = [msgspec.to_builtins(event) for event in folder.events if event.kind == "sentinel"]
    counts = {state: sum(row["state"] == state for row in rows) for state in STATES}
    return {"rows": rows, "sentinels": sentinels, "counts": counts}


def _flow(voyage: Voyage, stage: str) -> dict[str, Any] | None:
    """Documents and bytes of each source, from what came in to what trains: the tables of the stage `select`."""
    addresses = [address for address in voyage.ancestors(stage) if address.split("@")[0] == "select"]
    if not addresses or not (folder := voyage.folders[addresses[0]]).tables:
        return None
    river = _river(folder.tables["flow"]) if "flow" in folder.tables else None
    shown = [name for name in folder.tables if name == "reasons" or (name == "flow" and river is None)]
    return {"stage": folder.address, "river": river, "tables": [stage_page.table(folder, name) for name in shown]}


def _river(table: Table) -> dict[str, Any] | None:
    """Columns source, `bytes NAME` and perhaps `documents NAME` -> one bar per NAME, cut by source; widths in percent.

    NAME is a fate of the text (in, kept, heldout, dropped), in the order of the columns. None for any other table.
    """
    fates = [column.removeprefix("bytes ") for column in table.columns if column.startswith("bytes ")]
    if "source" not in table.columns or not fates:
        return None
    rows = table.records()
    most = max((sum(row[f"bytes {fate}"] for row in rows) for fate in fates), default=0) or 1

    def part(row: dict[str, Any], fate: str) -> dict[str, Any]:
        size = row[f"bytes {fate}"]
        return {"bytes": size, "documents": row.get(f"documents {fate}"), "width": round(100 * size / most, 3)}

    bars = [{"fate": fate, "parts": [part(row, fate) for row in rows]} for fate in fates]
    for bar in bars:
        counts = [item["documents"] for item in bar["parts"] if item["documents"] is not None]
        bar |= {"bytes": sum(item["bytes"] for item in bar["parts"]), "documents": sum(counts) if counts else None}
    return {"title": table.title, "text": table.text, "sources": [str(row["source"]) for row in rows], "bars": bars}


def _evaluation(voyage: Voyage, stage: str) -> dict[str, Any] | None:
    """Bits per byte by domain, the hardest first: the facts of an evaluation made from this run, with its errors."""
    for folder in _made_from(voyage, stage):
        domains = folder.facts.get("by_domain")
        if not isinstance(domains, dict) or not domains:
            continue
        details = {row.get("domain"): row for row in folder.tables.get("by_domain", Table()).records()}
        highest = max(domains.values())
        rows = [
            {
                "name": name,
                "value": value,
                "width": round(100 * value / highest, 2),
                "error": details.get(name, {}).get("standard error"),
                "documents": details.get(name, {}).get("documents"),
            }
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
