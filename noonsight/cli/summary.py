"""What `noon show` says about an experiment or a stage, as values for scripts and as lines for people.

Everything is computed from the logbook alone. `seconds` is the work of all stages together; `started_at`, `tokens`
and `resumed_bit_identical` are those of the predicted run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from noonsight.logbook import read, record
from noonsight.logbook.goodput import account

COLUMNS = 100
ALWAYS = ("optimizer",)  # tables that are shown without --text too


def experiment(root: Path, found: record.ExperimentRecord) -> dict[str, Any]:
    """The contract for scripts: see docs of `noon show NAME --json`."""
    folders = [Path(root) / found.name / address for address in found.stages]
    runs = [read.run(out) for out in folders]
    predicted = next((run for run in reversed(runs) if run is not None and run.prediction_hash), None)
    prediction = next((each for out in reversed(folders) if (each := read.prediction(out)) is not None), None)
    verdict = next((each for out in reversed(folders) if (each := read.verdict(out)) is not None), None)
    facts = predicted.facts if predicted is not None else {}
    page = Path(root) / "site" / "index.html"
    return {
        "name": found.name,
        "question": found.question,
        "expected": found.expected,
        "status": found.status,
        "stages": [
            {**_stage_line(address, run), "incidents": _incidents(out)}
            for address, run, out in zip(found.stages, runs, folders)
        ],
        "prediction": _prediction(prediction),
        "started_at": predicted.started_at if predicted is not None else found.started_at,
        "result": verdict.result if verdict is not None else None,
        "verdict": ("inside" if verdict.inside else "outside") if verdict is not None else None,
        "error_percent": verdict.error_percent if verdict is not None else None,
        "sentence": verdict.sentence if verdict is not None else None,
        "kills": sum(event.kind == "kill-injected" for out in folders for event in read.events(out)),
        "resumed_bit_identical": facts.get("resumed_bit_identical"),
        "seconds": round(sum(run.seconds for run in runs if run is not None), 3),
        "tokens": facts.get("tokens"),
        "tokens_per_s": facts.get("tokens_per_s"),
        "site": str(page) if page.is_file() else None,
    }


def stage(out: Path, run: record.Run) -> dict[str, Any]:
    """The record of a stage with its events, receipts and the names of its metrics."""
    return {
        **msgspec.to_builtins(run),
        "folder": str(out),
        "metrics": {name: line.values[-1] for name, line in read.metrics(out).items()},
        "events": [msgspec.to_builtins(event) for event in read.events(out)],
        "receipts": [msgspec.to_builtins(receipt) for receipt in read.receipts(out)],
        "tables": read.tables(out),
        "time": _time(out),
        "incidents": _incidents(out),
    }


def one_line(report: dict[str, Any]) -> str:
    """An experiment in one line."""
    num_done = sum(each["status"] == "done" for each in report["stages"])
    state = f"{report['status']}, {num_done}/{len(report['stages'])} stages"
    return _clip(f"{report['name']:16}  {state:24}  {report['sentence'] or report['question']}")


def lines(report: dict[str, Any], *, whole: bool) -> list[str]:
    """An experiment for people: question, prediction, verdict, stages; `whole` shortens nothing."""
    clip = str if whole else _clip
    found = [f"{report['name']}: {report['question']}"]
    if whole and report["expected"]:
        found.append(f"expected: {report['expected']}")
    if prediction := report["prediction"]:
        low, high = prediction["interval"]
        said = f"{prediction['median']:.4f} [{low:.4f}, {high:.4f}] {prediction['unit']}"
        found.append(f"prediction: {prediction['metric']} {said}, frozen {prediction['frozen_at']}")
        if whole:
            found.append(f"prediction hash: {prediction['hash']}")
    if report["sentence"]:
        found.append(f"verdict: {report['sentence']}")
    for each in report["stages"]:
        seconds = f"{each['seconds']:.1f} s" if each["seconds"] is not None else ""
        found.append(f"  {each['stage']:24}  {each['status']:11}  {seconds:>9}  {each['sentence']}".rstrip())
        found += ["  " + line for line in _incident_lines(each["incidents"])]
    if report["site"]:
        found.append(f"pages: {report['site']}")
    return [clip(line) for line in found]


def stage_lines(report: dict[str, Any], *, whole: bool) -> list[str]:
    """A stage for people: status, config, inputs, facts, metrics, events; `whole` adds code, files, all tables."""
    clip = str if whole else _clip
    found = [f"{report['experiment']}/{report['name']}@{report['version']}: {report['sentence']}"]
    found.append(f"{report['status']}, {report['seconds']:.1f} s, started {report['started_at']}")
    if report["error"]:
        found.append(f"error: {report['error']}")
    found += _time_lines(report["time"]) + _incident_lines(report["incidents"])
    found += [f"  input {name}: {source['stage']}" for name, source in report["inputs"].items()]
    for part in ("config", "facts", "metrics", *(("code", "files") if whole else ())):
        found += [f"  {part} {name}: {value}" for name, value in report[part].items()]
    found += [f"  {event['at']}  {event['kind']}: {event['text']}" for event in report["events"]]
    for receipt in report["receipts"]:
        found.append(f"  receipt {receipt['kind']}: {'passed' if receipt['passed'] else 'FAILED'}")
    for name, table in report["tables"].items():
        if whole or name in ALWAYS:
            found += ["", table["title"], table.get("text") or "", *_aligned([table["columns"], *table["rows"]])]
    return [clip(line) for line in found]


def _time(out: Path) -> dict[str, Any] | None:
    found = account(out) if (out / "metrics.jsonl").exists() else None
    if found is None:
        return None
    lost = {cause: dataclasses.asdict(each) for cause, each in found.lost.items()}
    return {"wall_s": found.wall_s, "goodput": round(found.share, 4), "parts": found.parts, "lost": lost}


def _time_lines(time: dict[str, Any] | None) -> list[str]:
    """Where the time of a run went and what was lost to what, in a line or two."""
    if time is None:
        return []
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in time["parts"].items() if seconds >= 0.05)
    found = [f"  goodput {time['goodput']:.1%} of {time['wall_s']:.1f} s: {parts}"]
    for cause, lost in time["lost"].items():
        found.append(
            f"  lost to {cause}: {lost['times']} times, {lost['steps']} steps done again, {lost['seconds']:.1f} s"
        )
    return found


def _incidents(out: Path) -> list[dict[str, Any]]:
    """What interrupted the training of `out`, as its page lists it."""
    from noonsight.atlas.charts import incidents
    from noonsight.atlas.voyage import open_folder

    return incidents(open_folder(out)) if (out / "metrics.jsonl").exists() else []


def _incident_lines(incidents: Sequence[dict[str, Any]]) -> list[str]:
    """How often a run was interrupted, and the last word on the last time."""
    if not incidents:
        return []
    last = incidents[-1]
    where = "" if last["step"] is None else f" at step {last['step']}"
    count = "1 incident" if len(incidents) == 1 else f"{len(incidents)} incidents, the last"
    return [f"  {count}{where}: {last['texts'][-1]}"]


def _aligned(rows: Sequence[Sequence[Any]]) -> list[str]:
    texts = [[str(value) for value in row] for row in rows]
    widths = [max(len(row[index]) for row in texts) for index in range(len(texts[0]))]
    return ["  ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip() for row in texts]


def _stage_line(address: str, run: record.Run | None) -> dict[str, Any]:
    if run is None:
        return {"stage": address, "status": "waiting", "seconds": None, "sentence": "", "fingerprint": None}
    return {
        "stage": address,
        "status": run.status,
        "seconds": run.seconds,
        "sentence": run.sentence,
        "fingerprint": run.fingerprint,
    }


def _prediction(found: record.Prediction | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "run": found.run,
        "metric": found.metric,
        "unit": found.unit,
        "interval": list(found.interval),
        "median": found.median,
        "hash": found.hash,
        "frozen_at": found.frozen_at,
    }


def _clip(line: str) -> str:
    return line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
