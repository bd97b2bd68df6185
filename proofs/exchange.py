"""Experts across devices and the dress rehearsal, measured: exchanges, meshes, losses of the miniature, whole rehearsals.

    make prove-exchange         (an hour on two cores; needs the extras rehearse-gpu and rehearse-tpu; a killed run goes on)

Writes `proofs/exchange.json` and its section of `proofs/README.md`. Virtual devices and compilers of accelerators each
get a process of their own, and what one printed is kept for the commit it was measured at. What was not measured holds
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from proofs import rehearsal
from proofs.miniature import HOUSE, commit, machine, now
from proofs.page import line, origin, verdicts, with_section

HEADING = "## The exchange\n"
ROW = "| [exchange.json](exchange.json) | `make prove-exchange` | every exchange and mesh against one device, drops against a simulation, the hero compiled for accelerators |\n"
PUBLIC_POOL, PUBLIC_BEST = 138.2, 116.5  # GiB: the public run's pool, its best measured peak (Marin, #8753)
GIB = 2**30
KEPT = HOUSE / "voyages" / "exchange"
RACK_RUNS = {"hero-rack": "ragged, one rack", "hero-pooled": "pooled, one rack", "hero": "ragged, eleven racks"}
TPU_RUNS = {"hero-v5p": "hero on v5p", "hero-7x": "hero on 7x"}


def main() -> int:
    """Measure, write, print; 0 when everything was measured and holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write only this file, for a try")
    parser.add_argument("--python", default=sys.executable, help="an environment with the extras, for the rehearsals")
    parser.add_argument("--kept-only", action="store_true", help="measure nothing, write what is kept for this commit")
    given = parser.parse_args()
    started = time.monotonic()
    figures: dict[str, Any] = {"machine": machine(), "commit": commit(), "at": now()}
    runs = {"exchanges": ("exchange_matrix", sys.executable), "meshes": ("layout_matrix", sys.executable)}
    for name, (module, python) in runs.items():
        figures[name] = measured([python, "-m", f"proofs.{module}"], figures["commit"], given.kept_only)
    each = [[given.python, "-m", "proofs.rehearsal", name] for name in (*rehearsal.RUNS, "planted")]
    rows = [measured(command, figures["commit"], given.kept_only) for command in each]
    figures["rehearsals"] = [row for found in rows for row in found or []]
    figures["summary"] = summary(figures)
    figures["minutes"] = round((time.monotonic() - started) / 60, 1)
    text = json.dumps(figures, indent=1) + "\n"
    if given.out:
        given.out.write_text(text)
    else:
        (HOUSE / "proofs" / "exchange.json").write_text(text)
        page = HOUSE / "proofs" / "README.md"
        page.write_text(with_section(page.read_text(), HEADING, ROW, table(figures)))
    print(table(figures))
    return 0 if all(each["holds"] for each in figures["summary"]) else 1


def measured(command: list[str], commit: str, kept_only: bool = False) -> Any:
    """What a module of measurements prints, kept by commit; None where it is not kept and shall not be measured."""
    kept = KEPT / commit / f"{command[-1].removeprefix('proofs.')}.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    if kept_only:
        return None
    print(f"measuring {command[-1]}", flush=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(command, cwd=HOUSE, stdout=subprocess.PIPE, text=True, env=variables)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])} failed; what it said stands above")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(done.stdout)
    return json.loads(done.stdout)


