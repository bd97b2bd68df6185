"""From scores to figures: medians, ratios, shares of the ceiling, what the issue demands; as JSON and as a table."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.ceiling import DIRECTIONS, Product, ceiling_flops_per_s
from benchmarks.contestants import REFERENCE, Shape
from benchmarks.rounds import Score

# name: (numerator's prefixes, denominator's prefixes, must be at least, goal)
DEMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], float, float]] = {
    "ours / transformers eager, the best of each": (("ours-moe",), ("torch-eager",), 1.5, 2.0),
    "ours / torch.compile, the best of each": (("ours-moe",), ("torch-compile",), 1.2, 1.5),
    "ours / Levanter, the best of each": (("ours-moe",), ("levanter",), 1.3, 1.3),
    "without AMX and our kernels, ours / transformers eager": (("ours-xla-f32-noamx", "ours-xla-bf16-noamx"), ("torch-eager-*-noamx",), 1.0, 1.0),
    "mixture / dense of equal FLOPs (1 / 1.25)": (("ours-moe-bf16",), ("ours-dense-bf16",), 0.8, 0.8),
}  # fmt: skip
CEILING_DEMAND = 0.45
WORDS = {True: "yes", False: "**no**", None: "not measured"}
SPECIAL = (
    "-noamx",
    "-avx512",
    "-muonh",
    "-bf16weights-eager",
    "-bf16weights-grouped",
)  # rows that answer a question of their own and are nobody's best


def shape_report(
    shape: Shape, scores: list[Score], found: list[Product], rates: list[dict[str, list[list[float]]]]
) -> dict[str, Any]:
    """Everything about one shape, ready for JSON."""
    median_rates = {
        way: [[statistics.median(turn[way][i][j] for turn in rates) for j in range(len(DIRECTIONS))] for i in range(len(found))]
        for way in rates[0]
    }  # fmt: skip
    ceilings = ceiling_flops_per_s(found, median_rates)
    reference = scores[0]
    rows = {score.contestant.name: _row(score, reference, shape, ceilings["best"]) for score in scores}
    return {
        "shape": asdict(shape),
        "tokens_per_step": shape.batch_size * shape.sequence_length,
        "reference": REFERENCE,
        "ceiling_flops_per_s": ceilings,
        "ceiling_products": [
            {**product._asdict(), "flops_per_s": {way: dict(zip(DIRECTIONS, table[i])) for way, table in median_rates.items()}}
            for i, product in enumerate(found)
        ],
        "contestants": rows,
        "demands": _demands(rows),
    }  # fmt: skip


def _row(score: Score, reference: Score, shape: Shape, ceiling: float) -> dict[str, Any]:
    contestant = score.contestant
    row: dict[str, Any] = {
        "side": contestant.side,
        "says": contestant.says,
        "options": contestant.options,
        "environment": contestant.environment,
        "train_flops_per_token": contestant.train_flops_per_token,
        "rejected": score.rejected,
    }
    if score.ready:
        row |= {"versions": score.ready["versions"], "parameters": score.ready["num_parameters"]}
    if not score.rounds:
        return row
    tokens = shape.batch_size * shape.sequence_length
    seconds = [s for turn in score.rounds.values() for s in turn]
    median = statistics.median(seconds)
    paired = [statistics.median(reference.rounds[turn]) / statistics.median(own) for turn, own in score.rounds.items()]
    same_heats = {heat for heat, _ in score.rounds}
    beside = [s for (heat, _), turn in reference.rounds.items() if heat in same_heats for s in turn]
    low, high = _quartiles(seconds)
    return row | {
        "tokens_per_s": tokens / median,
        "spread": (high - low) / median,
        "num_steps": len(seconds),
        "ratio": statistics.median(beside) / median,
        "ratio_of_rounds": [min(paired), max(paired)],
        "share_of_ceiling": tokens / median * contestant.train_flops_per_token / ceiling,
        "compile_s": score.ready["compile_s"],
        "peak_mib": score.peak_mib,
        "first_loss": score.losses[0],
        "last_loss": statistics.fmean(score.losses[-4:]),
    }


def _demands(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each demand with the two rows it compares; a demand whose sides did not run is left out."""
    held: dict[str, dict[str, Any]] = {}
    for name, (ours, theirs, least, goal) in DEMANDS.items():
        mine, other = _best(rows, ours), _best(rows, theirs)
        if mine is None or other is None:
            held[name] = {"value": None, "least": least, "goal": goal, "holds": None, "of": [mine, other]}
            continue
        value = rows[mine]["ratio"] / rows[other]["ratio"]
        held[name] = {"value": value, "least": least, "goal": goal, "holds": value >= least, "of": [mine, other]}
    best = _best(rows, ("ours-moe",))
    if best:
        value = rows[best]["share_of_ceiling"]
        held["share of the ceiling"] = {
            "value": value, "least": CEILING_DEMAND, "goal": CEILING_DEMAND, "holds": value >= CEILING_DEMAND, "of": [best]
        }  # fmt: skip
    return held


