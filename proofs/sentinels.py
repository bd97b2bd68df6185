"""Every sentinel against a fault of its own, planted in the training of a real small model, and against clean steps.

    python -m proofs.sentinels          (four minutes; prints JSON)

A fault stands from step PLANTED on; the sentinel must speak within 50 steps. Clean: the six runs of `proofs/calm.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Placement
from noonsight.model import attention
from noonsight.model.program import Program
from noonsight.model.transformer import make_program
from noonsight.plan.runner import load_experiment, run_experiment
from noonsight.plan.screen import Screen
from noonsight.recipe.measuring import make_measure
from noonsight.tokens.batches import Batch, Batches, open_batches
from noonsight.train import optim, pretrain, recover
from noonsight.train.config import PretrainConfig
from noonsight.train.health import RULES
from noonsight.train.journal import BadStep
from proofs.miniature import HOUSE

PLANTED, STEPS = 100, 160
MARK = 2.0  # weight of the last position of a marked batch, which has none otherwise


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a fault may change of a run."""

    config: PretrainConfig
    program: Program
    batch: Callable[[int], Batch]
    sources: Callable[[int], Mapping[str, tuple[float, float]]]
    evaluate: Callable[[Any, Any, int], dict[str, float]] | None = None


Fault = Callable[[Run], Run]


def main() -> int:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        json.dump(measure(Path(folder)), sys.stdout, indent=1)
    return 0


