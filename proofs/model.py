"""Everything that the hero model and its optimiser must hold, measured: counts, rates, acceptance checks, speed, MuonH against AdamW.

    make prove-model            (over an hour on two idle cores; nothing else may run; a killed run goes on)

Writes `proofs/model.json` and its section of `proofs/README.md`. Speed is taken from `benchmarks/results/train_step.json`
(`make bench-train-step` measures it), the comparison from `proofs/optimizers.json` (`python -m proofs.optimizers`, which
`make prove-model` runs before), each with the commit it was measured at; what was not measured holds nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from proofs import acceptance, optimizers
from proofs import arms as arms_module
from proofs.miniature import HOUSE, commit, machine, now
from proofs.page import line, origin, verdicts, with_section

COMPARISON = HOUSE / "proofs" / "optimizers.json"
SPEED = HOUSE / "benchmarks" / "results" / "train_step.json"
HEADING = "## The model\n"
ROW = "| [model.json](model.json) | `make prove-model` | counts and rates, acceptance checks of model and optimiser, speed against peers, MuonH against AdamW at equal time |\n"
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2, "bfloat16, whole model": 4e-2}  # of relative errors
SHAPES = ("d256", "d512")  # at which speed must have been measured


def main() -> int:
    """Measure, write, print; 0 when everything was measured and holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write only this file, for a try")
    given = parser.parse_args()
    started = time.monotonic()
    figures: dict[str, Any] = {"machine": machine(), "commit": commit(), "at": now()}
    figures["acceptance"] = {each.__name__: measure(each.__name__) for each in acceptance.MEASUREMENTS}
    figures["speed"] = json.loads(SPEED.read_text()) if SPEED.is_file() else None
    figures["optimizers"] = json.loads(COMPARISON.read_text()) if COMPARISON.is_file() else None
    figures["summary"] = summary(figures)
    figures["minutes"] = round((time.monotonic() - started) / 60, 1)
    text = json.dumps(figures, indent=1) + "\n"
    if given.out:
        given.out.write_text(text)
    else:
        (HOUSE / "proofs" / "model.json").write_text(text)
        page = HOUSE / "proofs" / "README.md"
        page.write_text(with_section(page.read_text(), HEADING, ROW, table(figures)))
    print(table(figures))
    return 0 if all(line["holds"] for line in figures["summary"]) else 1


def measure(name: str) -> Any:
    """One of the acceptance measurements, in a process of its own."""
    print(f"measuring {name}", flush=True)
    command = [sys.executable, "-m", "proofs.acceptance", name]
    done = subprocess.run(command, cwd=HOUSE, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"proofs.acceptance {name} failed; what it said stands above")
    return json.loads(done.stdout)


