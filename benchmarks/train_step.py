"""Training steps side by side: ours, transformers on torch, Levanter, dense; equal active FLOPs, one run.

    python benchmarks/train_step.py [--json] [--shapes d256,d512] [--rounds N] [--quick]
    make bench-envs bench-train-step         (environments of the peers; the whole measurement, on an idle machine)

Everyone gets the same token ids, the same number of steps, all cores and the same allocator setting, in turns. Who has
another amount of work, another number of parameters than counted, or a loss that does not fall, is out. `--write`
keeps the result in `benchmarks/results/train_step.json` and in the table of `benchmarks/README.md`.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json as jsonlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cyclopts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it also runs as a file

from benchmarks.contestants import HOUSE, SHAPES, contestants
from benchmarks.report import markdown, shape_report
from benchmarks.rounds import ALLOCATOR, Contest, missing

RESULT = HOUSE / "benchmarks" / "results" / "train_step.json"
PAGE = HOUSE / "benchmarks" / "README.md"
HEADING = "## Train step: the last measurement\n\n"
TOLD_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")

app = cyclopts.App(name="train_step", help=__doc__)


@app.default
def train_step(
    *,
    shapes: str = "d256,d512",
    rounds: int = 7,
    steps: int = 2,
    only: str = "*",
    json: bool = False,
    write: bool = False,
    quick: bool = False,
    seed: int = 0,
    torch_python: Path = HOUSE / ".venv-bench" / "torch" / "bin" / "python",
    levanter_python: Path = HOUSE / ".venv-bench" / "levanter" / "bin" / "python",
) -> int:
    """Measure, print.

    Parameters
    ----------
    shapes: names of sizes, separated by commas: d256 (25M), d512 (95M), tiny.
    rounds: turns of every contestant.
    steps: measured steps per turn; one more before them is not measured.
    only: patterns of contestants, separated by commas, e.g. `ours-*,torch-eager-*`. The reference always runs.
    json: print JSON instead of the table.
    write: keep the result and the table.
    quick: the shape `tiny`, two rounds of one step: does it run?
    seed: of token ids and initial weights.
    torch_python: interpreter of the environment with torch and transformers.
    levanter_python: interpreter of the environment with marin-levanter.
    """
    if quick:
        shapes, rounds, steps = "tiny", 2, 1
    names = shapes.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise ValueError(f"train_step: no shape named {', '.join(unknown)}; choose of {', '.join(SHAPES)}")
    pythons = {"ours": Path(sys.executable), "torch": torch_python.absolute(), "levanter": levanter_python.absolute()}
    absent = missing(pythons, pythons)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    for side, why in absent.items():
        say(f"absent: {side}: {why}")
    figures = {
        "schema": 1,
        "commit": _commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "settings": {"allocator": _pairs(ALLOCATOR), "num_rounds": rounds, "steps_per_turn": steps, "seed": seed},
        "absent": absent,
        "shapes": {},
    }
    for name in names:
        shape = SHAPES[name]
        everybody = contestants(shape, _cpu_flags())
        chosen = [
            one
            for one in everybody
            if one.side not in absent and (one is everybody[0] or any(fnmatch.fnmatch(one.name, p) for p in only.split(",")))
        ]  # fmt: skip
        say(f"{name}: {len(chosen)} contestants")
        contest = Contest(
            shape=shape, field=chosen, pythons=pythons, num_rounds=rounds, steps_per_turn=steps,
            ceiling_s=0.2 if quick else 3.0, seed=seed, say=say,
        )  # fmt: skip
        figures["shapes"][name] = shape_report(shape, *contest.run())
    figures["versions"] = _versions(figures)
    if write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(jsonlib.dumps(figures, indent=1) + "\n")
        PAGE.write_text(PAGE.read_text().split(HEADING)[0] + HEADING + markdown(figures))
    print(jsonlib.dumps(figures, indent=1) if json else markdown(figures))
    return 0


def _versions(figures: dict[str, Any]) -> dict[str, str]:
    """Versions of every library, from the workers that used them."""
    found = {"python": platform.python_version(), "noonsight": importlib.metadata.version("noonsight")}
    for shape in figures["shapes"].values():
        for row in shape["contestants"].values():
            for name, version in row.get("versions", {}).items():
                found[f"{name} ({row['side']})"] = version
    return {name: version for name, version in found.items() if not name.startswith("kernels")}


def _machine() -> dict[str, Any]:
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    with open("/proc/meminfo") as lines:
        memory_mib = int(next(lines).split()[1]) // 1024
    flags = [flag for flag in TOLD_FLAGS if flag in _cpu_flags()]
    cores = len(os.sched_getaffinity(0))
    return {"cpu": cpu, "cores": cores, "flags": flags, "memory_mib": memory_mib, "load": os.getloadavg()[0]}


def _cpu_flags() -> set[str]:
    with open("/proc/cpuinfo") as lines:
        return set(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def _commit() -> str:
    told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HOUSE, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def _pairs(settings: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


if __name__ == "__main__":
    sys.exit(app())