def _best(rows: dict[str, dict[str, Any]], patterns: tuple[str, ...]) -> str | None:
    """The fastest row that counts. A pattern is a whole name, a beginning, or beginning*end."""

    def fits(name: str) -> bool:
        for pattern in patterns:
            begin, star, end = pattern.partition("*")
            if name == pattern or (star and name.startswith(begin) and name.endswith(end)):
                return True
            if not star and name.startswith(begin) and not name.endswith(SPECIAL):
                return True
        return False

    counting = {
        name: row["ratio"] for name, row in rows.items() if fits(name) and not row["rejected"] and "ratio" in row
    }
    return max(counting, key=counting.__getitem__) if counting else None


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def markdown(figures: dict[str, Any]) -> str:
    """The whole measurement as Markdown: for the terminal and for `benchmarks/README.md`."""
    machine = figures["machine"]
    absent = "".join(f"\nAbsent: {side}: {why}." for side, why in figures["absent"].items())
    lines = [
        f"Commit {figures['commit']}, {figures['at']}; {machine['cpu']}, {machine['cores']} cores, "
        f"{', '.join(machine['flags']) or 'no AVX-512'}; {', '.join(f'{k} {v}' for k, v in figures['versions'].items())}; "
        f"{figures['settings']['num_rounds']} rounds, all with `{figures['settings']['allocator']}`.{absent}"
    ]
    for name, shape in figures["shapes"].items():
        lines += ["", f"### {name}", "", *_shape_lines(shape)]
    return "\n".join(lines) + "\n"


def _shape_lines(shape: dict[str, Any]) -> list[str]:
    ceilings = ", ".join(f"{way} {rate / 1e9:.0f}" for way, rate in shape["ceiling_flops_per_s"].items())
    flops = shape["contestants"][shape["reference"]]["train_flops_per_token"]
    lines = [
        f"{shape['tokens_per_step']} tokens per step, {flops / 1e6:.1f} MFLOP per token. Ceiling, GFLOP/s: {ceilings}.",
        "",
        "| contestant | tokens/s | ratio to the reference (rounds) | spread | of ceiling | FLOPs | M params | first step, s | peak MiB | loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in shape["contestants"].items():
        if row["rejected"] or "ratio" not in row:
            lines.append(f"| {name} | out: {row['rejected']} | | | | | | | | |")
            continue
        low, high = row["ratio_of_rounds"]
        lines.append(
            f"| {name} | {row['tokens_per_s']:.0f} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) | {row['spread']:.1%} "
            f"| {row['share_of_ceiling']:.0%} | {row['train_flops_per_token'] / flops:.3f} | {row['parameters'] / 1e6:.2f} "
            f"| {row['compile_s']:.1f} | {row['peak_mib']:.0f} | {row['first_loss']:.2f} to {row['last_loss']:.2f} |"
        )
    lines += ["", "| what must hold | measured | at least | goal | holds | compared |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {'' if demand['value'] is None else format(demand['value'], '.2f')} | {demand['least']} | {demand['goal']} "
        f"| {WORDS[demand['holds']]} | {', '.join(filter(None, demand['of']))} |"
        for name, demand in shape["demands"].items()
    ]
    return lines