def measure(root: Path) -> dict[str, Any]:
    """{"planted": [{"sentinel", "step", "told_at", "steps"}], "clean_steps", "false_alarms": [...]}."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / ".cache" / "jax"))
    with open(os.devnull, "w") as nowhere:
        assert run_experiment(HOUSE / "proofs" / "calm.py", root, screen=Screen(nowhere)) == 0
    experiment = load_experiment(HOUSE / "proofs" / "calm.py")
    runs = [stage for stage in experiment.ordered() if isinstance(stage.config, PretrainConfig)]
    alarms = [
        {"run": stage.name, "step": event.step, "sentinel": event.cause, "text": event.text}
        for stage in runs
        for event in read.events(root / experiment.name / stage.address)
        if event.kind in ("sentinel", "bad-steps")
    ]
    inputs = {name: root / experiment.name / given.address for name, given in runs[0].inputs.items()}
    names = sys.argv[1:] or [rule.name for rule in RULES]
    planted = [_plant(name, runs[0].config, inputs, root / "planted") for name in names]
    return {
        "planted": planted,
        "clean_steps": sum(stage.config.num_steps for stage in runs),
        "false_alarms": alarms,
    }


def _plant(name: str, config: PretrainConfig, inputs: Mapping[str, Path], root: Path) -> dict[str, Any]:
    """Train with the fault of one sentinel; when it spoke, None where it did not."""
    config = replace(
        config,
        num_steps=STEPS,
        horizon=None,
        evaluate_every=0,
        checkpoint_every=0,
        hash_every=0,
        skip_spikes=name != "loss-jump",
        batch_size=32 if name == "document-ends" else config.batch_size,  # so that enough documents end to tell
    )
    batches = open_batches(
        inputs["store"],
        inputs["mixture"],
        seed=config.seed,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        num_steps=STEPS,
    )
    fault, since = FAULTS[name]
    out = root / name
    out.mkdir(parents=True)
    with ExitStack() as stack:
        run = stack.enter_context(_faulty(fault, config, batches, inputs["store"]))
        part = pretrain.Part(run.program, run.batch, run.evaluate, sources=run.sources)
        owned = stack.enter_context(claim(out, "worker"))
        try:
            pretrain.pretrain(run.config, lambda _: part, out, owned, Placement(temporary_every_s=0.0))
        except BadStep:  # the loop stops at once: the sentinel is its own end
            pass
    if since is None:  # it is there from where held-out text is read best
        curve = read.metrics(out)["eval/bits_per_byte"]
        since = curve.steps[int(np.argmin(curve.values))]
    told = [event.step for event in read.events(out) if _is_told(event, name)]
    first = min((step for step in told if step >= since), default=None)
    after = 0 if name.startswith("eval-") else 1  # an evaluation is numbered by completed steps
    return {
        "sentinel": name,
        "step": since,
        "told_at": first,
        "steps": None if first is None else first - since + after,
    }


def _is_told(event: Any, name: str) -> bool:
    return (event.kind == "sentinel" and event.cause == name) or (event.kind == "bad-steps" and event.cause == name)


@contextmanager
def _faulty(fault: Any, config: PretrainConfig, batches: Batches, store: Path) -> Iterator[Run]:
    run = Run(config=config, program=make_program(config.model), batch=batches.batch, sources=batches.sources)
    if fault is _overfitting:
        measured = make_measure(config.model, store)
        run = replace(
            run, evaluate=lambda params, extra, step: {"eval/bits_per_byte": measured(params, extra, every=9).micro}
        )
    made = fault(run)
    with made[1] if isinstance(made, tuple) else mock.patch.object(recover, "__doc__", recover.__doc__):
        yield made[0] if isinstance(made, tuple) else made


# Faults in the batches


def _from(change: Callable[[Batch, int], Batch]) -> Fault:
    """Change every batch from PLANTED on."""

    def fault(run: Run) -> Run:
        return replace(run, batch=lambda step: change(run.batch(step), step) if step >= PLANTED else run.batch(step))

    return fault


def _poisoned(batch: Batch, step: int) -> Batch:
    return batch._replace(weights=np.full_like(batch.weights, np.nan))


def _garbage(batch: Batch, step: int) -> Batch:
    """Text of another world: one rare token over and over, then any."""
    tokens = np.random.default_rng(step).integers(500, 511, batch.tokens.shape).astype(np.int32)
    return batch._replace(tokens=tokens) if step == PLANTED else batch


def _endless(batch: Batch, step: int) -> Batch:
    return batch._replace(segments=np.zeros_like(batch.segments))


def _twice_ended(batch: Batch, step: int) -> Batch:
    segments = batch.segments.copy()
    segments[0] = np.minimum(np.arange(segments.shape[1]), 2)
    return batch._replace(segments=segments)


def _marked(batch: Batch, step: int) -> Batch:
    weights = batch.weights.copy()
    weights[0, -1] = MARK
    return batch._replace(weights=weights)


def _dry(run: Run) -> Run:
    def sources(step: int) -> dict[str, tuple[float, float]]:
        found = dict(run.sources(step))
        driest = max(found, key=lambda name: found[name][1])
        return found | {driest: (0.0, found[driest][1])} if step >= PLANTED else found

    return replace(run, sources=sources)


# Faults in the program


def _where_marked(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Fault:
    """`change(params, extra, marked)` of what the loss is given, and a factor of its gradient."""

    def fault(run: Run) -> Run:
        def loss(params: Any, extra: Any, batch: Any) -> Any:
            marked = batch.weights[0, -1] == MARK
            clean = batch._replace(
                weights=batch.weights.at[0, -1].set(0.0) if hasattr(batch.weights, "at") else batch.weights
            )
            params, extra, factor = change(params, extra, marked)
            value, aux = run.program.loss(params, extra, clean)
            return jax.lax.stop_gradient(value * (1 - factor)) + value * factor, aux

        return _from(_marked)(replace(run, program=Program(run.program.init, loss, run.program.after_step)))

    return fault


def _without_gradient(params: Any, extra: Any, marked: Any) -> tuple[Any, Any, Any]:
    return params, extra, jnp.where(marked, 0.0, 1.0)


def _with_huge_gradient(params: Any, extra: Any, marked: Any) -> tuple[Any, Any, Any]:
    return params, extra, jnp.where(marked, 100.0, 1.0)


def _with_a_frozen_expert(params: Any, extra: Any, marked: Any) -> tuple[Any, Any, Any]:
    def frozen(leaf: Any) -> Any:
        first = leaf[:, :1]
        return jnp.concatenate([jnp.where(marked, jax.lax.stop_gradient(first), first), leaf[:, 1:]], axis=1)

    experts = {name: frozen(getattr(params.layers, name)) for name in ("expert_gate", "expert_up", "expert_down")}
    return replace(params, layers=replace(params.layers, **experts)), extra, 1.0


def _with_an_idle_expert(params: Any, extra: Any, marked: Any) -> tuple[Any, Any, Any]:
    beta = extra["pending_beta"]
    return params, {"pending_beta": beta.at[:, 0].add(jnp.where(marked, 15.0, 0.0))}, 1.0


def _with_a_wild_bias(params: Any, extra: Any, marked: Any) -> tuple[Any, Any, Any]:
    beta = extra["pending_beta"]
    return params, {"pending_beta": beta.at[:, 0].add(jnp.where(marked, 100.0, 0.0))}, 1.0


def _unbalanced(run: Run) -> Run:
    return replace(run, program=Program(run.program.init, run.program.loss, lambda extra, aux: extra))


# Faults in the recipe


def _config(**changes: Any) -> Fault:
    def fault(run: Run) -> Run:
        config = replace(run.config, **changes)
        return replace(run, config=config, program=make_program(config.model))

    return fault


def _too_fast(run: Run) -> Run:
    told = run.config.optimizer
    return _config(optimizer=replace(told, adam_lr=50.0, matrix_lr=50.0), skip_spikes=False)(run)


def _crowded(run: Run) -> Run:
    return _config(model=replace(run.config.model, exchange="pooled", capacity_factor=0.5))(run)


def _overfitting(run: Run) -> Run:
    told = replace(run.config.optimizer, adam_lr=8 * run.config.optimizer.adam_lr)
    faulty = _config(optimizer=told, evaluate_every=10)(run)
    return replace(faulty, batch=lambda step: run.batch(0), evaluate=run.evaluate)


def _nan_evaluated(run: Run) -> Run:
    faulty = _config(evaluate_every=10)(run)
    return replace(faulty, evaluate=lambda params, extra, step: {"eval/bits_per_byte": float("nan")})


def _shut(run: Run) -> Any:
    class Nearly:
        """`jax.nn` as attention sees it: every gate all but shut."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(jax.nn, name)
            return (lambda x: 0.02 * found(x)) if name == "sigmoid" else found

    class Seen:
        nn = Nearly()

        def __getattr__(self, name: str) -> Any:
            return getattr(jax, name)

    return replace(run, program=make_program(run.config.model)), mock.patch.object(attention, "jax", Seen())


