"""What the exchange of experts should send, by its contract: the figure that a compiled program is held against.

Bytes of results on one device in one step, all layers. A layer's exchange runs forward once, and once more where the
layer is recomputed; then its backward pass. Of a ragged exchange the result is the room to receive; `sent_bytes` is
what travels.

    ragged, each chunk          forward: C there, A back; backward: the same for the cotangents
    pooled, each of three waves forward: M + P there, P back; backward: P back again, P + P of cotangents    (all x S)

A assignments, C the room of a chunk, S devices, P rows of a pair, M header rows; `model/exchange/` says more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noonsight.model.count.devices import local_experts, pooled_wave, ragged
from noonsight.train.rehearse.hlo import Collective
from noonsight.train.rehearse.job import Job

RAGGED = "ragged-all-to-all"
WAVES = 3


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Of one device and step: results by the formula, results in the program, and what travels."""

    formula_bytes: int
    found_bytes: int
    sent_bytes: int

    @property
    def ratio(self) -> float:
        return self.found_bytes / self.formula_bytes


def exchanged(job: Job, rows: Iterable[Collective]) -> Exchanged | None:
    """None where the exchange has no formula here, or the program another transport in its place."""
    model, found = job.training.model, _by_kind(rows)
    if model.capacity_factor is None or job.mesh["expert"] == 1:
        return None
    if model.exchange == "ragged" and found.get(RAGGED):
        return _ragged(job, found[RAGGED])
    if model.exchange == "pooled" and found.get("all-to-all"):
        # The optimiser's transfers are all-to-alls too, on the GB200 a six-hundredth of these.
        return _pooled(job, found["all-to-all"])
    return None


def _ragged(job: Job, found: int) -> Exchanged:
    model, (forwards, width) = job.training.model, _forwards_and_width(job)
    row = model.expert_input_width * width
    assignments = job.device_tokens * model.num_experts_per_token
    chunks = 2 if local_experts(model, job.mesh["expert"]) % 2 == 0 else 1
    room = ragged(model, job.device_tokens, num_chunks=chunks, capacity_factor=model.capacity_factor).rows_per_chunk
    there, back = chunks * room, chunks * assignments
    times = forwards + 1
    return Exchanged(
        formula_bytes=model.num_layers * times * (there + back) * row,
        found_bytes=found,
        sent_bytes=model.num_layers * times * 2 * assignments * row,
    )


def _pooled(job: Job, found: int) -> Exchanged:
    model, (forwards, width) = job.training.model, _forwards_and_width(job)
    shards, row = job.mesh["expert"], model.expert_input_width * width
    sizes = pooled_wave(
        model, job.device_tokens, expert_shards=shards, num_waves=WAVES, capacity_factor=model.capacity_factor
    )
    rows = forwards * (2 * sizes.rows_per_pair + sizes.header_rows) + 3 * sizes.rows_per_pair
    formula = model.num_layers * WAVES * shards * rows * row
    return Exchanged(formula_bytes=formula, found_bytes=found, sent_bytes=formula * (shards - 1) // shards)


def _forwards_and_width(job: Job) -> tuple[int, int]:
    """How often a layer runs forward, and the bytes of a number of its rows."""
    model = job.training.model
    return 1 if model.remat == "none" else 2, {"float32": 4, "bfloat16": 2}[model.compute_dtype]


def _by_kind(rows: Iterable[Collective]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        if "expert" in row.axes.split(" x "):
            found[row.kind] = found.get(row.kind, 0) + row.bytes_per_device
    return found
