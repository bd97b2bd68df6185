"""What is rehearsed: a training run and a machine, as plain values that cross into the process that compiles.

A step of the run is cut to the machine: a target with fewer devices than the run was planned for gets the rows of as
many devices as it has, so that each device does what it would do in the run. JAX is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from noonsight.train.config import PretrainConfig
from noonsight.train.rehearse.targets import Target, mesh_sizes, parse


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to compile. `rows` are the sequences of a step on the whole target."""

    training: PretrainConfig
    target: str
    rows: int
    context: int = 1
    moments_on_host: bool = True

    @property
    def machine(self) -> Target:
        return parse(self.target)

    @property
    def mesh(self) -> dict[str, int]:
        return mesh_sizes(self.machine, self.training.model, context=self.context)

    @property
    def rows_per_device(self) -> int:
        """Rows of one device, or of the `context` devices that share them."""
        return self.rows // row_shards(self.mesh)

    @property
    def device_tokens(self) -> int:
        """Tokens of one device in one step."""
        return self.rows_per_device * self.training.sequence_length // self.context


def make_job(
    training: PretrainConfig,
    target: str,
    *,
    planned_devices: int = 1,
    rows_per_device: int | None = None,
    context: int = 1,
    moments_on_host: bool | None = None,
) -> Job:
    """The job of a run that was planned for `planned_devices`.

    `rows_per_device` None: what a device of the plan has, or of this target where that has more devices, at least one.
    Moments lie on the host unless the target has no memory beside its own (virtual CPU devices). Raises ValueError for
    a target that is not known, or that the context does not divide.
    """
    machine = parse(target)
    shards = row_shards(mesh_sizes(machine, training.model, context=context))
    if rows_per_device is None:
        rows_per_device = max(1, training.batch_size // max(shards, planned_devices // context))
    if rows_per_device < 1:
        raise ValueError(f"rehearse: {rows_per_device} rows per device are no step; give 1 or more")
    host = machine.chip.platform != "cpu" if moments_on_host is None else moments_on_host
    return Job(
        training=training,
        target=machine.name,
        rows=shards * rows_per_device,
        context=context,
        moments_on_host=host,
    )


def changed(job: Job, **fields: object) -> Job:
    """`job` with other values of fields of its model."""
    return replace(job, training=replace(job.training, model=replace(job.training.model, **fields)))


def row_shards(mesh: dict[str, int]) -> int:
    """The parts into which the rows of a step are split."""
    return mesh["replica"] * mesh["data"] * mesh["expert"]
