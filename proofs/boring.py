"""Boring runs, measured: drills of two hundred faults, restarts, checkpoints, sentinels, and where the time went.

    make prove-boring           (half an hour on two idle cores; nothing else may run)

Each part is a process of its own and what it printed is kept for the commit it was measured at, so a killed proof goes on.
Writes `proofs/boring.json` and its section of `proofs/README.md`. Seeds were announced here before any of them was run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from noonsight.logbook import read
from noonsight.logbook.goodput import UNATTENDED, account
from proofs.miniature import HOUSE, NOON, commit, machine, now
from proofs.page import line, origin, verdicts, with_section

HEADING = "## Boring runs\n"
ROW = "| [boring.json](boring.json) | `make prove-boring` | two hundred faults on purpose, restarts, saves, sentinels, goodput |\n"
KEPT = HOUSE / "voyages" / "boring"
DRILLS = (  # name, experiment, stage, faults, seed, kinds
    ("restarts", "miniature", "target", 12, 11, ("kill",)),
    ("one", "drill", "small", 80, 1, ()),
    ("two", "drill", "small", 80, 2, ()),
    ("pair", "drill", "pair", 28, 3, ()),
)


def main() -> int:
    """Measure, write, print; 0 when everything holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write only this file, for a try")
    given = parser.parse_args()
    started = time.monotonic()
    figures: dict[str, Any] = {"machine": machine(), "commit": commit(), "at": now()}
    kept = KEPT / figures["commit"]
    python = [sys.executable, "-m"]
    figures["saves"] = measured([*python, "proofs.saves"], kept / "saves.json")
    figures["benchmark"] = measured([*python, "benchmarks.checkpoint", "--json"], kept / "benchmark.json")
    figures["drills"] = [drilled(*each, kept) for each in DRILLS]
    figures["sentinels"] = measured([*python, "proofs.sentinels"], kept / "sentinels.json")
    figures["devices"] = measured([*python, "proofs.device_counts"], kept / "devices.json")
    figures["summary"] = summary(figures)
    figures["minutes"] = round((time.monotonic() - started) / 60, 1)
    text = json.dumps(figures, indent=1) + "\n"
    if given.out:
        given.out.write_text(text)
    else:
        (HOUSE / "proofs" / "boring.json").write_text(text)
        page = HOUSE / "proofs" / "README.md"
        page.write_text(with_section(page.read_text(), HEADING, ROW, table(figures)))
    print(table(figures))
    return 0 if all(each["holds"] for each in figures["summary"]) else 1


def measured(command: list[str], kept: Path) -> Any:
    """What a command prints as JSON, run at most once for a commit."""
    if not kept.is_file():
        print(f"measuring {kept.stem}", flush=True)
        quiet = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, cwd=HOUSE, stdout=subprocess.PIPE, text=True, env=quiet)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command[1:])} failed; what it said stands above")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(done.stdout)
    return json.loads(kept.read_text())


def drilled(name: str, experiment: str, stage: str, faults: int, seed: int, only: tuple[str, ...], kept: Path) -> Any:
    """One drill: its facts, the clock of this process around it, and the account of the disturbed run."""
    told = kept / f"drill-{name}.json"
    if told.is_file():
        return json.loads(told.read_text())
    print(f"drilling {name}: {faults} faults", flush=True)
    root = kept / name
    command = [NOON, "drill", f"experiments/{experiment}.py", "--kills", str(faults), "--seed", str(seed)]
    command += ["--stage", stage, "--root", str(root), "--json", *(("--only", *only) if only else ())]
    done = subprocess.run(command, cwd=HOUSE, stdout=subprocess.PIPE, text=True)
    (folder,) = [path for path in root.glob("*drill*") if path.is_dir()]
    found = {"name": name, "experiment": experiment, "stage": stage, "seed": seed, "exit_code": done.returncode}
    found |= {"facts": json.loads((folder / "drill@1" / "drill.json").read_text()), "clocks": []}
    for run in ("undisturbed", "disturbed"):
        found["clocks"].append(_clocks(folder / f"{run}@1"))
    told.parent.mkdir(parents=True, exist_ok=True)
    told.write_text(json.dumps(found))
    return found


def _clocks(out: Path) -> dict[str, Any]:
    """The account of a run beside the wall clock that the plan kept of it: the sum of its attempts' seconds."""
    found, run = account(out), read.run(out)
    assert found is not None and run is not None
    attended = found.wall_s - found.parts[UNATTENDED]
    return {
        "run": out.name,
        "wall_s": found.wall_s,
        "attended_s": round(attended, 3),
        "recorded_s": run.seconds,
        "off_s": round(abs(attended - run.seconds), 3),
        "goodput": round(found.share, 4),
        "parts": found.parts,
        "supervisors": sum(event.kind == "start" for event in read.events(out)),
    }


