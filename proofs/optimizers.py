"""The hero recipe (MuonH) against AdamW at equal time: same model, same batches, each with its own rates, three seeds.

    python -m proofs.optimizers                         (over an hour on two idle cores; a killed run goes on)
    python -m proofs.optimizers --seconds 20 --seeds 1  (a try)

*Time* is the seconds of the training steps, batches included; compiling and evaluating are not in it. The pace of both
optimisers is measured in turns before anything else and again at the end; it fixes how many steps an arm has
(`arms.py`), so that each schedule ends when the time is up. MuonH takes its rates from the transfer rule, unseen; it
runs once as published and once with a head whose logits reach as far as the hero's (`families.hero_reach`). AdamW is
given a sweep of peak rate and decay on a seed that is not used otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from proofs.arms import HOUSE, SECONDS, Arm, arm, make_corpus, pace, say, setting, steps_in
from proofs.miniature import commit, machine, now

ROOT = HOUSE / "voyages" / "optimizers"
SEEDS, SWEEP_SEED = (1, 2, 3), 0  # announced
ADAMW_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)  # swept with the first decay; continued while the best one is at an end
ADAMW_DECAYS = (0.1, 0.0, 0.3)  # the others are swept at the best rate
MUONH = ("muonh", "muonh-reach")


def main() -> int:
    """Run what is not done yet, print the comparison, write it to `--out` if given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--sweep-seconds", type=float, help="of each arm of AdamW's sweep (a fifth of --seconds)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the announced seeds")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path, default=HOUSE / "proofs" / "optimizers.json")
    given = parser.parse_args()
    found = compare(given.root.resolve(), given.seconds, given.sweep_seconds or given.seconds / 5, SEEDS[: given.seeds])
    say(table(found))
    given.out.write_text(json.dumps({"commit": commit(), "at": now(), "machine": machine(), **found}, indent=1) + "\n")
    return 0


