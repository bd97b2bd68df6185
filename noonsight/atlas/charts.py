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

from noonsight.atlas.voyage import Folder, Table, read_series
from noonsight.logbook.read import Series
from noonsight.logbook.vocabulary import METRICS

LOSS = "loss"
HARMLESS = ("straggler", "checkpoint-rejected", "clock", "slow")  # nothing has to be recovered from


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of the page: the metrics with these names, or of these families (names that end in `/`)."""

    id: str
    section: str
    title: str
    names: tuple[str, ...]
    log: bool = False


PANELS = (
    Panel(id="heldout", section="Learning", title="Held-out text", names=("eval/bits_per_byte", "eval/bits_per_byte_", "eval/bits_per_byte/")),
    Panel(id="heldout-loss", section="Learning", title="Held-out loss", names=("eval/loss",)),
    Panel(id="loss", section="Learning", title="Training loss", names=("loss", "cross_entropy")),
    Panel(id="z", section="Learning", title="Logit penalty", names=("z_loss",)),
    Panel(id="logsumexp", section="Learning", title="Size of the logits", names=("logsumexp",)),
    Panel(id="attention", section="Learning", title="Attention", names=("attention/",)),
    Panel(id="rate", section="Optimiser", title="Learning rates", names=("rate/",)),
    Panel(id="gradient", section="Optimiser", title="Gradient norms", names=("norm/grad", "norm/grad/"), log=True),
    Panel(id="parameter", section="Optimiser", title="Parameter norms", names=("norm/param", "norm/param/"), log=True),
    Panel(id="update", section="Optimiser", title="Update norms", names=("norm/update/",), log=True),
    Panel(id="ratio", section="Optimiser", title="Update over parameter", names=("ratio/update/",), log=True),
    Panel(id="skipped", section="Optimiser", title="Skipped steps", names=("skipped",)),
    Panel(id="load", section="Experts", title="Expert load over its mean", names=("router/load_",)),
    Panel(id="entropy", section="Experts", title="Router entropy", names=("router/entropy", "router/entropy/")),
    Panel(id="learning", section="Experts", title="Idlest learner", names=("router/grad_min_over_mean",)),
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
    Panel(id="documents", section="Data", title="Documents in a batch", names=("data/documents", "data/empty_documents")),
)  # fmt: skip
OTHER = Panel(id="other", section="Other", title="Other", names=())
NOT_DRAWN = {"tokens", "batch_digest"}  # an axis and a digest, not measurements


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The measurements of one run: the surviving line of each metric, and per metric what a later attempt replaced."""

    run: str
    surviving: dict[str, Series]
    ghosts: dict[str, list[Series]]
    axes: dict[str, Any]


def read_lines(folder: Folder) -> Lines:
    """Read the metrics of a stage; an unreadable file gives no lines and one more problem in `folder`."""
    surviving = read_series(folder)
    ghosts = _ghosts(read_series(folder, attempts="all"), surviving)
    return Lines(run=folder.address, surviving=surviving, ghosts=ghosts, axes=_axes(folder, surviving))


def panel_charts(lines: Lines) -> list[dict[str, Any]]:
    """The small charts of a run, in the order of `PANELS`, as JSON."""
    found: dict[str, tuple[Panel, list[str]]] = {}
    for name in sorted(lines.surviving.keys() - NOT_DRAWN):
        panel = next((item for item in PANELS if _belongs(name, item)), OTHER)
        found.setdefault(panel.id, (panel, []))[1].append(name)
    charts = []
    for panel, names in sorted(found.values(), key=lambda pair: [*PANELS, OTHER].index(pair[0])):
        metric = METRICS.get(names[0])
        series = [_series(lines.run, name, lines.surviving[name], lines.ghosts.get(name, [])) for name in names]
        _shorten(series)
        unit = metric.unit if metric and metric.unit != "1" else ""
        sentence = metric.sentence if metric else ""
        charts.append(_chart(panel.id, panel.section, panel.title, unit, sentence, series, log=panel.log))
    return charts


def course_chart(lines: Lines, context: list[Lines], band: Table | None) -> dict[str, Any] | None:
    """The main chart: the loss of this run, of the runs its forecast was made from, and the predicted band of the loss.

    `band` (columns progress, low, median, high, and window where it is known) speaks of the mean loss over the `window`
    of the run before each `progress`; the same means of this run are the sights to hold against it. None without a loss.
    """
    if LOSS not in lines.surviving:
        return None
    own = lines.surviving[LOSS]
    series = [_series(lines.run, lines.run.split("@")[0], own, lines.ghosts.get(LOSS, []))]
    for other in context:
        if LOSS in other.surviving:
            label = other.run.split("@")[0]
            series.append({**_series(other.run, label, other.surviving[LOSS], []), "role": "context"})
    chart = _chart("main", "", "Loss", METRICS[LOSS].unit, METRICS[LOSS].sentence, series)
    if band and {"progress", "low", "median", "high"} <= set(band.columns) and band.rows:
        chart["band"] = _band(band, own, lines.axes["of"])
    return chart


