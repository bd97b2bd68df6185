"""Many rehearsals as a table: every combination of a few changes of one job.

A change is written `field=value,value`: exchange=ragged,pooled remat=block,offload capacity=1.0,1.15 rows=8,16
(sequences per device).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from noonsight.train.rehearse.compile import CompilationFailed
from noonsight.train.rehearse.job import Job, changed, row_shards
from noonsight.train.rehearse.report import Rehearsal, rehearse
from noonsight.train.rehearse.targets import GIB

FIELDS = ("exchange", "capacity", "remat", "rows", "layers")
Change = dict[str, str]


def combinations(told: Sequence[str]) -> list[Change]:
    """Every combination of the changes told, each as field -> value. Raises ValueError for a field that is not known."""
    choices: list[list[tuple[str, str]]] = []
    for text in told:
        field, _, values = text.partition("=")
        if field not in FIELDS or not values:
            raise ValueError(
                f"--what-if {text!r} is no change; write FIELD=VALUE,VALUE with one of {', '.join(FIELDS)}, such as "
                "remat=block,offload"
            )
        choices.append([(field, value) for value in values.split(",")])
    return [dict(each) for each in itertools.product(*choices)]


def apply(job: Job, change: Change) -> Job:
    """`job` with a change. Raises ValueError for a value that cannot be."""
    for field, value in change.items():
        if field == "rows":
            job = replace(job, rows=_number(int, field, value) * row_shards(job.mesh))
        elif field == "capacity":
            job = changed(job, capacity_factor=None if value == "none" else _number(float, field, value))
        elif field == "layers":
            job = changed(job, num_layers=_number(int, field, value))
        elif field == "exchange" and value in ("sorted", "einsum"):
            job = changed(job, exchange=value, capacity_factor=None)
        else:
            job = changed(job, **{field: value})
    return job


def sweep(job: Job, changes: Iterable[Change], **options: Any) -> list[tuple[Change, Rehearsal | str]]:
    """A rehearsal of each change, or why there is none."""
    found: list[tuple[Change, Rehearsal | str]] = []
    for change in changes:
        try:
            found.append((change, rehearse(apply(job, change), **options)))
        except CompilationFailed as error:
            found.append((change, str(error)))
    return found


def table(found: Sequence[tuple[Change, Rehearsal | str]]) -> str:
    """The sweep to be read: one line each."""
    heads = ("change", "peak GiB", "fits", "all-to-all GiB", "step s", "MFU", "days", "compile s")
    rows = [list(heads)]
    for change, answer in found:
        name = " ".join(f"{field}={value}" for field, value in change.items())
        if isinstance(answer, str):
            rows.append([name, "-", "-", "-", "-", "-", "-", answer])
            continue
        sent = sum(row.bytes_per_device for row in answer.found.collectives if "all-to-all" in row.kind)
        time = answer.estimate
        rows.append([name, f"{answer.found.peak_bytes / GIB:.2f}", "yes" if answer.fits else "NO", f"{sent / GIB:.2f}",
                     f"{time.step_s:.1f}", f"{time.mfu:.1%}", f"{time.days:,.1f}", f"{answer.found.compile_s:.0f}"])  # fmt: skip
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads) - 1)]
    return "\n".join("  ".join([*(map(str.ljust, row, widths)), row[-1]]).rstrip() for row in rows)


def _number(kind: Callable[[str], Any], field: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"--what-if {field}={value}: {value!r} is no number") from None
