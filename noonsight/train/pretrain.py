"""Pretraining: what a worker does from its first breath to its last.

Initialise or restore, compile once, run the loop, keep the final state, evaluate it, hand back facts. A worker that
is started again over its own folder goes on from the newest checkpoint that verifies, and gives the same bits as one
that was never stopped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from noonsight.logbook import read
from noonsight.logbook.claim import Claim
from noonsight.logbook.record import Artifact, Placement, encode
from noonsight.logbook.write import Writer, write_atomic
from noonsight.model import native
from noonsight.model.layout import ALONE, Layout
from noonsight.train import checkpoint
from noonsight.train.config import PretrainConfig
from noonsight.train.groups import HERO_TABLE, Rule, describe
from noonsight.train.loop import Evaluate, Journal, StopSignal, run_loop
from noonsight.train.optim import Optimizer, make_optimizer
from noonsight.train.recover import Faults
from noonsight.train.step import State, compile_step, init_state, make_train_step, params_hash, state_shardings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from noonsight.model.program import Program

__all__ = ["PretrainConfig", "pretrain"]


def pretrain(
    config: PretrainConfig,
    program: Program,
    batch: Callable[[int], Any],
    out: Path,
    claim: Claim,
    placement: Placement,
    evaluate: Evaluate | None = None,
    *,
    flops_per_token: float | None = None,
    table: Mapping[str, Rule] = HERO_TABLE,
    layout: Layout = ALONE,
    moments_on_host: bool = False,
    parent: Path | None = None,
) -> Artifact:
    """Train `program` in the folder `out`, owned by `claim`, up to step `num_steps`; call it from `recover.work`.

    `flops_per_token`: model FLOPs of one token, backward too. `table`: each leaf's optimiser group, kept filled in as
    `tables/optimizer.json`. `layout` (that of the program), `moments_on_host`: where the state lies, never what it is.
    `parent`: the run that kept the state of `first_step`. Facts: num_steps, tokens, seconds (of the surviving line),
    tokens_per_s, final_loss, `eval` values of the final state, params_hash, checkpoint, train_flops where known.
    Raises what `run_loop` raises, and NoValidCheckpoint.
    """
    stop = StopSignal()
    stop.listen()
    writer = Writer(out, claim, attempt=claim.fence)
    journal = Journal(out, writer, config, flops_per_token, placement)
    journal.beat(0, "start")
    keep_compilations(out)
    _, key = jax.random.split(jax.random.key(config.seed))  # (data, model), as the hero splits them
    optimizer = _optimizer(config, program, key, out, table, layout)
    shardings = _lay_out(program, optimizer, layout, moments_on_host)
    fork = None if parent is None else checkpoint.folder(parent, config.first_step)
    state = initial_or_restored(lambda: init_state(program, optimizer, key), out, writer, shardings, fork)
    first = int(state.step)
    evaluated = carry_evaluations(out, writer, first)
    with checkpoint.Saver(out, claim, attempt=writer.attempt, on_saved=_recorder(writer)) as saver:
        if first < config.num_steps:
            journal.beat(first, "compile")
            with stop.may_interrupt():
                train_step = _compile(make_train_step(program, optimizer, shardings), state, batch, writer, config)
            journal.restart_clock()
            state = run_loop(
                state,
                config,
                train_step=train_step,
                batch=batch,
                evaluate=evaluate,
                saver=saver,
                journal=journal,
                faults=Faults(placement, out, writer),
                stop=stop,
            )
            write_table(out, "health", journal.health.table(read.events(out)))
            journal.save(config.num_steps, saver, state, "final")
            evaluated = {}
        if evaluate and not evaluated:
            evaluated = journal.evaluate(config.num_steps, evaluate, state)
    journal.beat(config.num_steps, "done")
    return Artifact(facts=_facts(config, state, evaluated, out, flops_per_token))


def _optimizer(
    config: PretrainConfig, program: Program, key: jax.Array, out: Path, table: Mapping[str, Rule], layout: Layout
) -> Optimizer:
    """The run's optimiser; its groups are kept as a table."""
    shapes = jax.eval_shape(program.init, key)[0]
    optimizer = make_optimizer(config.optimizer, shapes, num_steps=config.schedule_steps, table=table, layout=layout)
    write_table(out, "optimizer", describe(config.optimizer, shapes, table))
    return optimizer


def _lay_out(program: Program, optimizer: Optimizer, layout: Layout, moments_on_host: bool) -> State | None:
    """The state's shardings; None where there is nothing to choose."""
    if layout.mesh is None and not moments_on_host:
        return None
    return state_shardings(program, optimizer, layout, host=moments_on_host)