def _another_schedule(run: Run) -> Any:
    made = pretrain.make_optimizer

    def slower(*arguments: Any, num_steps: int, **named: Any) -> Any:
        return made(*arguments, num_steps=2 * num_steps, **named)

    return run, mock.patch.object(pretrain, "make_optimizer", slower)


def _without_hyperball(run: Run) -> Any:
    def plain(rules: Any, rate: Any, **_: Any) -> Any:
        return optim.scale_by_rate(rate)

    return run, mock.patch.object(optim, "turn", plain)


FAULTS: dict[str, tuple[Any, int]] = {  # the sentinel -> its fault, the step from which it is there
    "non-finite": (_from(_poisoned), PLANTED),
    "above-start": (_too_fast, 0),
    "loss-jump": (_from(_garbage), PLANTED),
    "starved-expert": (_where_marked(_with_an_idle_expert), PLANTED),
    "frozen-expert": (_where_marked(_with_a_frozen_expert), PLANTED),
    "frozen-bias": (_unbalanced, 0),
    "runaway-bias": (_where_marked(_with_a_wild_bias), PLANTED),
    "shut-gates": (_shut, 0),
    "drops": (_crowded, 0),
    "gradient-jump": (_where_marked(_with_huge_gradient), PLANTED),
    "rate-off-schedule": (_another_schedule, 0),
    "norm-drift": (_without_hyperball, 0),
    "large-update": (_too_fast, 0),
    "nothing-moves": (_where_marked(_without_gradient), PLANTED),
    "document-ends": (_from(_endless), PLANTED),
    "empty-documents": (_from(_twice_ended), PLANTED),
    "missing-source": (_dry, PLANTED),
    "eval-not-finite": (_nan_evaluated, 10),
    "eval-gap": (_overfitting, None),
}


if __name__ == "__main__":
    sys.exit(main())