def incidents(folder: Folder) -> list[dict[str, Any]]:
    """Interruptions of a run. What happened between a fault and the restart that follows it is one incident."""
    found: list[dict[str, Any]] = []
    opened = False
    for event in folder.events:
        notable = event.cause or event.steps_lost is not None or event.seconds_lost is not None
        if not notable or event.kind in ("sentinel", "code-accepted"):
            continue
        harmless = event.kind in HARMLESS or event.data.get("fault") in HARMLESS
        if not opened:
            found.append(
                {"step": event.step, "at": event.at, "kind": event.kind, "cause": event.cause, "planned": False}
            )
            found[-1] |= {"steps_lost": None, "seconds_lost": None, "texts": [], "recovered": False}
        incident = found[-1]
        incident["texts"].append(event.text)
        incident["planned"] |= event.kind in ("kill-injected", "fault-injected")
        incident["steps_lost"] = event.steps_lost if event.steps_lost is not None else incident["steps_lost"]
        incident["seconds_lost"] = event.seconds_lost if event.seconds_lost is not None else incident["seconds_lost"]
        incident["recovered"] |= harmless or event.kind in ("restart", "resume", "recovered")
        opened = not incident["recovered"]
    return found


def _chart(
    name: str, section: str, title: str, unit: str, sentence: str, series: list[dict[str, Any]], *, log: bool = False
) -> dict[str, Any]:
    found = {"id": name, "section": section, "title": title, "unit": unit, "sentence": sentence, "log": log}
    return {**found, "series": series, "band": None}


def _band(table: Table, own: Series, num_steps: int) -> dict[str, list[Any]]:
    """The predicted band at the steps it speaks of, and what was seen there; None where that is not known yet."""
    rows = table.records()
    return {
        "steps": [row["progress"] * num_steps - 1 for row in rows],
        **{name: [row[name] for row in rows] for name in ("low", "median", "high")},
        "seen": [_mean_before(own, row["progress"], row.get("window"), num_steps) for row in rows],
    }


def _mean_before(own: Series, progress: float, window: float | None, num_steps: int) -> float | None:
    if window is None or not own.steps or own.steps[-1] + 1 < progress * num_steps:
        return None
    first, last = (progress - window) * num_steps, progress * num_steps
    inside = [value for step, value in zip(own.steps, own.values) if first < step + 0.5 <= last]
    return sum(inside) / len(inside) if inside and all(map(math.isfinite, inside)) else None


def _belongs(name: str, panel: Panel) -> bool:
    return any(name == item or (item[-1] in "/_" and name.startswith(item)) for item in panel.names)


def _series(address: str, label: str, points: Series, ghosts: list[Series]) -> dict[str, Any]:
    """Points, what a rewind replaced, and a summary for readers without a picture."""
    finite = [value for value in points.values if math.isfinite(value)]
    summary = {"first": finite[0], "last": finite[-1], "low": min(finite), "high": max(finite)} if finite else None
    return {
        **{"run": address, "label": label, "role": "own", **_points(points.steps, points.values)},
        **{"count": len(points.values), "not_finite": len(points.values) - len(finite), "summary": summary},
        "ghosts": [_points(ghost.steps, ghost.values) for ghost in ghosts],
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
    assert packed.itemsize == 4, "points travel as 4-byte numbers"
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


def _axes(folder: Folder, surviving: dict[str, Series]) -> dict[str, Any]:
    """What turns a step of this run into tokens and into seconds since its first measurement."""
    longest = max(surviving.values(), key=lambda series: len(series.steps), default=None)
    last = max((series.steps[-1] for series in surviving.values()), default=0)
    of = folder.progress.of if folder.progress and folder.progress.of else last + 1
    return {
        "of": of,
        "tokens_per_step": _tokens_per_step(folder, surviving, of),
        "time": _times(longest) if longest else None,
    }


def _tokens_per_step(folder: Folder, surviving: dict[str, Series], num_steps: int) -> float | None:
    tokens = surviving.get("tokens")
    if tokens and len(tokens.steps) > 1:
        return (tokens.values[-1] - tokens.values[0]) / (tokens.steps[-1] - tokens.steps[0])
    total = folder.facts.get("tokens")
    return total / num_steps if total else None


def _times(series: Series, most: int = 400) -> dict[str, list[float]]:
    """A short table of (step, seconds since the first measurement), read by linear interpolation."""
    every = max(1, len(series.at) // most)
    picked = sorted({*range(0, len(series.at), every), len(series.at) - 1})
    start = datetime.fromisoformat(series.at[0])
    seconds = [round((datetime.fromisoformat(series.at[index]) - start).total_seconds(), 2) for index in picked]
    return {"steps": [series.steps[index] for index in picked], "seconds": seconds}


def _shorten(series: list[dict[str, Any]]) -> None:
    """In the panel of gradient norms, `norm/grad/adam` is `adam` and `norm/grad` is `all`."""
    names = [item["label"] for item in series]
    start = commonprefix(names)  # noqa: RUF071 (names of metrics, not paths)
    cut = start.rfind("/") if start in names else max(start.rfind("/"), start.rfind("_"))
    for item, name in zip(series, names):
        shorter = name[cut + 1 :].split("/", 1)[-1].replace("_", " ")
        item["label"] = "all" if any(other.startswith(f"{name}/") for other in names) else shorter
