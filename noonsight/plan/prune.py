"""What no experiment needs any more. Listing is safe; removing takes each folder's claim first.

Kept: stages of a current graph, inputs of any other stage, and whatever holds a prediction or a verdict. Folders that
a process works in are left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path

import msgspec

from noonsight.logbook import read, record
from noonsight.logbook.claim import Held, claim, holder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prunable:
    """A folder or file that can go, and why."""

    path: Path
    out: Path  # the stage folder that it is or lies in
    reason: str
    num_bytes: int


def prunable(root: Path) -> list[Prunable]:
    """What can go from `root`, by path. Raises ValueError when there is no such root."""
    if not Path(root).is_dir():
        raise ValueError(f"there is no folder {root}; say where results live with --root.")
    graphs = {each.name: set(each.stages) for each in read.experiments(root)}
    folders = read.all_folders(root)
    found = []
    inputs = set()
    for out in folders:
        run = read.run(out)
        assert run is not None
        inputs |= {out.parent / source["stage"] for source in run.inputs.values()}
    for out in folders:
        if out.parent.name not in graphs or holder(out, "stage") or holder(out, "worker"):
            continue
        cited = out.name in graphs[out.parent.name] or out in inputs
        if not cited and read.prediction(out) is None and read.verdict(out) is None:
            found.append(_prunable(out, out, "in no experiment's graph, input of nothing"))
        else:
            found.extend(_passing(out))
    return found


def remove(found: list[Prunable]) -> int:
    """Remove what `prunable` listed and return how many went; a folder that is in use by now stays."""
    num_removed = 0
    for each in found:
        with contextlib.suppress(Held), claim(each.out, "stage"):
            shutil.rmtree(each.path) if each.path.is_dir() else each.path.unlink()
            num_removed += 1
    return num_removed


def _passing(out: Path) -> list[Prunable]:
    """Temporary checkpoints of a finished stage and files that a killed writer left."""
    found = [_prunable(path, out, "left by a killed writer") for path in sorted(out.rglob("*.tmp"))]
    run = read.run(out)
    if run is not None and run.status == "done":
        for path in sorted(out.glob("checkpoints/*/manifest.json")):
            try:
                manifest = msgspec.json.decode(path.read_bytes(), type=record.CheckpointManifest)
            except msgspec.MsgspecError:
                found.append(_prunable(path.parent, out, "checkpoint whose manifest cannot be read"))
                continue
            if manifest.kind == "temporary":
                found.append(_prunable(path.parent, out, "temporary checkpoint of a finished stage"))
    return found


def _prunable(path: Path, out: Path, reason: str) -> Prunable:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return Prunable(path=path, out=out, reason=reason, num_bytes=sum(each.stat().st_size for each in files))
