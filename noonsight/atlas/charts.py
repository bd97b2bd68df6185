"""Which measurement is drawn where, and how its points travel inside a page.

Every recorded metric appears in exactly one panel: the first whose pattern matches its name, else "other". All points
are embedded (32-bit floats in base64); thinning to the minimum and maximum of each pixel happens when they are drawn, so
nothing is sampled away. A rewound stretch is kept as a ghost of its attempt beside the surviving line.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from operator import itemgetter
from os.path import commonprefix
from typing import Any

from noonsight.atlas.voyage import Folder, Voyage, read_moments, read_series
from noonsight.logbook.read import Series
from noonsight.logbook.record import Prediction, Verdict
from noonsight.logbook.vocabulary import METRICS

LOSS = ("cross_entropy", "loss")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of the page: the metrics with these names, or of these families (names that end in `/`)."""

    id: str
    section: str
    title: str
    names: tuple[str, ...]
    log: bool = False


PANELS = (
    Panel(id="heldout", section="Learning", title="Held-out text", names=("eval/bits_per_byte", "eval/bits_per_byte_macro", "eval/bits_per_byte/")),
    Panel(id="heldout-sample", section="Learning", title="Held-out sample", names=("eval/bits_per_byte_sample",)),
    Panel(id="heldout-loss", section="Learning", title="Held-out loss", names=("eval/loss",)),
    Panel(id="loss", section="Learning", title="Training loss", names=("loss", "cross_entropy")),
    Panel(id="z", section="Learning", title="Logit penalty", names=("z_loss",)),
    Panel(id="logsumexp", section="Learning", title="Size of the logits", names=("logsumexp",)),
    Panel(id="rate", section="Optimiser", title="Learning rates", names=("rate/",)),
    Panel(id="gradient", section="Optimiser", title="Gradient norms", names=("norm/grad", "norm/grad/"), log=True),
    Panel(id="parameter", section="Optimiser", title="Parameter norms", names=("norm/param", "norm/param/"), log=True),
    Panel(id="update", section="Optimiser", title="Update norms", names=("norm/update/",), log=True),
    Panel(id="ratio", section="Optimiser", title="Update over parameter", names=("ratio/update/",), log=True),
    Panel(id="skipped", section="Optimiser", title="Skipped steps", names=("skipped",)),
    Panel(id="gate", section="Attention", title="Gate on the heads", names=("attention/gate_mean",)),
    Panel(id="load", section="Experts", title="Expert load over its mean", names=("router/load_",)),
    Panel(id="entropy", section="Experts", title="Router entropy", names=("router/entropy", "router/entropy/")),
    Panel(id="drop", section="Experts", title="Dropped assignments", names=("router/drop_rate",)),
    Panel(id="bias", section="Experts", title="Router bias", names=("router/bias_",)),
    Panel(id="throughput", section="Speed", title="Throughput", names=("tokens_per_s",)),
    Panel(id="step", section="Speed", title="Time of a step", names=("step_s",)),
    Panel(id="flops", section="Speed", title="Arithmetic", names=("flops_per_s",)),
    Panel(id="mfu", section="Speed", title="Share of peak arithmetic", names=("mfu",)),
    Panel(id="save", section="Speed", title="Time to save", names=("save_s",)),
    Panel(id="memory", section="Speed", title="Memory", names=("memory_bytes",)),
    Panel(id="share", section="Data", title="Mixture served", names=("data/share/",)),
    Panel(id="padding", section="Data", title="Padding", names=("data/padding",)),
)  # fmt: skip
OTHER = Panel(id="other", section="Other", title="Other", names=())
NOT_DRAWN = {"tokens"}  # an axis, not a measurement


