"""Verbs of the logbook: show, check, sql."""

from __future__ import annotations

import difflib
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from noonsight.cli.plan import VOYAGES

if TYPE_CHECKING:
    from noonsight.logbook import record


def show(name: str | None = None, *, root: Path = VOYAGES, json: bool = False, text: bool = False) -> int:
    """Show what the logbook holds: all experiments, one (NAME), or one of its stages (NAME/STAGE).

    Parameters
    ----------
    name
        An experiment, or EXPERIMENT/STAGE; nothing lists the experiments.
    root
        Where results live.
    json
        Print JSON for scripts.
    text
        Print everything as plain text, nothing shortened.
    """
    from noonsight.cli import summary
    from noonsight.logbook import read

    experiments = read.experiments(root)
    if not experiments:
        raise ValueError(f"there is no experiment in {root}; make one with noon run, or say where with --root.")
    if name is None:
        data = [summary.experiment(root, each) for each in experiments]
        lines = [summary.one_line(each) for each in data]
        print(json_format.dumps(data, indent=1) if json else "\n".join(lines))
        return 0
    chosen, _, stage = name.strip("/").partition("/")
    found = {each.name: each for each in experiments}
    if chosen not in found:
        raise ValueError(_unknown("experiment", chosen, list(found), f"in {root}"))
    if stage:
        return _show_stage(root, found[chosen], stage, json, text)
    report = summary.experiment(root, found[chosen])
    print(json_format.dumps(report, indent=1) if json else "\n".join(summary.lines(report, whole=text)))
    return 0


def sql(query: str, *, root: Path = VOYAGES, json: bool = False) -> int:
    """Answer a SELECT over the logbook: tables runs, events, metrics, predictions, verdicts.

    Parameters
    ----------
    query
        One SELECT of DuckDB's SQL; it sees the logbook and nothing else.
    root
        Where results live.
    json
        Print one JSON object per row.
    """
    from noonsight.logbook import read

    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; say where results live with --root.")
    columns, rows = read.sql(root, query)
    if json:
        for row in rows:
            print(json_format.dumps(dict(zip(columns, row)), default=str))
        return 0
    table = [columns, *[["" if value is None else str(value) for value in row] for row in rows]]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    for row in table:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip())
    return 0


def check(kind: Literal["predictions", "logbook"], *, root: Path = VOYAGES) -> int:
    """Verify what was recorded; exit code 1 when something does not hold.

    Parameters
    ----------
    kind
        predictions: the chain, every prediction's hash, every verdict. logbook: every line and every file's bytes.
    root
        Where results live.
    """
    from noonsight.cli import verify

    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; say where results live with --root.")
    num_checked, wrong = verify.predictions(root) if kind == "predictions" else verify.logbook(root)
    for line in wrong:
        print(f"wrong  {line}")
    print(f"{kind}: {num_checked} checked, {len(wrong)} wrong.")
    return 1 if wrong else 0


def _show_stage(root: Path, experiment: record.ExperimentRecord, stage: str, json: bool, text: bool) -> int:
    from noonsight.cli import summary
    from noonsight.logbook import read

    matching = [address for address in experiment.stages if stage in (address, address.partition("@")[0])]
    if not matching:
        raise ValueError(_unknown("stage", stage, list(experiment.stages), f"of {experiment.name}"))
    out = root / experiment.name / matching[-1]
    run = read.run(out)
    if run is None:
        raise ValueError(f"{out} has not run yet; noon run {experiment.file} brings it up to date.")
    report: dict[str, Any] = summary.stage(out, run)
    print(json_format.dumps(report, indent=1) if json else "\n".join(summary.stage_lines(report, whole=text)))
    return 0


def _unknown(kind: str, name: str, known: list[str], where: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
    return f"there is no {kind} {name!r} {where}. {hint}"