def compare(root: Path, seconds: float, sweep_seconds: float, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """Pace, AdamW's sweep, all three on each seed in turn, pace again; as JSON. Goes on where it was killed."""
    make_corpus(root)
    before = pace(root, "before")
    num_sweep, num_arms = len(ADAMW_RATES) + len(ADAMW_DECAYS) - 1, 3 * len(seeds) + 1
    total = num_sweep * sweep_seconds + num_arms * seconds
    say(f"{num_sweep} arms of {sweep_seconds:g} s, {num_arms} of {seconds:g} s: {total / 60:.0f} minutes of steps")
    swept = sweep(root, sweep_seconds, before["adamw"])
    best = min(swept, key=lambda each: each["bits_per_byte"])["arm"]
    rates = {"adam_lr": best["adam_lr"], "weight_decay": best["weight_decay"]}

    def run(kind: str, seed: int, **own: Any) -> dict[str, Any]:
        num_steps = steps_in(seconds, before["adamw" if kind == "adamw" else "muonh"])
        return arm(root, Arm(kind=kind, seed=seed, seconds=seconds, num_steps=num_steps, **own))

    trios = [
        {"seed": seed, **{kind: run(kind, seed) for kind in MUONH}, "adamw": run("adamw", seed, **rates)}
        for seed in seeds
    ]
    # the sweep's arms are shorter, and the best rate falls with length: half of it must not be better than MuonH either
    lower = run("adamw", seeds[0], **rates | {"adam_lr": rates["adam_lr"] / 2})
    paces = {"before": before, "after": pace(root, "after")}
    found = {"seconds": seconds, "setting": setting(), "pace": paces, "sweep": swept, "trios": trios}
    return {**found, "half_rate": lower, "summary": {kind: summary(trios, kind) for kind in MUONH}}


def sweep(root: Path, seconds: float, step_s: float) -> list[dict[str, Any]]:
    """AdamW's arms on the sweep's seed: rates by factors of two until the best is no end, then decays at the best."""

    def run(rate: float, decay: float) -> dict[str, Any]:
        length = {"seconds": seconds, "num_steps": steps_in(seconds, step_s)}
        return arm(root, Arm(kind="adamw", seed=SWEEP_SEED, adam_lr=rate, weight_decay=decay, **length))

    swept = [run(rate, ADAMW_DECAYS[0]) for rate in ADAMW_RATES]
    while (best := _best_rate(swept)) in (ends := _ends(swept)):
        swept.append(run(best / 2 if best == ends[0] else best * 2, ADAMW_DECAYS[0]))
    return swept + [run(best, decay) for decay in ADAMW_DECAYS[1:]]


def pace_moved(paces: dict[str, dict[str, float]]) -> float:
    """How far the ratio of the two step times after the comparison is from that before it, as a share."""
    before, after = (paces[when]["muonh"] / paces[when]["adamw"] for when in ("before", "after"))
    return abs(after / before - 1)


def summary(trios: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Bits per byte of a MuonH minus those of AdamW: mean over seeds and standard deviation; how often it is lower."""

    def spread(differences: list[float]) -> dict[str, float]:
        if not differences:
            return {}
        deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
        return {"mean": round(statistics.fmean(differences), 4), "standard_deviation": round(deviation, 4)}

    differences = [each[kind]["bits_per_byte"] - each["adamw"]["bits_per_byte"] for each in trios]
    at_steps = [at_equal_steps(each, kind) for each in trios]
    return {
        "lower": sum(difference < 0 for difference in differences),
        "num_seeds": len(trios),
        "difference": spread(differences),
        "difference_at_equal_steps": spread([each["muonh"] - each["adamw"] for each in at_steps if each]),
    }


def at_equal_steps(trio: dict[str, Any], kind: str) -> dict[str, float]:
    """Sampled bits per byte of both after the last common look in the first half of both schedules, {} without one."""
    one, two = (dict(map(tuple, trio[each]["curve"])) for each in (kind, "adamw"))
    half = min(trio[each]["num_steps"] for each in (kind, "adamw")) // 2
    step = max((step for step in one.keys() & two.keys() if step <= half), default=None)
    return {} if step is None else {"step": step, "muonh": one[step], "adamw": two[step]}


def table(found: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    paces = found["pace"]
    lines = [
        "Seconds of a step, medians: "
        + "; ".join(f"{when} MuonH {each['muonh']:.4f}, AdamW {each['adamw']:.4f}" for when, each in paces.items())
        + f" (their ratio moved by {pace_moved(paces):.1%}).\n",
        "| AdamW, seed 0 | peak rate | decay | steps | bits per byte |",
        "|---|---|---|---|---|",
    ]
    for each in found["sweep"]:
        lines.append(
            f"| sweep | {each['arm']['adam_lr']:g} | {each['arm']['weight_decay']:g} | {each['num_steps']} "
            f"| {each['bits_per_byte']:.4f} |"
        )
    lines += [
        "",
        "| seed | MuonH as published: bits per byte (steps, seconds) | MuonH with the hero's reach | AdamW |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {each['seed']} | " + " | ".join(_cell(each[kind]) for kind in (*MUONH, "adamw")) + " |"
        for each in found["trios"]
    ]
    for kind, name in zip(MUONH, ("as published", "with the hero's reach")):
        total = found["summary"][kind]
        lines.append(
            f"\nMuonH {name} minus AdamW: {total['difference']['mean']:+.4f} bits per byte (standard deviation over "
            f"{total['num_seeds']} seeds {total['difference']['standard_deviation']:.4f}), lower in {total['lower']} of "
            f"{total['num_seeds']}{_middle(total['difference_at_equal_steps'])}."
        )
    lower = found["half_rate"]
    lines.append(
        f"\nAdamW had the sweep, MuonH the transfer rule. AdamW at half that rate, seed {lower['arm']['seed']}: {_cell(lower)}."
    )
    return "\n".join(lines)


def _best_rate(swept: list[dict[str, Any]]) -> float:
    return min(swept, key=lambda each: each["bits_per_byte"])["arm"]["adam_lr"]


def _ends(swept: list[dict[str, Any]]) -> tuple[float, float]:
    rates = [each["arm"]["adam_lr"] for each in swept]
    return min(rates), max(rates)


def _middle(spread: dict[str, float]) -> str:
    return f"; at equal steps in mid-schedule {spread['mean']:+.4f}" if spread else ""


def _cell(result: dict[str, Any]) -> str:
    return f"{result['bits_per_byte']:.4f} ({result['num_steps']}, {result['seconds']:.1f})"


if __name__ == "__main__":
    sys.exit(main())
