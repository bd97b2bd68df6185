"""What the exchange of experts should send, by its contract: the figure that a compiled program is held against.

Bytes of results on one device in one step, all layers. A layer runs forward once, and once more where it is
recomputed; the backward pass sends rows and cotangents there and both gradients back (`model/exchange/ragged.py`).
Of a ragged exchange the result is the room to receive; `rows_sent` are the rows that travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noonsight.model.count.devices import local_experts, ragged
from noonsight.train.rehearse.hlo import Collective
from noonsight.train.rehearse.job import Job

RAGGED = "ragged-all-to-all"
FLOAT32 = 4


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
    """None where the exchange has no formula here, or the platform another transport in its place."""
    model = job.training.model
    found = sum(row.bytes_per_device for row in rows if row.kind == RAGGED)
    if model.exchange != "ragged" or model.capacity_factor is None or not found:
        return None
    width = {"float32": 4, "bfloat16": 2}[model.compute_dtype]
    row = model.expert_input_width * width
    assignments = job.device_tokens * model.num_experts_per_token
    chunks = 2 if local_experts(model, job.mesh["expert"]) % 2 == 0 else 1
    room = ragged(model, job.device_tokens, num_chunks=chunks, capacity_factor=model.capacity_factor).rows_per_chunk
    forwards = 1 if model.remat == "none" else 2
    there, back = chunks * room, chunks * assignments
    forward = (there + back) * row
    backward = (2 * there + back) * row + there * width + back * FLOAT32  # the weights, and their gradient
    return Exchanged(
        formula_bytes=model.num_layers * (forwards * forward + backward),
        found_bytes=found,
        sent_bytes=model.num_layers * assignments * (2 * forwards * row + 3 * row + width + FLOAT32),
    )