def summary(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Each demand with its figure, the bound and whether it holds (None: not measured)."""
    by_name = {row["name"]: row for row in figures["rehearsals"]}
    return [
        *(_exchanges(figures["exchanges"]) if figures["exchanges"] else [line("exchanges", None, "=", None)]),
        *(_meshes(figures["meshes"]) if figures["meshes"] else [line("meshes", None, "=", None)]),
        *(each for name, title in RACK_RUNS.items() for each in _rehearsed(title, by_name.get(name, {}))),
        line("hero, ragged, one rack: peak, GiB (goal: the public run's best)", _gib(by_name.get("hero-rack", {})), "<=", PUBLIC_BEST),
        *(_within_budget(title, by_name.get(name, {})) for name, title in TPU_RUNS.items()),
        *_planted(by_name),
    ]  # fmt: skip


def _exchanges(found: dict[str, Any]) -> list[dict[str, Any]]:
    roomy = [row for row in found["rows"] if "draws" not in row]
    tight = [row for row in found["rows"] if "draws" in row]
    ways = f"{len({row['exchange'] for row in roomy})} exchanges, 1 to 8 devices"
    lines = []
    for dtype in ("float32", "bfloat16"):
        rows = [row for row in roomy if row["dtype"] == dtype]
        worst = max(row["error"] for row in rows)
        lines.append(
            line(
                f"{dtype}, {ways}, {len(rows)} programs: outputs and gradients from the dense oracle",
                worst,
                "<=",
                rows[0]["bound"],
            )
        )
    draws = sum(row["draws"] for row in tight)
    return [
        *lines,
        line("dropped where there is room", sum(row["dropped"] for row in roomy), "=", 0),
        line(f"dropped where there is none, {draws} draws", sum(row["dropped"] for row in tight), ">", 0),
        line("refusals of a device, by cause, that differ from the simulation", sum(row["wrong_counts"] for row in tight), "=", 0),
        line("the same draws: outputs and gradients of what is left", max(row["error"] for row in tight), "<=", tight[0]["bound"]),
        line(f"miniature on 4 devices, {len(found['training'])} exchanges: losses of {found['training'][0]['steps']} steps from one device, relative", max(row["error"] for row in found["training"]), "<=", 1e-5),
    ]  # fmt: skip


def _meshes(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    worst = max(max(row["loss"], row["metrics"], row["gradients"]) / row["bound"] for row in found)
    return [
        line("combinations of data, expert and context parallelism, accumulation and remat", len(found), ">=", 60),
        line("worst loss, metric or gradient from one device, in bounds (1e-5; bfloat16 models 4e-2)", worst, "<=", 1),
    ]


def _rehearsed(title: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    sent = (row.get("exchanged") or {}).get("ratio")
    return [
        line(f"hero, {title}: seconds to lower and compile", _sum(row, "lower_s", "compile_s"), "<=", 360),
        line(f"hero, {title}: GB of this computer", _over(row, "host_memory_bytes", 1e9), "<=", 8),
        line(f"hero, {title}: peak of a device, corrected, GiB", _gib(row), "<=", PUBLIC_POOL),
        line(f"hero, {title}: bytes of the exchange from its formula", None if sent is None else abs(sent - 1), "<=", 0.05),
        line(f"hero, {title}: useful and recomputed over model FLOPs", row.get("useful_and_recompute_over_model_flops"), "<=", 1.36),
    ]  # fmt: skip


def _within_budget(title: str, row: dict[str, Any]) -> dict[str, Any]:
    budget = _over(row, "budget_bytes_per_device", GIB)
    return line(f"{title}: peak of a device, GiB", _gib(row), "<=", budget)


def _planted(by_name: dict[str, Any]) -> list[dict[str, Any]]:
    rows = {name: row for name, row in by_name.items() if name.startswith("planted: ")}
    wrong = {name: row for name, row in rows.items() if name != "planted: none"}
    sound = rows.get("planted: none")
    return [
        line(f"planted mistakes that the report names, of {len(wrong)}", sum(bool(row["told"]) for row in wrong.values()) if wrong else None, "=", 3),
        line("mistakes told of the sound program", len(sound["told"]) if sound else None, "=", 0),
    ]  # fmt: skip


def _sum(row: dict[str, Any], *names: str) -> float | None:
    return sum(row[name] for name in names) if all(name in row for name in names) else None


def _over(row: dict[str, Any], name: str, unit: float) -> float | None:
    return row[name] / unit if name in row else None


def _gib(row: dict[str, Any]) -> float | None:
    return _over(row, "peak_bytes_per_device", GIB)


def table(figures: dict[str, Any]) -> str:
    """The section of the page."""
    lines = [origin(figures), *verdicts(figures["summary"])]
    lines += ["", "| rehearsal | devices | compile s | peak GiB | budget GiB | executed / model | step s | MFU | days |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    lines += [_rehearsal(row) for row in figures["rehearsals"] if not row["name"].startswith("planted")]
    return "\n".join(lines) + "\n"


def _rehearsal(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"| {row['name']} | failed: {row['failed'][:120]} |" + " |" * 7
    return (
        f"| {row['name']}: {row['target']}, {row['exchange']}, {row['remat']} | {row['devices']} "
        f"| {row['lower_s'] + row['compile_s']:.0f} | {row['peak_bytes_per_device'] / GIB:.1f} "
        f"| {row['budget_bytes_per_device'] / GIB:.1f} | {row['executed_over_model_flops']:.3f} "
        f"| {row['step_s_estimate']:.1f} | {row['mfu_estimate']:.1%} | {row['days_estimate']:.0f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