def initial_or_restored(
    init: Callable[[], State], out: Path, writer: Writer, shardings: State | None = None, fork: Path | None = None
) -> State:
    """The newest state of `out` that verifies, or a fresh one where none was ever completed, laid out in `shardings`.

    With `fork`, a checkpoint of another run, there is no fresh state. A state that another mesh kept is the same state.
    Raises NoValidCheckpoint, and ValueError when the fork does not verify.
    """
    found = checkpoint.newest(out)
    if found is None and fork is None:
        return jax.jit(init, out_shardings=shardings)()
    target = jax.eval_shape(init)
    if shardings is not None:
        target = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), target, shardings
        )
    if found is None:
        if reason := checkpoint.verify(fork):
            raise ValueError(f"{fork}, from which this run shall go on, cannot be trusted: {reason}")
        state = checkpoint.restore(fork, target)
        writer.event("forked", f"Went on from {fork.name} of {fork.parents[1].name}.", step=int(state.step))
        return state
    for reason in found.rejected:
        writer.event(
            "checkpoint-rejected",
            f"{reason}; the one before it is used.",
            cause="corrupt checkpoint",
            step=found.manifest.step,
        )
    state = checkpoint.restore(found.path, target)
    writer.event("restored", f"Went on from {found.path.name}, saved at {found.manifest.at}.", step=found.manifest.step)
    return state


def carry_evaluations(out: Path, writer: Writer, step: int) -> dict[str, float]:
    """Evaluations that an earlier attempt made of the very state this one starts from, written again: they still hold."""
    series = read.metrics(out, attempts="all")
    found = {name: dict(zip(line.steps, line.values)) for name, line in series.items() if name.startswith("eval/")}
    values = {name: by_step[step] for name, by_step in found.items() if step in by_step}
    if values:
        writer.metrics(step, values)
    return values


def keep_compilations(out: Path) -> None:
    """Let a restarted worker find every executable of its predecessor, in `out` or where JAX_COMPILATION_CACHE_DIR
    says, and another run those that are the same.
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(out / "compiled"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def counted_compilations() -> Iterator[Counter[str]]:
    """Counts what this process has "asked" to be compiled meanwhile, and what of it was "found" in the cache."""
    names = {
        "/jax/compilation_cache/compile_requests_use_cache": "asked",
        "/jax/compilation_cache/cache_hits": "found",
    }
    seen: Counter[str] = Counter()

    def listen(event: str, **_: Any) -> None:
        seen.update([names[event]] if event in names else [])

    jax.monitoring.register_event_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_listener(listen)


def write_table(out: Path, name: str, table: dict[str, Any]) -> None:
    """A small table that a page shows: `tables/<name>.json`."""
    (out / "tables").mkdir(exist_ok=True)
    write_atomic(out / "tables" / f"{name}.json", encode(table))


def _compile(
    step: Callable[..., Any], state: State, batch: Callable[[int], Any], writer: Writer, config: PretrainConfig
) -> Callable[..., Any]:
    """The run's one executable, and an event that says whether it had to be made and what multiplies its matrices."""
    start = time.perf_counter()
    with counted_compilations() as seen:
        compiled = compile_step(step, state, batch(int(state.step)))
    seconds, found = round(time.perf_counter() - start, 3), seen["found"] > 0
    rounds = "bfloat16" in (config.model.matmul_dtype, config.optimizer.newton_schulz)
    kernels = native.description() if rounds else "xla"
    text = (
        f"The train step was {'found in the cache' if found else 'compiled'} in {seconds:.1f} s, products by {kernels}."
    )
    data = {"seconds": seconds, "from_cache": found, "kernels": kernels}
    writer.event("compiled", text, step=int(state.step), data=data)
    return compiled


def _recorder(writer: Writer) -> Callable[[Path, checkpoint.Kind], None]:
    def record(path: Path, kind: checkpoint.Kind) -> None:
        manifest = checkpoint.read_manifest(path)
        size = sum(fact["bytes"] for fact in manifest.files.values())
        text = f"Checkpoint after {manifest.step} steps ({kind}, {size / 1e6:.1f} MB)."
        writer.event("checkpoint", text, step=manifest.step, data={"kind": kind, "bytes": size})

    return record


def _facts(
    config: PretrainConfig,
    state: State,
    values: dict[str, float],
    out: Path,
    flops_per_token: float | None,
) -> dict[str, Any]:
    lived = read.metrics(out)
    tokens, seconds = (config.num_steps - config.first_step) * config.batch_tokens, sum(lived["step_s"].values)
    facts = {
        "num_steps": config.num_steps,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "final_loss": lived["loss"].values[-1],
        "eval": values,
        "params_hash": params_hash(state.params),
        "checkpoint": str(checkpoint.folder(out, config.num_steps).relative_to(out)),
    }
    return facts | ({"train_flops": flops_per_token * tokens} if flops_per_token is not None else {})
