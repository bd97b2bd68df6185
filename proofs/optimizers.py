"""The hero recipe (MuonH) against AdamW at equal time: same model, same batches, each with its own rates, three seeds.

    python -m proofs.optimizers                         (about an hour on two idle cores; a killed run goes on)
    python -m proofs.optimizers --seconds 20 --seeds 1  (a try)

*Time* is the seconds of the training steps, batches included; compiling and evaluating are measured beside it. An arm is
a process of its own, started as the launcher starts a worker. It times some steps on weights that it then throws away,
fixes its number of steps so that its schedule ends when the time is up, and trains. MuonH takes its rates from the
transfer rule, unseen. AdamW is given a sweep of peak rate and decay on a seed that is not used otherwise. Finished arms
are files in `voyages/optimizers/arms`, keyed by everything they depend on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noonsight.model import native
from noonsight.model.config import ModelConfig
from noonsight.model.families import miniature
from proofs.miniature import commit, machine, now

if TYPE_CHECKING:
    from noonsight.train.config import OptimizerConfig

HOUSE = Path(__file__).resolve().parents[1]
ROOT = HOUSE / "voyages" / "optimizers"
SEEDS, SWEEP_SEED = (1, 2, 3), 0  # announced
SECONDS, SWEEP_SECONDS = 300.0, 60.0
VOCABULARY = 4096
BATCH_SIZE = 16  # rows of 256 tokens: 4,096 tokens a step
BETA2 = 0.98  # of both: what the miniature declares; the transfer rule would clamp it at this batch size
NEWTON_SCHULZ = "bfloat16"  # as in the hero; the C++ kernel where the processor has a unit for it
ADAMW_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)  # swept with the first decay; continued while the best one is at an end
ADAMW_DECAYS = (0.1, 0.0, 0.3)  # the others are swept at the best rate
ADAMW_EPSILON, ADAMW_WARMUP = 1e-8, 0.05
WARM_STEPS, TIMED_STEPS = 3, 9
NUM_LOOKS = 12  # an arm of S seconds is looked at every S // 12 steps, so that arms can be compared at equal steps
DIVERGED = 99.0  # bits per byte of an arm whose loss was not finite: worse than any other
CORPUS = """from experiments.miniature import KINDS, TEXT, VOCABULARY
from noonsight.recipe.window import Experiment, curate, text_folders

def experiment():
    corpus = curate(text_folders(TEXT, kinds=KINDS), vocab_size=VOCABULARY)
    return Experiment(name="corpus", question="Which tokens?", expected="A store.", stages=corpus.stages)
"""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run. `adam_lr` and `weight_decay` are AdamW's own; MuonH takes all its rates from the rule."""

    kind: str
    seed: int
    seconds: float
    adam_lr: float | None = None
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        """File name of its result."""
        rates = "" if self.adam_lr is None else f"-lr{self.adam_lr:g}-decay{self.weight_decay:g}"
        return f"{self.kind}-seed{self.seed}-{self.seconds:g}s{rates}"


def model() -> ModelConfig:
    """The hero family at a size that learns much in five minutes on two cores: 5 million parameters.

    Rather wide than deep: the largest logit that the hero's fixed norms allow grows as the root of the width.
    """
    heads = {"num_heads": 8, "head_width": 32, "num_kv_heads_local": 2, "num_kv_heads_global": 1}
    return replace(miniature(256, 3, VOCABULARY), **heads, matmul_dtype="bfloat16")


