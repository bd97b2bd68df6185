"""The process that lowers and compiles: `python -m noonsight.train.rehearse.compile < job.json > found.json`.

It is a process of its own because the variables that describe a machine act only before JAX is imported. Every input
is a shape with a sharding; no array is made and nothing is executed.

Described GPUs know no memory beside their own: JAX drops the memory kind of an input without a word, and moments that
would lie on the host are counted as if they lay on the device. `Found.host_modelled` says which it was, and
`Found.peak_bytes` is corrected: without such inputs, but with the moments of the one leaf that is streamed at a time.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from noonsight.train.first_step import compiler_options
from noonsight.train.recover import die_with_parent
from noonsight.train.rehearse.hlo import Collective, Held, collectives, largest, looped
from noonsight.train.rehearse.job import Job
from noonsight.train.rehearse.targets import describe_gpu, environment

NUM_LARGEST = 64


class CompilationFailed(ValueError):
    """The step cannot be compiled for this machine, or this computer lacks what compiles for it."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """An array of the state, of which one device holds `bytes`."""

    path: str  # "params.layers.wq", "opt.….trace.layers.wq"
    shape: tuple[int, ...]
    bytes: int
    parts: int  # into which it is split
    on_host: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the compiler says of one device, in bytes and seconds."""

    lower_s: float
    compile_s: float
    host_memory_bytes: int  # of this process at its largest
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_temp_bytes: int
    compiler_peak_bytes: int
    host_modelled: bool
    leaves: tuple[Leaf, ...]
    collectives: tuple[Collective, ...]
    largest: tuple[Held, ...]
    looped: tuple[Held, ...]
    warnings: tuple[str, ...] = ()

    @property
    def host_resident_bytes(self) -> int:
        """Inputs that lie on the host."""
        return _on_host(self.leaves)

    @property
    def streamed_bytes(self) -> int:
        """The most that comes from the host at one time: the moments of one parameter."""
        return _streamed(self.leaves)

    @property
    def peak_bytes(self) -> int:
        """The compiler's peak, corrected for inputs that lie on the host but were counted as the device's."""
        if self.host_modelled or not self.host_resident_bytes:
            return self.compiler_peak_bytes
        return self.compiler_peak_bytes - self.host_resident_bytes + self.streamed_bytes


def parameter_of(path: str) -> str:
    """The parameter to which a moment belongs: what follows the moment's own name."""
    for name in ("trace.", "mu.", "nu."):
        if f".{name}" in path:
            return path.split(f".{name}", 1)[1]
    return path


def _on_host(leaves: Iterable[Leaf]) -> int:
    return sum(leaf.bytes for leaf in leaves if leaf.on_host)


def _streamed(leaves: Iterable[Leaf]) -> int:
    moments: dict[str, int] = {}
    for leaf in leaves:
        if leaf.on_host:
            name = parameter_of(leaf.path)
            moments[name] = moments.get(name, 0) + leaf.bytes
    return max(moments.values(), default=0)


def compile_job(job: Job) -> Found:
    """Compile `job` in a process of its own. Raises CompilationFailed with the last words of the compiler."""
    command = [sys.executable, "-m", "noonsight.train.rehearse.compile"]
    variables = os.environ | environment(job.machine)
    done = subprocess.run(command, input=msgspec.json.encode(asdict(job)), capture_output=True, env=variables)
    said = done.stderr.decode(errors="replace")
    if done.returncode:
        raise CompilationFailed(_explained(job, said, done.returncode))
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Found)
    return _with_warnings(found, said)


def _with_warnings(found: Found, said: str) -> Found:
    """`found` with what the compiler said of memory, which it says in passing and not as an error."""
    lines = [line.split("] ", 1)[-1].strip() for line in said.splitlines() if "rematerialization" in line]
    return Found(**{**vars(found), "warnings": tuple(dict.fromkeys(lines))})


def _explained(job: Job, said: str, code: int) -> str:
    extra = {"cuda": "rehearse-gpu", "tpu": "rehearse-tpu"}.get(job.machine.chip.platform)
    missing = ("PTX compilation provider", "No module named 'libtpu'", "unable to find libtpu", "Backend 'cuda'")
    absent = any(
        name in said
        for name in (*missing, "Failed to find", "Unknown backend", "no PJRT plugin", "topology not implemented")
    )
    if extra and absent:
        return (
            f"this computer cannot compile for {job.target}: it lacks the compiler. Install it with: pip install 'noonsight[{extra}]' "
            f"({_last_words(said)})"
        )
    return f"the step does not compile for {job.target} (exit code {code}): {_last_words(said)}"


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line.split(":")[0] or "ValueError" in line]
    return (told or lines or ["it said nothing"])[-1][:600]


