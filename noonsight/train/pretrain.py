"""Pretraining: what a worker does from its first breath to its last.

Initialise or restore, compile once per phase, run the loop, keep the final state, evaluate it, hand back facts. A worker
that is started again over its own folder goes on from the newest checkpoint that verifies, and gives the same bits as
one that was never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from noonsight.logbook import read
from noonsight.logbook.claim import Claim
from noonsight.logbook.record import Artifact, Placement, encode
from noonsight.logbook.write import Writer, write_atomic
from noonsight.model import native
from noonsight.model.layout import ALONE, BATCH, ROWS, Layout
from noonsight.train import checkpoint, first_step
from noonsight.train.checkpoint import starting
from noonsight.train.config import PretrainConfig
from noonsight.train.groups import HERO_TABLE, Rule, describe
from noonsight.train.journal import Evaluate, Journal
from noonsight.train.loop import Surroundings, run_loop
from noonsight.train.optim import Optimizer, make_optimizer
from noonsight.train.ranks import Ranks, place_batch
from noonsight.train.recover import skips
from noonsight.train.recover.faults import Faults
from noonsight.train.recover.requests import Requests
from noonsight.train.step import (
    State,
    compile_step,
    init_state,
    make_train_step,
    params_hash,
    pass_over,
    state_shardings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from noonsight.model.program import Program

COPIES = 2
"""Checkpoints that there must be room for when a run starts: the one that is kept and the one that is written."""
GIVE_WAY_S = 5e-4
"""How long the loop waits at most for another thread of Python, such as one that saves (5 ms by default: a tenth of a
small model's step)."""

__all__ = ["Part", "PretrainConfig", "pretrain"]


class Part(NamedTuple):
    """What trains one phase of a run."""

    program: Program
    batch: Callable[..., Any]
    """`batch(step, rows=slice(None))`: the rows of a step's batch, as a pure function."""
    evaluate: Evaluate | None = None
    flops_per_token: float | None = None
    """Model FLOPs of forward and backward for one token, if known."""
    reference: Program | None = None
    """The same program without offload, where `program` offloads: the first step is held against it (F7)."""
    sources: Callable[[int], Mapping[str, tuple[float, float]]] | None = None
    """Source -> (rows of a step's batch from it, rows that the mixture means it to have), to be watched."""


def pretrain(
    config: PretrainConfig,
    part_of: Callable[[PretrainConfig], Part],
    out: Path,
    claim: Claim,
    placement: Placement,
    *,
    ranks: Ranks | None = None,
    table: Mapping[str, Rule] = HERO_TABLE,
    layout: Layout = ALONE,
    parent: Path | None = None,
) -> Artifact:
    """Train in the folder `out`, owned by `claim`, up to step `num_steps`; call it from `recover.work`, in every rank.

    `part_of` makes what each phase of the config trains with (`PretrainConfig.parts`). `table`: each leaf's optimiser
    group, kept filled in as `tables/optimizer.json`. `layout` (that of the programs): where the state lies, never what it
    is. `parent`: the run that kept the state of `first_step`. Facts: num_steps, tokens, seconds (of the surviving line),
    tokens_per_s, final_loss, `eval` values of the final state, params_hash, checkpoint, train_flops where known.
    Raises what `run_loop` raises, and NoValidCheckpoint.
    """
    run = _begin(config, out, claim, placement, ranks or Ranks(), layout, table)
    pieces = [(part, part_of(part)) for part in config.parts()]
    state = _first_state(run, pieces, parent)
    evaluated = carry_evaluations(out, run.writer, int(state.step)) if run.ranks.first else {}
    with run.saver as saver:
        started = int(state.step)
        for part, piece in pieces:
            if int(state.step) < part.num_steps:
                state = _train_part(run, part, piece, state)
        if started < config.num_steps:
            write_table(run, "health", run.journal.health.table(read.events(out)))
            run.journal.save(config.num_steps, saver, state, "final")
            evaluated = {}
        evaluate = pieces[-1][1].evaluate
        if evaluate and not run.ranks.share("evaluated", "yes" if evaluated else ""):
            evaluated = run.journal.evaluate(config.num_steps, evaluate, state)
    digest = params_hash(state.params)
    run.journal.beat(config.num_steps, "done")
    if not run.ranks.first:
        return Artifact()
    return Artifact(facts=_facts(config, digest, evaluated, out, [piece for _, piece in pieces], placement))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What stays the same through all phases."""

    config: PretrainConfig
    out: Path
    placement: Placement
    ranks: Ranks
    layout: Layout
    table: Mapping[str, Rule]
    key: jax.Array
    writer: Writer
    journal: Journal
    requests: Requests
    saver: checkpoint.Saver


def _begin(
    config: PretrainConfig,
    out: Path,
    claim: Claim,
    placement: Placement,
    ranks: Ranks,
    layout: Layout,
    table: Mapping[str, Rule],
) -> _Run:
    sys.setswitchinterval(GIVE_WAY_S)
    requests = Requests(alone=ranks.alone)
    requests.listen()
    writer = Writer(out, claim, attempt=claim.fence)
    journal = Journal(out, writer, config, placement=placement, ranks=ranks)
    journal.beat(0, "start")
    keep_compilations(out)
    _, key = jax.random.split(jax.random.key(config.seed))  # (data, model), as the hero splits them
    saver = checkpoint.Saver(
        checkpoint.root_of(out, placement),
        claim,
        attempt=writer.attempt,
        on_saved=_recorder(writer),
        rank=journal.ranks.rank,
        num_ranks=journal.ranks.count,
    )
    return _Run(
        config=config,
        out=out,
        placement=placement,
        ranks=ranks,
        layout=layout,
        table=table,
        key=key,
        writer=writer,
        journal=journal,
        requests=requests,
        saver=saver,
    )


def _first_state(run: _Run, pieces: list[tuple[PretrainConfig, Part]], parent: Path | None) -> State:
    """The state that this attempt starts from, with all steps to be passed over written into it. Its optimiser is that of
    the phase which made it.
    """
    passed_over, root = skips.skips(run.out), checkpoint.root_of(run.out, run.placement)
    chosen = starting.choose(root, passed_over, run.journal.event) if run.ranks.first else None
    step = run.ranks.share("checkpoint", "" if chosen is None else str(chosen))
    made_by = [pair for pair in pieces if step and pair[0].first_step < int(step)]
    part, piece = made_by[-1] if made_by else pieces[0]
    shapes = jax.eval_shape(piece.program.init, run.key)[0]
    write_table(run, "optimizer", describe(run.config.optimizer, shapes, run.table))
    optimizer = _optimizer(run, part, piece)
    state = starting.initial_or_restored(
        lambda: init_state(piece.program, optimizer, run.key),
        None if not step else checkpoint.folder(root, int(step)),
        None if parent is None else checkpoint.folder(checkpoint.root_of(parent), run.config.first_step),
        run.journal.event,
        _lay_out(run, piece, optimizer),
    )
    if run.ranks.first:  # better told now than at the first save
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
        checkpoint.require_space(root, COPIES * sum(sizes))
    return pass_over(state, {*run.config.skip_steps, *passed_over})


def _train_part(run: _Run, part: PretrainConfig, piece: Part, state: State) -> State:
    """Compile the step of one phase and train to its end."""
    first = int(state.step)
    recording = run.placement.record_batches and run.ranks.first
    kept = piece.batch if recording else None
    run.journal.change(part, piece.flops_per_token, batch=kept, sources=piece.sources)
    run.journal.beat(first, "compile")
    if part.first_step > run.config.first_step:
        run.journal.event("phase", _phase_sentence(run.config, part), step=first)
    optimizer = _optimizer(run, part, piece)
    shardings = _lay_out(run, piece, optimizer)
    state = starting.carried(state, jax.eval_shape(lambda: init_state(piece.program, optimizer, run.key)))
    rows = None if run.layout.mesh is None else NamedSharding(run.layout.mesh, BATCH)
    batch = place_batch(piece.batch, part.batch_size, rows, run.ranks)
    with run.requests.may_interrupt():
        train_step = _compile(make_train_step(piece.program, optimizer, shardings), state, batch, run, part)
        if piece.reference is not None:
            _hold_first_step(run, part, piece, state)
    run.journal.restart_clock()
    around = Surroundings(
        saver=run.saver,
        journal=run.journal,
        faults=Faults(run.placement, run.out, run.writer, run.ranks.rank),
        requests=run.requests,
        ranks=run.ranks,
        temporary_every_s=run.placement.temporary_every_s,
    )
    return run_loop(
        state,
        run.config,
        train_step=train_step,
        batch=batch,
        evaluate=piece.evaluate,
        around=around,
        last_step=part.num_steps,
    )


def _hold_first_step(run: _Run, part: PretrainConfig, piece: Part, state: State) -> None:
    """Raises FirstStepWrong unless the program computes what its reference does, on as few rows as the mesh takes."""
    num_rows = run.layout.size(*ROWS)
    rows = None if run.layout.mesh is None else NamedSharding(run.layout.mesh, BATCH)

    def few(step: int, within: slice = slice(None)) -> Any:
        return piece.batch(step, slice(*within.indices(num_rows)))

    batch = place_batch(few, num_rows, rows, run.ranks)(int(state.step))
    told = first_step.check(
        piece.program, piece.reference, state.params, state.extra, batch, products=part.model.matmul_dtype
    )
    text = f"The first gradient is that of the program without offload, to {told['off']:.1g} (bound {told['bound']:g})."
    run.journal.event("first-step", text, step=int(state.step), data=told)


def _phase_sentence(config: PretrainConfig, part: PretrainConfig) -> str:
    """The phase by name, and each value that it changes."""
    number = [phase.from_step for phase in config.phases].index(part.first_step)
    before = config.parts()[number]
    pairs = [("", before, part), ("model.", before.model, part.model), ("optimizer.", before.optimizer, part.optimizer)]
    passing = ("model", "optimizer", "first_step", "num_steps", "horizon")
    changed = [
        f"{prefix}{field.name} {getattr(old, field.name)} -> {getattr(new, field.name)}"
        for prefix, old, new in pairs
        for field in dataclasses.fields(new)
        if field.name not in (passing if not prefix else ()) and getattr(old, field.name) != getattr(new, field.name)
    ]
    return f"Phase {config.phases[number].name} begins: {', '.join(changed) or 'nothing changes'}."


def _optimizer(run: _Run, part: PretrainConfig, piece: Part) -> Optimizer:
    shapes = jax.eval_shape(piece.program.init, run.key)[0]
    return make_optimizer(part.optimizer, shapes, num_steps=part.schedule_steps, table=run.table, layout=run.layout)


def _lay_out(run: _Run, piece: Part, optimizer: Optimizer) -> State | None:
    """The state's shardings; None where there is nothing to choose."""
    if run.layout.mesh is None and not run.placement.moments_on_host:
        return None
    return state_shardings(piece.program, optimizer, run.layout, host=run.placement.moments_on_host)


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


def write_table(run: _Run, name: str, table: dict[str, Any]) -> None:
    """A small table that a page shows: `tables/<name>.json`."""
    if run.ranks.first:
        (run.out / "tables").mkdir(exist_ok=True)
        write_atomic(run.out / "tables" / f"{name}.json", encode(table))


def _compile(
    step: Callable[..., Any], state: State, batch: Callable[[int], Any], run: _Run, part: PretrainConfig
) -> Callable[..., Any]:
    """A phase's one executable, and an event that says whether it had to be made and what multiplies its matrices."""
    start = time.perf_counter()
    with counted_compilations() as seen:
        options = first_step.compiler_options(jax.default_backend(), part.model.remat)
        compiled = compile_step(step, state, batch(int(state.step)), options)
    seconds, found = round(time.perf_counter() - start, 3), seen["found"] > 0
    rounds = "bfloat16" in (part.model.matmul_dtype, part.optimizer.newton_schulz)
    kernels = native.description() if rounds else "xla"
    text = (
        f"The train step was {'found in the cache' if found else 'compiled'} in {seconds:.1f} s, products by {kernels}."
    )
    data = {"seconds": seconds, "from_cache": found, "kernels": kernels}
    run.journal.event("compiled", text, step=int(state.step), data=data)
    return compiled


def _recorder(writer: Writer) -> Callable[[Path, checkpoint.Kind], None]:
    def record(path: Path, kind: checkpoint.Kind) -> None:
        manifest = checkpoint.read_manifest(path)
        size = sum(fact["bytes"] for fact in manifest.files.values())
        text = f"Checkpoint after {manifest.step} steps ({kind}, {size / 1e6:.1f} MB)."
        writer.event("checkpoint", text, step=manifest.step, data={"kind": kind, "bytes": size})

    return record


def _address(kept: Any, out: Path) -> str:
    """Where a checkpoint is: below the run's folder, or its whole address."""
    return str(kept.relative_to(out)) if str(kept).startswith(f"{out}/") else str(kept)


def _facts(
    config: PretrainConfig, digest: str, values: dict[str, float], out: Path, pieces: list[Part], placement: Placement
) -> dict[str, Any]:
    lived = read.metrics(out)
    kept = checkpoint.folder(checkpoint.root_of(out, placement), config.num_steps)
    tokens = config.tokens_before(config.num_steps) - config.tokens_before(config.first_step)
    seconds = sum(lived["step_s"].values)
    facts = {
        "num_steps": config.num_steps,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "final_loss": lived["loss"].values[-1],
        "eval": values,
        "params_hash": digest,
        "checkpoint": _address(kept, out),
    }
    flops = [
        (part.num_steps - part.first_step) * part.batch_tokens * piece.flops_per_token
        for part, piece in zip(config.parts(), pieces)
        if piece.flops_per_token is not None
    ]
    return facts | ({"train_flops": sum(flops)} if len(flops) == len(pieces) else {})
