"""The training stage seen from both sides: the supervisor, which is the stage, and the worker that it keeps alive.

`run` is the stage's function; it needs no JAX. The worker is this module started as a program: it joins a model, the batches of a
token store and the evaluation, and hands them to the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from noonsight.logbook import read
from noonsight.logbook.claim import Claim, claim
from noonsight.logbook.record import Artifact, Placement
from noonsight.logbook.write import Writer
from noonsight.train import recover
from noonsight.train.config import PretrainConfig

if TYPE_CHECKING:
    from noonsight.model.layout import Layout
    from noonsight.model.program import Program
    from noonsight.train.pretrain import Part

EVERY_NTH_DOCUMENT = 4  # what an evaluation in the middle of a run looks at; the last one looks at all


def run(config: PretrainConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: train under a supervisor. Inputs: `store`, `mixture`, and `prediction` where the run was predicted.

    Facts: those of `train.pretrain`, the supervisor's counts, `bits_per_byte` on all held-out documents, `heldout_digest`.
    Raises `recover.RunStopped` with the symptom when starting again would not help.
    """
    with claim(out, "stage") as owned:
        # Naming the worker through its function keeps it, and all it imports, in this stage's source closure.
        command = [sys.executable, "-m", _work.__module__]
        facts = recover.supervise(command, out, writer=Writer(out, owned))
    return Artifact(facts=facts)


def load_run(folder: Path, checkpoint: str | None = None) -> tuple[PretrainConfig, Any, Any]:
    """(config, params, extra) of a finished training run, from its final checkpoint or from the one named.

    Raises ValueError when `folder` is not a finished training run or the checkpoint does not verify.
    """
    import jax

    from noonsight.model.transformer import make_program
    from noonsight.train import checkpoint as checkpoints
    from noonsight.train.optim import make_optimizer
    from noonsight.train.step import init_state

    record = read.run(folder)
    if record is None or record.status != "done" or "checkpoint" not in record.facts:
        stopped = record is not None and record.status != "done"
        state = "has no record" if record is None else f"is {record.status}" if stopped else "trained no model"
        raise ValueError(
            f"{folder} is not a finished training run (it {state}). Give the folder of a run that is done."
        )
    root = checkpoints.root_of(folder, record.placement)
    path = root / (checkpoint or record.facts["checkpoint"].rsplit("/", 1)[-1])
    if reason := checkpoints.verify(path):
        raise ValueError(f"{path} cannot be trusted: {reason}. Put a good copy back, or take another checkpoint.")
    config = config_of(record.config)
    program = make_program(config.model)
    key = jax.random.key(0)
    optimizer = make_optimizer(config.optimizer, jax.eval_shape(program.init, key)[0], num_steps=config.schedule_steps)
    shapes = jax.eval_shape(lambda: init_state(program, optimizer, key))
    state = checkpoints.restore(path, shapes)
    return config, state.params, state.extra


def config_of(values: Mapping[str, Any]) -> PretrainConfig:
    """The training config from the JSON of a record."""
    return msgspec.convert(values, PretrainConfig)


def evaluator(
    config: PretrainConfig, program_config: Any, store: Path, layout: Layout | None = None
) -> Callable[[Any, Any, int], dict[str, float]]:
    """`evaluate(params, extra, step)`: bits per byte on every fourth held-out document, on all of them after the last step."""
    from noonsight.recipe.measuring import make_measure

    measure = make_measure(program_config, store, layout=layout)

    def evaluate(params: Any, extra: Any, step: int) -> dict[str, float]:
        if step < config.num_steps:
            return {"eval/bits_per_byte_sample": measure(params, extra, every=EVERY_NTH_DOCUMENT).micro}
        return {"eval/bits_per_byte": measure(params, extra).micro}

    return evaluate


def _work(out: Path, owned: Claim, placement: Placement) -> Artifact:
    from noonsight.model.count import count
    from noonsight.tokens.store import open_store
    from noonsight.train.placement import layout_of
    from noonsight.train.pretrain import pretrain
    from noonsight.train.ranks import connect

    config, inputs = _assignment(out)
    store = open_store(inputs["store"])
    if config.model.vocab_size < store.manifest.vocab_size:
        raise ValueError(
            f"the model has {config.model.vocab_size} tokens and the store {inputs['store']} was written with "
            f"{store.manifest.vocab_size}; give both the same vocab_size in the experiment file"
        )
    ranks = connect()
    layout = layout_of(placement, config.model)
    artifact = pretrain(
        config,
        lambda part: _part(part, inputs, placement, layout),
        out,
        owned,
        placement,
        ranks=ranks,
        layout=layout,
        parent=inputs.get("parent"),
    )
    if not ranks.first:
        return artifact
    counts = count(config.parts()[-1].model)
    more = {
        "bits_per_byte": artifact.facts["eval"]["eval/bits_per_byte"],
        "active_parameters": counts.active_parameters,
        "total_parameters": counts.total_parameters,
        "unique_tokens": store.manifest.splits["train"].num_tokens,
        "heldout_digest": store.manifest.files["heldout.bin"].xxh3,
    }
    return Artifact(facts=artifact.facts | more)


def _part(part: PretrainConfig, inputs: Mapping[str, Path], placement: Placement, layout: Layout) -> Part:
    """Model, batches and evaluation of one phase."""
    from noonsight.model.count import count
    from noonsight.model.transformer import make_program
    from noonsight.tokens.batches import open_batches
    from noonsight.train.placement import model_of
    from noonsight.train.pretrain import Part

    batches = open_batches(
        inputs["store"],
        inputs["mixture"],
        seed=part.seed,
        sequence_length=part.sequence_length,
        batch_size=part.batch_size,
        num_steps=part.schedule_steps,
    )
    model = model_of(placement, part.model)
    program: Program = make_program(model, layout)
    reference = make_program(replace(model, remat="block"), layout) if model.remat == "offload" else None
    evaluate = evaluator(part, part.model, inputs["store"], layout)
    return Part(
        program,
        batches.batch,
        evaluate,
        flops_per_token=3.0 * count(part.model).forward_flops_per_token,
        reference=reference,
        sources=batches.sources,
    )


def _assignment(out: Path) -> tuple[PretrainConfig, dict[str, Path]]:
    from noonsight.plan.worker import Job

    job = msgspec.json.decode((out / "stage.json").read_bytes(), type=Job)
    return config_of(job.run.config), {name: Path(folder) for name, folder in job.inputs.items()}


if __name__ == "__main__":
    recover.work(_work, Path(sys.argv[1]))
