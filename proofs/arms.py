"""One training run of the comparison of optimisers: what all share, how its length is fixed, its process.

An arm's number of steps comes from the *pace*: both optimisers' steps timed in turns in one process, so that a machine
that wanders harms both alike. From there on its result is a function of the number of steps and not of what else the
machine does. Finished arms are files in `voyages/optimizers/arms`, keyed by everything they depend on.
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
from noonsight.model.families import hero_reach, miniature

if TYPE_CHECKING:
    from noonsight.train.config import OptimizerConfig

HOUSE = Path(__file__).resolve().parents[1]
SECONDS = 300.0
VOCABULARY = 4096
BATCH_SIZE = 16  # rows of 256 tokens: 4,096 tokens a step
BETA2 = 0.98  # of both: what the miniature declares; the transfer rule would clamp it at this batch size
NEWTON_SCHULZ = "bfloat16"  # as in the hero; the C++ kernel where the processor has a unit for it
ADAMW_EPSILON, ADAMW_WARMUP = 1e-8, 0.05
PACE_TURNS, PACE_STEPS = 7, 6  # steps per turn; the first of a turn finds the caches full of the other's data
LOOKS = 3.0  # an arm of S seconds is looked at every S / 3 steps, so that arms can be compared at equal steps
DIVERGED = 99.0  # bits per byte of an arm whose loss was not finite: worse than any other
CORPUS = """from experiments.miniature import KINDS, TEXT, VOCABULARY
from noonsight.recipe.window import Experiment, curate, text_folders

def experiment():
    corpus = curate(text_folders(TEXT, kinds=KINDS), vocab_size=VOCABULARY)
    return Experiment(name="corpus", question="Which tokens?", expected="A store.", stages=corpus.stages)
"""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run of `num_steps`, as many as the pace allows in `seconds`. Kinds: "adamw", with its own `adam_lr` and
    `weight_decay`; "muonh", the exact recipe, with all its rates from the rule; "muonh-reach", the same with
    `hero_reach`.
    """

    kind: str
    seed: int
    seconds: float
    num_steps: int
    adam_lr: float | None = None
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        """File name of its result."""
        rates = "" if self.adam_lr is None else f"-lr{self.adam_lr:g}-decay{self.weight_decay:g}"
        return f"{self.kind}-seed{self.seed}-{self.seconds:g}s{rates}"


def model() -> ModelConfig:
    """The hero family at a size that learns much in five minutes on two cores: 5 million parameters."""
    heads = {"num_heads": 8, "head_width": 32, "num_kv_heads_local": 2, "num_kv_heads_global": 1}
    return replace(miniature(256, 3, VOCABULARY), **heads, matmul_dtype="bfloat16")


def pace(root: Path, when: str) -> dict[str, float]:
    """Seconds of a step of "adamw" and "muonh", medians over turns. `when` names the measurement: it is kept like an arm."""
    found = _kept(root, f"pace-{when}", {"pace": when})
    say(f"pace {when}: " + ", ".join(f"{kind} {each:.4f} s a step" for kind, each in found["step_s"].items()))
    return found["step_s"]


def arm(root: Path, planned: Arm) -> dict[str, Any]:
    """The result of an arm: from its file when it is there and was made under the same setting, else by running it."""
    found = _kept(root, planned.name, {"arm": asdict(planned)})
    say(
        f"{planned.name}: {found['bits_per_byte']:.4f} bits per byte, {found['num_steps']} steps in {found['seconds']:.1f} s"
    )
    return found