def summary(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Each demand with its figure, the bound and whether it holds."""
    facts = [each["facts"] for each in figures["drills"]]
    restarts = next(each["facts"] for each in figures["drills"] if each["name"] == "restarts")
    memory, stall = figures["saves"]["memory"], figures["saves"]["stall"]
    ours = figures["benchmark"]["contestants"]["ours"]
    planted = figures["sentinels"]["planted"]
    told = [each for each in planted if each["steps"] is not None and each["steps"] <= 50]
    whole = [each for drill in figures["drills"] for each in drill["clocks"] if each["supervisors"] == 1]
    devices = figures["devices"]
    return [
        line("random faults that struck", sum(each["faults"] for each in facts), ">=", 200),
        line("of them not recovered from", sum(each["faults"] - each["recovered"] for each in facts), "=", 0),
        line("samples lost", sum(each["lost_samples"] for each in facts), "=", 0),
        line("samples repeated", sum(each["repeated_samples"] for each in facts), "=", 0),
        line("drills whose final weights differ from the undisturbed run's", sum(not each["final_weights_identical"] for each in facts), "=", 0),
        line("drills whose losses differ", sum(not each["loss_sequence_identical"] for each in facts), "=", 0),
        line("false alarms in all drills", sum(each["false_alarms"] for each in facts), "=", 0),
        line("miniature's model, SIGKILL to the first step of the new worker: median, s", restarts["median_restart_s"], "<=", 6),
        line("the same until the lost steps were regained: median, s", restarts["median_regain_s"], ">=", 0),
        line(f"{memory['saves']} saves: memory, MB a save", memory["slope_mb_per_save"], "<=", 0.1),
        line(f"a save beside a step of {1e3 * stall['step_s']:.0f} ms: median share of the step", stall["beside_a_save"]["median"], "<=", 0.1),
        line("the same, the worst of all saves", stall["beside_a_save"]["most"], "<=", 0.1),
        line("1 GB: save over a plain copy with fsync", ours["save_over_copy"], "<=", 1.5),
        line("1 GB: restore, verified, over the same copy", ours["restore_over_copy"], "<=", 1.5),
        line(f"sentinels whose planted fault was told within 50 steps, of {len(planted)}", len(told), "=", len(planted)),
        line(f"false alarms in {figures['sentinels']['clean_steps']} clean steps", len(figures["sentinels"]["false_alarms"]), "<=", 1),
        line("clean steps", figures["sentinels"]["clean_steps"], ">=", 10_000),
        line("numbers of devices that saw other samples after a resume, of 1, 2, 4, 8", sum(not each["same_samples"] for each in devices), "=", 0),
        line("the same: losses from one device, relative", max(each["losses_off"] for each in devices), "<=", 1e-6),
        line("the same: numbers whose second run gave other bits", sum(not each["same_bits_again"] for each in devices), "=", 0),
        line(f"goodput's parts from the wall clock, worst of {len(whole)} runs under one supervisor, s", max(each["off_s"] for each in whole), "<=", 1),
    ]  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    """The section of the page."""
    lines = [origin(figures), *verdicts(figures["summary"])]
    lines += ["", "| drill | faults | restarts | median to the first step, s | lost, s | goodput |", "|---|---|---|---|---|---|"]  # fmt: skip
    for each in figures["drills"]:
        facts = each["facts"]
        lines.append(
            f"| {each['experiment']}, {each['stage']}, seed {each['seed']} | {facts['faults']} | {facts['num_restarts']} "
            f"| {facts['median_restart_s']} | {facts['seconds_lost']} | {each['clocks'][-1]['goodput']:.1%} |"
        )
    kinds = sum((Counter(each["facts"]["by_kind"]) for each in figures["drills"]), Counter())
    lines += ["", "Faults by kind: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) + "."]
    contestants = figures["benchmark"]["contestants"]
    lines += ["", "| 1 GB | save, s | restore, s | save / copy | restore / copy |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {each['save_s']:.2f} | {each['restore_s']:.2f} | {each['save_over_copy']:.2f} | {each['restore_over_copy']:.2f} |"
        for name, each in contestants.items()
    ]
    lines += ["", "| sentinel | planted at step | told at | within |", "|---|---|---|---|"]
    lines += [f"| {each['sentinel']} | {each['step']} | {each['told_at']} | {each['steps']} |" for each in figures["sentinels"]["planted"]]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