def main() -> int:
    """Run what is not done yet, print the comparison, write it to `--out` if given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--sweep-seconds", type=float, help="of each arm of AdamW's sweep (a fifth of --seconds)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the announced seeds")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path, default=HOUSE / "proofs" / "optimizers.json")
    parser.add_argument("--arm", nargs=2, type=Path, help=argparse.SUPPRESS)  # the process of one arm: PLAN RESULT
    given = parser.parse_args()
    if given.arm:
        return run_arm(*given.arm)
    found = compare(given.root.resolve(), given.seconds, given.sweep_seconds or given.seconds / 5, SEEDS[: given.seeds])
    say(table(found))
    given.out.write_text(json.dumps({"commit": commit(), "at": now(), "machine": machine(), **found}, indent=1) + "\n")
    return 0


def compare(root: Path, seconds: float, sweep_seconds: float, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """Sweep AdamW, then run both on each seed in turn; the whole comparison as JSON. Goes on where it was killed."""
    make_corpus(root)
    num_sweep = len(ADAMW_RATES) + len(ADAMW_DECAYS) - 1
    num_arms = 2 * len(seeds) + 1
    total = num_sweep * sweep_seconds + num_arms * seconds
    say(f"{num_sweep} arms of {sweep_seconds:g} s, {num_arms} of {seconds:g} s: {total / 60:.0f} minutes of steps")
    swept = sweep(root, sweep_seconds)
    best = min(swept, key=lambda each: each["bits_per_byte"])["arm"]
    rates = {"adam_lr": best["adam_lr"], "weight_decay": best["weight_decay"]}

    def pair(seed: int) -> dict[str, Any]:
        both = [("muonh", {}), ("adamw", rates)][:: 1 if seed % 2 else -1]  # they take turns in going first
        return {"seed": seed} | {
            kind: arm(root, Arm(kind=kind, seed=seed, seconds=seconds, **own)) for kind, own in both
        }

    pairs = [pair(seed) for seed in seeds]
    # the sweep's arms are shorter, and the best rate falls with length: half of it must not be better than MuonH either
    lower = Arm(kind="adamw", seed=seeds[0], seconds=seconds, **rates | {"adam_lr": rates["adam_lr"] / 2})
    found = {"seconds": seconds, "setting": setting(), "sweep": swept, "pairs": pairs, "summary": summary(pairs)}
    return {**found, "half_rate": arm(root, lower)}


def sweep(root: Path, seconds: float) -> list[dict[str, Any]]:
    """AdamW's arms on the sweep's seed: rates by factors of two until the best is no end, then decays at the best."""

    def run(rate: float, decay: float) -> dict[str, Any]:
        return arm(root, Arm(kind="adamw", seed=SWEEP_SEED, seconds=seconds, adam_lr=rate, weight_decay=decay))

    swept = [run(rate, ADAMW_DECAYS[0]) for rate in ADAMW_RATES]
    while (best := _best_rate(swept)) in (ends := _ends(swept)):
        swept.append(run(best / 2 if best == ends[0] else best * 2, ADAMW_DECAYS[0]))
    return swept + [run(best, decay) for decay in ADAMW_DECAYS[1:]]


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Bits per byte of MuonH minus those of AdamW: mean over seeds and standard deviation; how often it is lower."""

    def spread(differences: list[float]) -> dict[str, float]:
        if not differences:
            return {}
        deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
        return {"mean": round(statistics.fmean(differences), 4), "standard_deviation": round(deviation, 4)}

    differences = [pair["muonh"]["bits_per_byte"] - pair["adamw"]["bits_per_byte"] for pair in pairs]
    at_steps = [at_equal_steps(pair) for pair in pairs]
    return {
        "muonh_lower": sum(difference < 0 for difference in differences),
        "num_seeds": len(pairs),
        "difference": spread(differences),
        "difference_at_equal_steps": spread([each["muonh"] - each["adamw"] for each in at_steps if each]),
    }


def at_equal_steps(pair: dict[str, Any]) -> dict[str, float]:
    """Sampled bits per byte of both after the last common look in the first half of both schedules, {} without one."""
    one, two = (dict(map(tuple, pair[kind]["curve"])) for kind in ("muonh", "adamw"))
    half = min(pair[kind]["num_steps"] for kind in ("muonh", "adamw")) // 2
    step = max((step for step in one.keys() & two.keys() if step <= half), default=None)
    return {} if step is None else {"step": step, "muonh": one[step], "adamw": two[step]}