# From here on inside the process of its own


def compile_here(job: Job) -> Found:
    """What `compile_job` says, from this process: its variables must be those of the machine."""
    import resource

    step, state, batch = program_of(job, devices_of(job))
    leaves = tuple(leaves_of(job, state))
    if job.machine.chip.platform == "cuda":  # described once more, with room for what is not there in truth
        step, state, batch = program_of(job, devices_of(job, _on_host(leaves) - _streamed(leaves)))
    start = time.perf_counter()
    lowered = step.lower(state, batch)
    lowered_at = time.perf_counter()
    compiled = lowered.compile(compiler_options(job.machine.chip.platform, job.training.model.remat))
    compiled_at = time.perf_counter()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.peak_memory_in_bytes
    if job.machine.chip.platform == "cpu":  # its peak is that of the arguments alone
        peak = max(peak, whole + memory.temp_size_in_bytes)
    return Found(
        lower_s=lowered_at - start,
        compile_s=compiled_at - lowered_at,
        host_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        compiler_peak_bytes=peak,
        host_modelled=memory.host_argument_size_in_bytes > 0,
        leaves=leaves,
        collectives=tuple(collectives(text, job.mesh)),
        largest=tuple(largest(text, NUM_LARGEST)),
        looped=tuple(sorted(looped(text, job.training.model.num_layers), key=lambda held: -held.bytes)[:NUM_LARGEST]),
    )


def devices_of(job: Job, beside: int = 0) -> list[Any]:
    """The described devices of the target, GPUs with so many bytes `beside` their own; of the CPU, the virtual ones of
    this process.
    """
    import jax

    machine = job.machine
    if machine.chip.platform == "cpu":
        return jax.devices()[: machine.num_devices]
    from jax.experimental import topologies

    if machine.chip.platform == "cuda":
        told = {"target_config": describe_gpu(machine.chip, beside), "topology": machine.topology}
        return topologies.get_topology_desc("rehearsal", platform="cuda", **told).devices
    return topologies.get_topology_desc(machine.name, platform="tpu").devices


def program_of(job: Job, devices: list[Any]) -> tuple[Any, Any, Any]:
    """(the jitted step, the shapes of its state, those of its batch): the step that `pretrain` runs."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from noonsight.model.layout import BATCH, Layout, make_mesh
    from noonsight.model.transformer import make_program
    from noonsight.tokens.batches import Batch
    from noonsight.train.optim import make_optimizer
    from noonsight.train.step import init_state, make_train_step, state_shardings

    training = job.training
    layout = Layout(make_mesh(job.mesh, devices))
    program = make_program(training.model, layout)
    key = jax.random.key(0)
    params = jax.eval_shape(program.init, key)[0]
    optimizer = make_optimizer(
        training.optimizer, params, num_steps=training.num_steps, layout=layout, stream=job.moments_on_host
    )
    shardings = state_shardings(program, optimizer, layout, host=job.moments_on_host)
    shapes = jax.eval_shape(lambda: init_state(program, optimizer, key))

    def placed(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    rows = NamedSharding(layout.mesh, BATCH)
    kinds = (jnp.int32, jnp.int32, jnp.float32)
    batch = Batch(*(jax.ShapeDtypeStruct((job.rows, training.sequence_length), kind, sharding=rows) for kind in kinds))
    step = make_train_step(program, optimizer, shardings)
    return step, jax.tree.map(placed, shapes, shardings), batch


def leaves_of(job: Job, state: Any) -> Iterable[Leaf]:
    """The arrays of a state that `program_of` described."""
    from noonsight.train.groups import by_path

    for path, leaf in by_path(state).items():
        part, whole = math.prod(leaf.sharding.shard_shape(leaf.shape)), math.prod(leaf.shape)
        moment = path.startswith("opt.") and leaf.ndim > 0
        yield Leaf(
            path=path,
            shape=tuple(leaf.shape),
            bytes=part * leaf.dtype.itemsize,
            parts=whole // part,
            on_host=moment and job.moments_on_host,
        )


def main() -> None:
    """The process: a job on stdin, what was found on stdout. It dies with the one that started it."""
    die_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    found = compile_here(job)
    sys.stdout.write("\n" + msgspec.json.encode(asdict(found)).decode() + "\n")


if __name__ == "__main__":
    main()