def summary(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Each demand with its figure, the bound and whether it holds (None: not measured)."""
    return [
        *_counted(figures["acceptance"]),
        *_accepted(figures["acceptance"]),
        *_fast(figures["speed"]),
        *_learned(figures["optimizers"]),
    ]


def _counted(found: dict[str, Any]) -> list[dict[str, Any]]:
    whole = [row for row in found["counts"] if isinstance(row["published"], int)]
    rounded = [row for row in found["counts"] if not isinstance(row["published"], int)]
    wrong = sum(row["value"] != row["published"] for row in whole)
    return [
        line(f"`noon count`: whole numbers that differ from the published, of {len(whole)}", wrong, "=", 0),
        line("train FLOPs, largest relative difference", max(row["error"] for row in rounded), "<=", 3e-5),
        line(
            "`noon count hero --rates`: largest relative difference",
            max(row["error"] for row in found["rates"]),
            "<=",
            1e-4,
        ),
    ]


def _accepted(found: dict[str, Any]) -> list[dict[str, Any]]:
    norms, balance, bits = found["norms"], found["balance"], found["bits"]
    parity = [
        line(
            f"{kind} against the float64 reference, {about['comparisons']} arrays and gradients",
            about["error"],
            "<=",
            BOUNDS[kind],
        )
        for kind, about in found["parity"]["precisions"].items()
    ]
    exchanges = [
        line(f"exchange {name} against the dense oracle, {dtype}", error, "<=", BOUNDS[dtype.split()[0]])
        for name, errors in found["exchange"].items()
        for dtype, error in errors.items()
    ]
    return [
        line(f"norm drift of {norms['matrices']} MuonH and AdamH arrays over {norms['steps']} steps, relative", norms["drift"], "<=", 1e-5),
        line("the least turned of them meanwhile, relative to its norm", norms["least_turned"], ">", 0.1),
        line(f"fullest expert over mean after {balance['steps']} steps of quantile balancing", balance["last"], "<", 1.05),
        line("the same before the first", balance["first"], ">", 1.5),
        line(f"histogram quantile from the exact one, bins, {found['histogram']['cases']} cases", found["histogram"]["bins_off"], "<=", 1.0),
        *parity,
        line("exit code of the parity tests", found["parity"]["exit_code"], "=", 0),
        *exchanges,
        line("another document's tokens: largest change of a logit", found["segments"]["others"], "=", 0.0),
        line("the same in the document itself, least", found["segments"]["itself"], ">", 0.0),
        line("evaluation under the pending bias against the next training forward, relative", found["pending"]["error"], "<=", 1e-6),
        line("the same without the bias", found["pending"]["error_without_bias"], ">", 1e-6),
        line(f"different parameter hashes of two processes after {bits['steps']} steps", len(set(bits["hashes"])), "=", 1),
        line("the same losses to the bit", bits["same_losses"], "=", True),
    ]  # fmt: skip


def _fast(speed: dict[str, Any] | None) -> list[dict[str, Any]]:
    measured = speed["shapes"] if speed else {}
    absent = [
        line(f"{shape}: training speed against its peers (`make bench-train-step`)", None, ">=", None)
        for shape in SHAPES
        if shape not in measured
    ]
    return absent + [
        line(f"{shape}: {name} (goal {demand['goal']:g})", demand["value"], ">=", demand["least"])
        for shape, about in measured.items()
        for name, demand in about["demands"].items()
    ]


def _learned(found: dict[str, Any] | None) -> list[dict[str, Any]]:
    if found is None:
        return [line("MuonH against AdamW at equal time (`python -m proofs.optimizers`)", None, "=", None)]
    kinds = {"muonh": "MuonH as published", "muonh-reach": "MuonH with the hero's reach"}
    arms = [trio[kind] for trio in found["trios"] for kind in (*kinds, "adamw")]
    half, seconds = found["half_rate"]["bits_per_byte"], found["seconds"]
    lines = [
        line("seconds of a run, at least", seconds, ">=", arms_module.SECONDS),
        line("ratio of MuonH's to AdamW's step time: moved during the comparison by", optimizers.pace_moved(found["pace"]), "<=", 0.05),
        line("runs that diverged", sum(arm["bits_per_byte"] >= arms_module.DIVERGED for arm in arms), "=", 0),
    ]  # fmt: skip
    for kind, name in kinds.items():
        total, first = found["summary"][kind], found["trios"][0][kind]["bits_per_byte"]
        lines += [
            line(
                f"{name}: seeds in which it is below AdamW after {seconds:g} s", total["lower"], "=", total["num_seeds"]
            ),
            line(f"{name} minus AdamW, bits per byte, mean over seeds", total["difference"]["mean"], "<", 0.0),
            line(f"{name} minus AdamW at half its swept rate, one seed", first - half, "<", 0.0),
        ]
    return lines


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown, for `proofs/README.md`."""
    lines = [origin(figures), *verdicts(figures["summary"])]
    if figures["speed"]:
        lines.append(
            f"\nSpeed: commit {figures['speed']['commit']}, {figures['speed']['at']}; all rows in `benchmarks/README.md`."
        )
    if figures["optimizers"]:
        found = figures["optimizers"]
        lines += ["\n### MuonH against AdamW at equal time\n", f"Commit {found['commit']}, {found['at']}.\n"]
        lines.append(optimizers.table(found))
    return "\n".join([*lines, *(f"\n{note}" for note in figures.get("notes", []))]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