def collect_charts(voyage: Voyage, folder: Folder) -> dict[str, Any]:
    """Panels with their series and the axes of the run, as JSON."""
    surviving = read_series(folder)
    ghosts = _ghosts(read_series(folder, attempts="all"), surviving)
    found: dict[str, tuple[Panel, list[str]]] = {}
    for name in sorted(surviving.keys() - NOT_DRAWN):
        panel = next((item for item in PANELS if _belongs(name, item)), OTHER)
        found.setdefault(panel.id, (panel, []))[1].append(name)
    charts = []
    for panel, names in sorted(found.values(), key=lambda pair: [*PANELS, OTHER].index(pair[0])):
        metric = METRICS.get(names[0])
        series = [_series(folder.address, name, surviving[name], ghosts.get(name, [])) for name in names]
        charts.append(
            {
                **{"id": panel.id, "section": panel.section, "title": panel.title, "log": panel.log, "series": series},
                "unit": metric.unit if metric and metric.unit != "1" else "",
                "sentence": metric.sentence if metric else "",
            }
        )
        _shorten(series)
    return {"charts": charts, "axes": {folder.address: axes(folder, surviving)}}


def loss_chart(
    voyage: Voyage, folder: Folder, prediction: Prediction | None, verdict: Verdict | None
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The main chart: this run's loss, the runs its forecast was made from, and where it was predicted to end.

    In bits per byte (loss / (ln 2 * bytes per token)) when the bytes per token of the corpus are a known fact, else in
    nats per token, and then without the band, because the two cannot share an axis. Returns the chart, or None when no
    loss is recorded, and the axes of each run in it.
    """
    context = [voyage.folders[name] for name in (prediction.inputs if prediction else ()) if name in voyage.folders]
    bytes_per_token = voyage.fact("bytes_per_token", folder.address)
    factor = 1 / (math.log(2) * bytes_per_token) if bytes_per_token else 1.0
    series, run_axes = [], {}
    for item in [folder, *context]:
        surviving = read_series(item)
        name = next((name for name in LOSS if name in surviving), None)
        if name is None:
            if item is folder:
                return None, {}
            continue
        ghosts = _ghosts(read_series(item, attempts="all"), surviving).get(name, []) if item is folder else []
        series.append(_series(item.address, item.address.split("@")[0], surviving[name], ghosts, factor))
        series[-1]["role"] = "own" if item is folder else "context"
        run_axes[item.address] = axes(item, surviving)
    unit = "bits per byte" if bytes_per_token else "nats per token"
    chart = {"id": "main", "title": "Loss", "unit": unit, "log": False, "series": series, "sentence": "", "section": ""}
    if prediction and bytes_per_token and prediction.metric == "bits_per_byte":
        low, high = prediction.interval
        result = verdict.result if verdict else None
        chart["band"] = {"low": low, "high": high, "median": prediction.median, "result": result}
    return chart, run_axes


def axes(folder: Folder, surviving: dict[str, Series]) -> dict[str, Any]:
    """What turns a step of this run into tokens and into seconds since its first measurement."""
    last = max((series.steps[-1] for series in surviving.values()), default=0)
    of = folder.progress.of if folder.progress and folder.progress.of else last + 1
    return {
        "tokens_per_step": _tokens_per_step(folder, surviving, last),
        "time": _times(read_moments(folder)),
        "of": of,
    }


def incidents(folder: Folder) -> list[dict[str, Any]]:
    """Interruptions of a run. What happened between a fault and the restart that follows it is one incident."""
    found: list[dict[str, Any]] = []
    opened = False
    for event in folder.events:
        notable = event.cause or event.steps_lost is not None or event.seconds_lost is not None
        if not notable or event.kind in ("sentinel", "code-accepted"):
            continue
        if not opened:
            found.append(
                {"step": event.step, "at": event.at, "kind": event.kind, "cause": event.cause, "planned": False}
            )
            found[-1] |= {"steps_lost": None, "seconds_lost": None, "texts": [], "recovered": False}
        incident = found[-1]
        incident["texts"].append(event.text)
        incident["planned"] |= event.kind == "kill-injected"
        incident["steps_lost"] = event.steps_lost if event.steps_lost is not None else incident["steps_lost"]
        incident["seconds_lost"] = event.seconds_lost if event.seconds_lost is not None else incident["seconds_lost"]
        incident["recovered"] |= event.kind in ("restart", "resume", "recovered")
        opened = not incident["recovered"]
    return found


def _belongs(name: str, panel: Panel) -> bool:
    return any(name == item or (item[-1] in "/_" and name.startswith(item)) for item in panel.names)


def _series(address: str, label: str, points: Series, ghosts: list[Series], factor: float = 1.0) -> dict[str, Any]:
    """Points, what a rewind replaced, and a summary for readers without a picture."""
    values = [value * factor for value in points.values]
    finite = [value for value in values if math.isfinite(value)]
    summary = {"first": finite[0], "last": finite[-1], "low": min(finite), "high": max(finite)} if finite else None
    return {
        **{"run": address, "label": label, "role": "own", **_points(points.steps, values)},
        **{"count": len(values), "not_finite": len(values) - len(finite), "summary": summary},
        "ghosts": [_points(ghost.steps, [value * factor for value in ghost.values]) for ghost in ghosts],
    }


def _points(steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    numbers = [int(step) for step in steps]
    stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    regular = all(later - earlier == stride for earlier, later in pairwise(numbers))
    where = (
        {"first": numbers[0] if numbers else 0, "stride": stride, "count": len(numbers)}
        if regular
        else {"base64": _base64("i", numbers)}
    )
    return {"steps": where, "values": _base64("f", values)}


def _base64(code: str, values: Sequence[float]) -> str:
    packed = array(code, values)
    if packed.itemsize != 4:
        raise AssertionError("points travel as 4-byte numbers")
    return base64.b64encode(packed.tobytes()).decode()


def _ghosts(every: dict[str, Series], surviving: dict[str, Series]) -> dict[str, list[Series]]:
    """Per metric, one series for each attempt of which a later attempt replaced points."""
    found: dict[str, list[Series]] = {}
    for name, series in every.items():
        if name not in surviving or len(series.steps) == len(surviving[name].steps):
            continue
        kept = dict(zip(surviving[name].steps, surviving[name].attempts))
        points = zip(series.attempts, series.steps, series.values, series.at)
        lost = sorted(point for point in points if kept.get(point[1]) != point[0])
        for _, group in groupby(lost, key=itemgetter(0)):
            attempts, steps, values, at = zip(*group)
            found.setdefault(name, []).append(Series(steps=steps, values=values, attempts=attempts, at=at))
    return found


def _tokens_per_step(folder: Folder, surviving: dict[str, Series], last: int) -> float | None:
    tokens = surviving.get("tokens")
    if tokens and len(tokens.steps) > 1:
        return (tokens.values[-1] - tokens.values[0]) / (tokens.steps[-1] - tokens.steps[0])
    total = folder.facts.get("tokens")
    return total / (folder.facts.get("num_steps") or last + 1) if total else None


def _times(moments: list[tuple[int, str]], most: int = 400) -> dict[str, list[float]] | None:
    """A short table of (step, seconds since the first measurement), read by linear interpolation."""
    if not moments:
        return None
    every = max(1, len(moments) // most)
    picked = sorted({*range(0, len(moments), every), len(moments) - 1})
    start = datetime.fromisoformat(moments[0][1])
    seconds = [round((datetime.fromisoformat(moments[index][1]) - start).total_seconds(), 2) for index in picked]
    return {"steps": [moments[index][0] for index in picked], "seconds": seconds}


def _shorten(series: list[dict[str, Any]]) -> None:
    """In the panel of gradient norms, `norm/grad/adam` is `adam` and `norm/grad` is `all`."""
    if len(series) < 2:
        return
    names = [item["label"] for item in series]
    start = commonprefix(names)  # noqa: RUF071 (names of metrics, not paths)
    cut = max(start.rfind("/"), start.rfind("_")) + 1
    for item, name in zip(series, names):
        shorter = name[cut:].split("/", 1)[-1]
        item["label"] = "all" if any(other.startswith(f"{name}/") for other in names) else shorter