def _kept(root: Path, name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """What a process of this module wrote for `plan` under today's setting; it is started if there is nothing yet."""
    plan = {**plan, "setting": setting(), "root": str(root)}
    result = root / "arms" / f"{name}.json"
    if result.exists():
        known = json.loads(result.read_text())
        if all(known.get(part) == plan[part] for part in plan if part != "root"):
            return known
    from noonsight.logbook.record import Placement
    from noonsight.plan.child import environment

    result.parent.mkdir(parents=True, exist_ok=True)
    plan_file = result.with_suffix(".plan")
    plan_file.write_text(json.dumps(plan))
    command = [sys.executable, "-m", "proofs.arms", str(plan_file), str(result)]
    subprocess.run(command, cwd=HOUSE, env=environment(root, Placement()), check=True)
    return json.loads(result.read_text())


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


def main() -> int:
    """The process of one arm or pace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("result", type=Path)
    given = parser.parse_args()
    plan = json.loads(given.plan.read_text())
    from noonsight.logbook.write import write_atomic

    found = run_arm(plan) if "arm" in plan else run_pace(plan)
    about = {name: value for name, value in plan.items() if name != "root"}
    write_atomic(given.result, (json.dumps(about | found, indent=1) + "\n").encode())
    return 0


def run_pace(plan: dict[str, Any]) -> dict[str, Any]:
    """Both optimisers on the same model and batches, in turns, on weights that are thrown away."""
    rates = {"adamw": Arm(kind="adamw", seed=0, seconds=0, num_steps=1000, adam_lr=1e-3)}
    rates["muonh"] = replace(rates["adamw"], kind="muonh", adam_lr=None)
    runs = {kind: _Run(plan, planned) for kind, planned in rates.items()}
    step_s: dict[str, list[float]] = {kind: [] for kind in runs}
    for turn in range(PACE_TURNS):
        for kind in list(runs)[:: 1 if turn % 2 else -1]:
            for step in range(PACE_STEPS):
                runs[kind].take(turn * PACE_STEPS + step)
            if turn:
                step_s[kind] += runs[kind].step_s[-PACE_STEPS + 1 :]
    return {
        "step_s": {kind: round(statistics.median(each), 5) for kind, each in step_s.items()},
        "steps_s": {kind: [round(each, 4) for each in seconds] for kind, seconds in step_s.items()},
        "load": [round(each, 2) for each in os.getloadavg()],
    }


def run_arm(plan: dict[str, Any]) -> dict[str, Any]:
    """Train, look, evaluate."""
    from noonsight.recipe.measuring import make_measure

    planned = Arm(**plan["arm"])
    run = _Run(plan, planned)
    measure = make_measure(run.shape, Path(plan["root"]) / "corpus" / "store@1")
    every, curve = max(1, int(planned.seconds // LOOKS)), []
    for step in range(1, planned.num_steps + 1):
        if not math.isfinite(run.take(step - 1)):
            break
        if step % every == 0:
            curve.append((step, round(measure(run.state.params, run.state.extra, every=4).micro, 5)))
    diverged = not math.isfinite(run.losses[-1])
    scores = None if diverged else measure(run.state.params, run.state.extra)
    return {
        "optimizer": asdict(run.config),
        "bits_per_byte": scores.micro if scores else DIVERGED,
        "macro": scores.macro if scores else DIVERGED,
        "num_steps": len(run.losses),
        "tokens": len(run.losses) * run.batch_tokens,
        "passes": round(len(run.losses) / run.batches.num_steps_per_epoch, 3),
        "seconds": round(sum(run.step_s), 2),
        "step_s": round(statistics.median(run.step_s), 4),
        "compile_s": round(run.compile_s, 2),
        "train_loss": round(statistics.fmean(run.losses[-max(1, planned.num_steps // 10) :]), 5),
        "curve": curve,
        "load": [round(each, 2) for each in os.getloadavg()],
    }


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


def rates_of(planned: Arm, width: int, batch_tokens: int) -> OptimizerConfig:
    """MuonH by the transfer rule for its number of steps; AdamW as the arm says.

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
    rates = declare(hero_rates(planned.num_steps * batch_tokens, width, batch_tokens), beta2=BETA2)
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
    """A state, its batches and its compiled step; `take` trains one step, waits for it, and remembers its seconds and loss."""

    def __init__(self, plan: dict[str, Any], planned: Arm) -> None:
        import jax

        from noonsight.model.transformer import make_program
        from noonsight.tokens.batches import open_batches
        from noonsight.train.optim import make_optimizer
        from noonsight.train.step import init_state, make_train_step

        shape, rows = ModelConfig(**plan["setting"]["model"]), plan["setting"]["batch_size"]
        self.shape = hero_reach(shape) if planned.kind == "muonh-reach" else shape
        self.batch_tokens = rows * shape.sequence_length
        corpus = Path(plan["root"]) / "corpus"
        sizes = {"sequence_length": shape.sequence_length, "batch_size": rows}
        self.batches = open_batches(corpus / "store@1", corpus / "mixture@1", seed=planned.seed, **sizes)
        self.config = rates_of(planned, shape.width, self.batch_tokens)
        program, key = make_program(self.shape), jax.random.key(planned.seed)
        optimizer = make_optimizer(self.config, jax.eval_shape(program.init, key)[0], num_steps=planned.num_steps)
        self.state = jax.jit(lambda: init_state(program, optimizer, key))()
        self._step = make_train_step(program, optimizer)
        self._compiled: Any = None
        self.step_s: list[float] = []
        self.losses: list[float] = []
        self.compile_s = 0.0

    def take(self, step: int) -> float:
        """Train step `step`; its loss in nats."""
        from noonsight.train.step import compile_step

        start = time.perf_counter()
        data = self.batches.batch(step)
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


if __name__ == "__main__":
    sys.exit(main())