def table(found: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    lines = ["| AdamW, seed 0 | peak rate | decay | steps | seconds | bits per byte |", "|---|---|---|---|---|---|"]
    for each in found["sweep"]:
        lines.append(
            f"| sweep | {each['arm']['adam_lr']:g} | {each['arm']['weight_decay']:g} | {each['num_steps']} "
            f"| {each['seconds']:.1f} | {each['bits_per_byte']:.4f} |"
        )
    lines += [
        "",
        "| seed | MuonH bits per byte (steps, seconds) | AdamW bits per byte (steps, seconds) | difference | at equal steps, mid-schedule: MuonH, AdamW |",
        "|---|---|---|---|---|",
    ]
    for pair in found["pairs"]:
        one, two = pair["muonh"], pair["adamw"]
        equal = at_equal_steps(pair)
        lines.append(
            f"| {pair['seed']} | {_cell(one)} | {_cell(two)} | {one['bits_per_byte'] - two['bits_per_byte']:+.4f} "
            + (f"| {equal['muonh']:.4f}, {equal['adamw']:.4f} (step {equal['step']}) |" if equal else "| |")
        )
    total = found["summary"]
    lines.append(
        f"\nMuonH minus AdamW: {total['difference']['mean']:+.4f} bits per byte (standard deviation over "
        f"{total['num_seeds']} seeds {total['difference']['standard_deviation']:.4f}), lower in "
        f"{total['muonh_lower']} of {total['num_seeds']}. AdamW had the sweep, MuonH the transfer rule."
    )
    lower = found["half_rate"]
    lines.append(f"\nAdamW at half that rate, seed {lower['arm']['seed']}, at full length: {_cell(lower)}.")
    return "\n".join(lines)


def arm(root: Path, planned: Arm) -> dict[str, Any]:
    """The result of an arm: from its file when it is there and was made under the same setting, else by running it."""
    plan = {"arm": asdict(planned), "setting": setting(), "root": str(root)}
    result = root / "arms" / f"{planned.name}.json"
    if result.exists():
        known = json.loads(result.read_text())
        if known["arm"] == plan["arm"] and known["setting"] == plan["setting"]:
            return known
    from noonsight.logbook.record import Placement
    from noonsight.plan.child import environment

    result.parent.mkdir(parents=True, exist_ok=True)
    plan_file = result.with_suffix(".plan")
    plan_file.write_text(json.dumps(plan))
    command = [sys.executable, "-m", "proofs.optimizers", "--arm", str(plan_file), str(result)]
    subprocess.run(command, cwd=HOUSE, env=environment(root, Placement()), check=True)
    found = json.loads(result.read_text())
    say(
        f"{planned.name}: {found['bits_per_byte']:.4f} bits per byte, {found['num_steps']} steps in {found['seconds']:.1f} s"
    )
    return found


def setting() -> dict[str, Any]:
    """What all arms share; an arm of another setting is run again."""
    return {
        "model": asdict(model()),
        "batch_size": BATCH_SIZE,
        "beta2": BETA2,
        "newton_schulz": NEWTON_SCHULZ,
        "adamw": {"epsilon": ADAMW_EPSILON, "warmup_fraction": ADAMW_WARMUP},
        "code": _code_hash(),
        "kernels": native.description(),
    }


def run_arm(plan_file: Path, result: Path) -> int:
    """The process of one arm: time some steps, fix the number of steps, train, evaluate, write the result at the end."""
    import jax

    from noonsight.logbook.write import write_atomic
    from noonsight.model.transformer import make_program
    from noonsight.recipe.measuring import make_measure
    from noonsight.tokens.batches import open_batches

    plan = json.loads(plan_file.read_text())
    planned = Arm(**plan["arm"])
    shape = ModelConfig(**plan["setting"]["model"])
    corpus = Path(plan["root"]) / "corpus"
    rows = plan["setting"]["batch_size"]
    length, key = shape.sequence_length, jax.random.key(planned.seed)
    batches = open_batches(
        corpus / "store@1", corpus / "mixture@1", seed=planned.seed, sequence_length=length, batch_size=rows
    )
    program, measure = make_program(shape), make_measure(shape, corpus / "store@1")
    trial = _Run(program, rates_of(planned, shape.width, rows * length, num_steps=1000), key, 1000)
    for step in range(WARM_STEPS + TIMED_STEPS):
        trial.take(batches.batch, step)
    timed_step_s = statistics.median(trial.step_s[WARM_STEPS:])
    num_steps = steps_in(planned.seconds, timed_step_s)

    run = _Run(program, rates_of(planned, shape.width, rows * length, num_steps=num_steps), key, num_steps)
    every, curve = max(1, int(planned.seconds // NUM_LOOKS)), []
    for step in range(1, num_steps + 1):
        if not math.isfinite(run.take(batches.batch, step - 1)):
            break
        if step % every == 0:
            curve.append((step, round(measure(run.state.params, run.state.extra, every=4).micro, 5)))
    diverged = not math.isfinite(run.losses[-1])
    scores = None if diverged else measure(run.state.params, run.state.extra)
    found = {
        **{name: plan[name] for name in ("arm", "setting")},
        "optimizer": asdict(run.config),
        "bits_per_byte": scores.micro if scores else DIVERGED,
        "macro": scores.macro if scores else DIVERGED,
        "num_steps": num_steps,
        "tokens": num_steps * rows * length,
        "passes": round(num_steps / batches.num_steps_per_epoch, 3),
        "seconds": round(sum(run.step_s), 2),
        "step_s": round(statistics.median(run.step_s), 4),
        "timed_step_s": round(timed_step_s, 4),
        "compile_s": round(run.compile_s, 2),
        "train_loss": round(statistics.fmean(run.losses[-max(1, num_steps // 10) :]), 5),
        "curve": curve,
        "load": [round(each, 2) for each in os.getloadavg()],
    }
    write_atomic(result, (json.dumps(found, indent=1) + "\n").encode())
    return 0


def _code_hash() -> str:
    """Of every source that an arm's numbers could depend on."""
    digest = hashlib.sha256()
    for path in sorted((HOUSE / "noonsight").rglob("*")):
        if path.suffix in (".py", ".cc", ".h") and path.relative_to(HOUSE).parts[1] in (
            "model",
            "train",
            "tokens",
            "evals",
        ):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def steps_in(seconds: float, step_s: float) -> int:
    """Whole steps of `step_s` that fit into `seconds`, but at least four, so that a try has a schedule."""
    return max(4, math.floor(seconds / step_s))


def rates_of(planned: Arm, width: int, batch_tokens: int, *, num_steps: int) -> OptimizerConfig:
    """MuonH by the transfer rule for this many steps; AdamW as the arm says.

    Raises ValueError where the rule clamps and the arm is of full length; a try may be too short for the rule.
    """
    from noonsight.scaling.transfer import declare, hero_rates, require_unclamped
    from noonsight.train.config import OptimizerConfig

    if planned.kind == "adamw":
        assert planned.adam_lr is not None
        return OptimizerConfig(
            kind="adamw",
            adam_lr=planned.adam_lr,
            matrix_lr=0.0,
            beta2=BETA2,
            epsilon=ADAMW_EPSILON,
            weight_decay=planned.weight_decay,
            warmup_fraction=ADAMW_WARMUP,
        )
    rates = declare(hero_rates(num_steps * batch_tokens, width, batch_tokens), beta2=BETA2)
    if planned.seconds >= SECONDS:
        require_unclamped(rates, planned.name)
    return OptimizerConfig(
        kind="muonh",
        adam_lr=rates.adam_lr,
        matrix_lr=rates.matrix_lr,
        beta1=rates.beta1,
        beta2=rates.beta2,
        epsilon=rates.epsilon,
        momentum=rates.momentum,
        newton_schulz=NEWTON_SCHULZ,
        warmup_fraction=rates.warmup_fraction,
        min_lr_fraction=rates.min_lr_fraction,
    )


class _Run:
    """A state and its compiled step; `take` trains one step, waits for it, and remembers its seconds and its loss."""

    def __init__(self, program: Any, config: OptimizerConfig, key: Any, num_steps: int) -> None:
        import jax

        from noonsight.train.optim import make_optimizer
        from noonsight.train.step import init_state, make_train_step

        optimizer = make_optimizer(config, jax.eval_shape(program.init, key)[0], num_steps=num_steps)
        self.config = config
        self.state = jax.jit(lambda: init_state(program, optimizer, key))()
        self._step = make_train_step(program, optimizer)
        self._compiled: Any = None
        self.step_s: list[float] = []
        self.losses: list[float] = []
        self.compile_s = 0.0

    def take(self, batch: Any, step: int) -> float:
        """Train step `step`; its loss in nats."""
        from noonsight.train.step import compile_step

        start = time.perf_counter()
        data = batch(step)
        if self._compiled is None:
            self._compiled = compile_step(self._step, self.state, data)
            self.compile_s = time.perf_counter() - start
            start = time.perf_counter()
        self.state, measured = self._compiled(self.state, data)
        self.losses.append(float(measured["loss"]))
        self.step_s.append(time.perf_counter() - start)
        return self.losses[-1]


def make_corpus(root: Path) -> None:
    """The token store of the miniature's text in `root/corpus`, made by its own stages; skipped when it is there."""
    from noonsight.plan.runner import run_experiment

    root.mkdir(parents=True, exist_ok=True)
    file = root / "corpus.py"
    file.write_text(CORPUS)
    if run_experiment(file, root) != 0:
        raise RuntimeError(f"the corpus could not be made in {root}; what was said above tells why")


def say(text: str) -> None:
    """One line, now."""
    print(text, flush=True)


def _best_rate(swept: list[dict[str, Any]]) -> float:
    return min(swept, key=lambda each: each["bits_per_byte"])["arm"]["adam_lr"]


def _ends(swept: list[dict[str, Any]]) -> tuple[float, float]:
    rates = [each["arm"]["adam_lr"] for each in swept]
    return min(rates), max(rates)


def _cell(result: dict[str, Any]) -> str:
    return f"{result['bits_per_byte']:.4f} ({result['num_steps']}, {result['seconds']:.1f})"


if __name__ == "__main__":
    sys.exit(main())
