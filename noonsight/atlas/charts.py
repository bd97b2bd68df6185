"""Which measurement is drawn where, and how its points travel inside a page.

Every recorded metric appears in exactly one panel: the first whose pattern matches its name, else "other". All points
are embedded (32-bit floats in base64); thinning to the minimum and maximum of each pixel happens when they are drawn, so
nothing is sampled away. A rewound stretch is kept as a ghost of its attempt beside the surviving line.
"""

from __future__ import annotations

import base64
import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from noonsight.atlas.voyage import Folder, Voyage, read_series
from noonsight.logbook.record import Prediction, Verdict

LOSS = ("loss", "train/loss", "cross_entropy")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of the page: the metrics whose name matches go in it, or one chart each when `apart`."""

    id: str
    title: str
    pattern: str
    log: bool = False


PANELS = (
    Panel(id="heldout", title="Held-out loss", pattern=r"held|eval|valid|bits_per_byte"),
    Panel(id="throughput", title="Throughput", pattern=r"tokens_per_s|per_second"),
    Panel(id="mfu", title="Share of peak arithmetic", pattern=r"mfu|flops"),
    Panel(id="gradient", title="Gradient norms", pattern=r"grad", log=True),
    Panel(id="parameter", title="Parameter norms", pattern=r"(param|weight).*norm", log=True),
    Panel(id="update", title="Update norms", pattern=r"update.*norm", log=True),
    Panel(id="rate", title="Learning rates", pattern=r"(^|[/_])(lr|rate|learning_rate)s?([/_]|$)|learning_rate"),
    Panel(id="load", title="Expert load", pattern=r"load"),
    Panel(id="entropy", title="Router entropy", pattern=r"entropy"),
    Panel(id="drop", title="Dropped tokens", pattern=r"drop"),
    Panel(id="bias", title="Router bias", pattern=r"bias|beta"),
    Panel(id="z", title="Logit penalty", pattern=r"(^|[/_])z([/_]|$)|z_loss"),
    Panel(id="loss", title="Training loss", pattern=r"loss|cross_entropy|(^|/)ce$"),
    Panel(id="memory", title="Memory", pattern=r"mem|bytes"),
    Panel(id="time", title="Time of a step", pattern=r"(_s|seconds|_ms)$|time"),
)


def collect_charts(voyage: Voyage, folder: Folder) -> dict[str, Any]:
    """Panels with their series, the axes of the run, and the marks of its incidents, as JSON."""
    surviving = read_series(folder)
    ghosts = _ghosts(read_series(folder, attempts="all"), surviving)
    metrics = _vocabulary()
    panels: dict[str, dict[str, Any]] = {}
    for name in sorted(surviving):
        panel = next((item for item in PANELS if re.search(item.pattern, name)), Panel(id="other", title="Other", pattern=""))
        chart = panels.setdefault(panel.id, {"id": panel.id, "title": panel.title, "log": panel.log, "series": []})
        metric = metrics.get(name) or metrics.get(name.split("/")[0])
        chart["series"].append({"run": folder.address, "label": name, **_pack(surviving[name]), "ghosts": ghosts.get(name, [])})
        chart.setdefault("unit", getattr(metric, "unit", ""))
        chart.setdefault("sentence", getattr(metric, "sentence", ""))
    order = [panel.id for panel in PANELS] + ["other"]
    charts = sorted(panels.values(), key=lambda item: order.index(item["id"]))
    for chart in charts:
        _shorten(chart["series"])
    return {"charts": charts, "axes": {folder.address: axes(voyage, folder, surviving)}}


def loss_chart(voyage: Voyage, folder: Folder, prediction: Prediction | None, verdict: Verdict | None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The main chart: this run's loss, the runs its forecast was made from, and where it was predicted to end.

    In bits per byte (loss / (ln 2 * bytes per token)) when the bytes per token of the corpus are a known fact, else in
    nats per token, and then without the band, because the two cannot share an axis.
    """
    runs = {folder.address: folder}
    if prediction:
        runs |= {name: voyage.folders[name] for name in prediction.inputs if name in voyage.folders and voyage.folders[name].is_training}
    series, run_axes = [], {}
    bytes_per_token = voyage.fact("bytes_per_token", folder.address)
    factor = 1 / (math.log(2) * bytes_per_token) if bytes_per_token else 1.0
    for address, item in runs.items():
        surviving = read_series(item)
        name = next((name for name in LOSS if name in surviving), None)
        if name is None:
            continue
        own = address == folder.address
        ghosts = _ghosts(read_series(item, attempts="all"), surviving).get(name, []) if own else []
        series.append({"run": address, "label": address.split("@")[0], "role": "own" if own else "context", **_pack(surviving[name], factor)})
        series[-1]["ghosts"] = [{**ghost, **_points(ghost["raw"][0], [value * factor for value in ghost["raw"][1]])} for ghost in ghosts]
        run_axes[address] = axes(voyage, item, surviving)
    if not series or series[0]["role"] != "own":
        return None, run_axes
    for item in series:
        for ghost in item["ghosts"]:
            ghost.pop("raw", None)
    chart = {"id": "main", "title": "Loss", "unit": "bits per byte" if bytes_per_token else "nats per token", "log": False, "series": series, "sentence": ""}
    if prediction and bytes_per_token and prediction.metric == "bits_per_byte":
        low, high = prediction.interval
        chart["band"] = {"low": low, "high": high, "median": prediction.median, "result": verdict.result if verdict else None}
    return chart, run_axes


