"""What in a compiled step contradicts the closed forms, and what could be changed when it does not fit.

Three mistakes cost most and raise no error: expert weights that every device has, a stack of activations that
rematerialisation should have left out, and logits of more tokens than a chunk of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from noonsight.model.count.devices import carry_bytes
from noonsight.train.rehearse.compile import Found, Leaf, parameter_of
from noonsight.train.rehearse.hlo import Held
from noonsight.train.rehearse.job import Job

MOST_LOGITS = 8
"""So many chunks of the loss's logits may exist at once; a chunk is 256 tokens."""
CHUNK_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A contradiction: which, where, what it costs a device, what to do."""

    kind: str  # "replicated experts", "lost remat", "whole logits"
    name: str
    bytes: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change and about how much memory of a device it frees."""

    text: str
    bytes: int


def mistakes(job: Job, found: Found) -> list[Mistake]:
    """Those of one compiled step, the most expensive first."""
    told = [*_replicated(job, found.leaves), *_kept(job, found.looped), *_logits(job, found.largest)]
    return sorted(told, key=lambda mistake: -mistake.bytes)


def advice(job: Job, found: Found, *, budget: int) -> list[Advice]:
    """What frees memory, by the table of leaves and the closed forms, the most effective first. Empty where it fits."""
    if found.peak_bytes <= budget:
        return []
    model, machine = job.training.model, job.machine
    told = [Advice(text=f"correct {each.name}: {each.kind}", bytes=each.bytes) for each in mistakes(job, found)]
    carry = carry_bytes(model, job.device_tokens)
    if model.remat == "none":
        told.append(
            Advice(text='remat "block": keep only the inputs of layers', bytes=max(found.temp_bytes // 2, carry))
        )
    if model.remat == "block" and machine.chip.platform != "cpu":
        told.append(Advice(text='remat "offload": the inputs of layers go to the host', bytes=carry))
    moments = sum(leaf.bytes for leaf in found.leaves if leaf.path.startswith("opt."))
    if model.exchange in ("sorted", "einsum") and job.mesh["expert"] > 1:
        gathered = sum(held.bytes for held in found.largest if _is_gathered_bank(held, job))
        told.append(Advice(text=f"an exchange that sends rows: {model.exchange!r} gathers all experts", bytes=gathered))
    if not job.moments_on_host:
        told.append(Advice(text="keep the moments on the host", bytes=moments))
    if job.rows_per_device > 1:
        half = job.rows_per_device // 2
        share = 1 - half / job.rows_per_device
        told.append(
            Advice(text=f"{half} rows per device instead of {job.rows_per_device}", bytes=int(share * found.temp_bytes))
        )
    experts = sum(leaf.bytes for leaf in found.leaves if _is_experts(leaf.path) and leaf.path.startswith("params."))
    if experts:
        told.append(Advice(text="twice as many devices for the experts", bytes=experts // 2))
    return sorted(told, key=lambda each: -each.bytes)


def holders(found: Found, number: int = 12) -> list[tuple[str, int, str]]:
    """(name, bytes, what it is) of the largest arrays of one device: those of the state, then results of the program."""
    state = [(leaf.path, leaf.bytes, "on the host" if leaf.on_host else "state") for leaf in found.leaves]
    made = [(f"{held.shape} {_short(held.source)}".strip(), held.bytes, held.opcode) for held in found.largest]
    return sorted([*state, *made], key=lambda each: -each[1])[:number]


def sized(number: float) -> str:
    """Bytes to be read."""
    if number < 1024:
        return f"{number:,.0f} bytes"
    power = min(3, (int(number).bit_length() - 1) // 10)
    return f"{number / 1024**power:,.2f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _replicated(job: Job, leaves: Iterable[Leaf]) -> Iterator[Mistake]:
    shards = job.mesh["expert"]
    for leaf in leaves:
        if leaf.path.startswith("params.") and _is_experts(leaf.path) and leaf.parts < shards:
            extra = leaf.bytes - leaf.bytes * leaf.parts // shards
            yield Mistake(
                kind="replicated experts",
                name=leaf.path,
                bytes=extra,
                text=(
                    f"{leaf.path} {list(leaf.shape)} is split into {leaf.parts} parts where the mesh has {shards} for "
                    f"the experts, so each device holds {sized(extra)} too much of it, of its gradient and of its "
                    "moments; split its dim of experts in SPECS"
                ),
            )


def _kept(job: Job, looped: Iterable[Held]) -> Iterator[Mistake]:
    """Stacks over layers of something for each token, beside the one that remat keeps."""
    model = job.training.model
    if model.remat == "none":
        return
    carry = carry_bytes(model, job.device_tokens)
    seen: dict[str, list[Held]] = {}
    for held in looped:
        if _is_stack_of_tokens(held, job):
            seen.setdefault(held.source, []).append(held)
    loop = max(seen.values(), key=lambda stack: sum(held.bytes for held in stack), default=[])
    total = sum(held.bytes for held in loop)
    # A float32 copy of the carry is no lost remat, and statistics of a token are small.
    if total > 2.5 * carry:
        names = ", ".join(dict.fromkeys(held.shape for held in loop[:4]))
        yield Mistake(
            kind="lost remat",
            name="the layers' activations",
            bytes=total - carry,
            text=(
                f"the loop over layers keeps {sized(total)} for its backward pass ({names}) where remat "
                f"{model.remat!r} keeps the layers' inputs, {sized(carry)}; see that jax.checkpoint is around a layer"
            ),
        )


def _is_stack_of_tokens(held: Held, job: Job) -> bool:
    model, tokens = job.training.model, job.device_tokens
    if not held.dims or held.dims[0] != model.num_layers or len(held.dims) < 3:
        return False
    rows = (job.rows_per_device, job.training.sequence_length // job.context)
    return held.dims[1:3] == rows or held.dims[1] == tokens


def _logits(job: Job, largest: Iterable[Held]) -> Iterator[Mistake]:
    model = job.training.model
    wrong = []
    for held in largest:
        if model.vocab_size in held.dims:
            rows = math.prod(held.dims) // model.vocab_size
            # Of the head, its gradient and the embedding there are `width` rows, or a part of them.
            if (
                rows > CHUNK_TOKENS
                and rows >= min(job.device_tokens, MOST_LOGITS * CHUNK_TOKENS)
                and rows != model.width
            ):
                wrong.append((held, rows))
    if wrong:
        held, rows = max(wrong, key=lambda each: each[0].bytes)
        yield Mistake(
            kind="whole logits",
            name=held.shape,
            bytes=held.bytes,
            text=(
                f"logits of {rows:,} tokens exist at once ({held.shape}, {sized(held.bytes)}); the loss reads "
                f"{CHUNK_TOKENS} at a time, so they are made outside weighted_loss or the tokens are not split"
            ),
        )


def _is_gathered_bank(held: Held, job: Job) -> bool:
    model = job.training.model
    sides = {model.expert_input_width, model.expert_width}
    return len(held.dims) >= 3 and set(held.dims[-2:]) <= sides and held.dims[0] >= model.num_experts


def _is_experts(path: str) -> bool:
    return parameter_of(path).split(".")[-1].startswith("expert_")


def _short(source: str) -> str:
    return "/".join(source.split("/")[-2:])