def axes(voyage: Voyage, folder: Folder, surviving: dict[str, Any]) -> dict[str, Any]:
    """What turns a step of this run into tokens and into seconds since its start."""
    longest = max(surviving.values(), key=lambda item: len(item.steps), default=None)
    if longest is None or not len(longest.steps):
        return {"tokens_per_step": None, "time": None, "of": None}
    last = int(longest.steps[-1])
    of = folder.progress.of if folder.progress and folder.progress.of else last + 1
    tokens = folder.facts.get("tokens")
    steps = folder.facts.get("steps") or last + 1
    per_step = tokens / steps if tokens else _configured(folder.run.config if folder.run else {})
    return {"tokens_per_step": per_step, "time": _times(longest), "of": of}


def incidents(folder: Folder) -> list[dict[str, Any]]:
    """Interruptions of a run. What happened between a fault and the restart that follows it is one incident."""
    found: list[dict[str, Any]] = []
    opened = False
    for event in folder.events:
        notable = event.cause or event.steps_lost is not None or event.seconds_lost is not None
        if not notable or event.kind in ("sentinel", "code-accepted"):
            continue
        if not opened:
            found.append({"step": event.step, "at": event.at, "kind": event.kind, "cause": event.cause, "planned": False})
            found[-1] |= {"steps_lost": None, "seconds_lost": None, "texts": [], "recovered": False}
        incident = found[-1]
        incident["texts"].append(event.text)
        incident["planned"] |= event.kind == "kill-injected"
        incident["steps_lost"] = event.steps_lost if event.steps_lost is not None else incident["steps_lost"]
        incident["seconds_lost"] = event.seconds_lost if event.seconds_lost is not None else incident["seconds_lost"]
        incident["recovered"] |= event.kind in ("restart", "resume", "recovered")
        opened = not incident["recovered"]
    return found


def _pack(series: Any, factor: float = 1.0) -> dict[str, Any]:
    """Points and a summary for readers without a picture."""
    values = [float(value) * factor for value in series.values]
    finite = [value for value in values if math.isfinite(value)]
    summary = {"first": finite[0], "last": finite[-1], "low": min(finite), "high": max(finite)} if finite else None
    return {**_points(series.steps, values), "count": len(values), "not_finite": len(values) - len(finite), "summary": summary}


def _points(steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    numbers = [int(step) for step in steps]
    stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    regular = all(later - earlier == stride for earlier, later in zip(numbers, numbers[1:]))
    where = {"first": numbers[0] if numbers else 0, "stride": stride, "count": len(numbers)} if regular else {"base64": _base64("i", numbers)}
    return {"steps": where, "values": _base64("f", values)}


def _base64(code: str, values: Sequence[float]) -> str:
    packed = array(code, values)
    if packed.itemsize != 4:
        raise AssertionError("points travel as 4-byte numbers")
    return base64.b64encode(packed.tobytes()).decode()


def _ghosts(every: dict[str, Any], surviving: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Per metric and attempt, the points that a later attempt replaced."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, series in every.items():
        if name not in surviving or len(series.steps) == len(surviving[name].steps):
            continue
        kept = {int(step): int(attempt) for step, attempt in zip(surviving[name].steps, surviving[name].attempts)}
        lost: dict[int, tuple[list[int], list[float]]] = {}
        for step, value, attempt in zip(series.steps, series.values, series.attempts):
            if kept[int(step)] != int(attempt):
                steps, values = lost.setdefault(int(attempt), ([], []))
                steps.append(int(step))
                values.append(float(value))
        found[name] = [{"attempt": attempt, **_points(*points), "raw": points} for attempt, points in sorted(lost.items())]
    return found


def _times(series: Any, most: int = 400) -> dict[str, list[float]] | None:
    """A short table of (step, seconds since the first measurement); between its rows time runs evenly enough to read."""
    moments = getattr(series, "at", None)
    if moments is None or not len(moments):
        return None
    every = max(1, len(moments) // most)
    picked = sorted({*range(0, len(moments), every), len(moments) - 1})
    start = datetime.fromisoformat(moments[0])
    seconds = [round((datetime.fromisoformat(moments[index]) - start).total_seconds(), 2) for index in picked]
    return {"steps": [int(series.steps[index]) for index in picked], "seconds": seconds}


def _configured(config: dict[str, Any]) -> int | None:
    sequence, batch = config.get("sequence_length"), config.get("batch_size")
    return sequence * batch if isinstance(sequence, int) and isinstance(batch, int) else None


def _shorten(series: list[dict[str, Any]]) -> None:
    """`grad_norm/adam` in the panel of gradient norms is just `adam`."""
    if len(series) > 1:
        for item in series:
            item["label"] = item["label"].split("/", 1)[1] if "/" in item["label"] else item["label"]


def _vocabulary() -> dict[str, Any]:
    from noonsight.logbook.vocabulary import METRICS

    return METRICS
