"""The records of the logbook: what a run, an event, a prediction, a verdict and a receipt are.

Every record is a frozen struct with a deterministic JSON form and a `schema` number; readers refuse unknown fields,
so that a typo is an error and not a silent default. Records hold facts only: no behaviour beyond encoding.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

SCHEMA = 1
Status = Literal["waiting", "running", "done", "failed", "interrupted"]
Phase = Literal["start", "compile", "run", "save", "evaluate", "done"]
_clock_error = timedelta()


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records; exists to state the three options once."""


class Artifact(Record, kw_only=True):
    """What a stage function returns: small JSON facts; everything large is a file in its folder."""

    facts: dict[str, Any] = {}


FaultKind = Literal[
    "kill", "kill-supervisor", "freeze", "terminate", "torn-save", "corrupt", "disk-full", "nan", "clock", "slow"
]


class Fault(Record, kw_only=True):
    """A fault to be injected on purpose, once. Placement, never identity."""

    kind: FaultKind
    at_step: int
    rank: int = 0  # of the process that it strikes
    seconds: float = (
        0.0  # clock: how far the wall clock jumps; slow: how long the data of a step are late, from then on
    )


class Placement(Record, kw_only=True):
    """Where a stage runs. Never part of identity."""

    num_devices: int = 1
    num_processes: int = 1  # that share the devices
    mesh: dict[str, int] = {}  # axis -> devices; empty: the experts are shared by as many as divide them
    exchange: str | None = None  # in the place of the model's, as long as it drops nothing
    capacity_factor: float | None = None  # of that exchange
    moments_on_host: bool = False
    faults: tuple[Fault, ...] = ()
    hang_floor_s: float = 60.0
    grace_s: float = 30.0  # for a process that is asked to end: to finish its step and save
    checkpoints: str | None = None  # folder or object store (s3://bucket/path) in the place of the run's own folder
    temporary_every_s: float = 3600.0  # wall time between temporary checkpoints; 0: none
    record_batches: bool = False  # a digest of every step's batch among the measurements
    environment: dict[str, str] = {}
    locations: dict[str, str] = {}  # name used in the config -> folder on this machine


class Run(Record, kw_only=True):
    """One execution of a stage: `record.json`."""

    schema: int = SCHEMA
    experiment: str
    name: str
    version: str
    fingerprint: str
    function: str
    status: Status
    sentence: str = ""  # what this stage is for, in one line
    started_at: str
    ended_at: str | None = None
    seconds: float = 0.0  # wall seconds over all attempts that did work
    config: dict[str, Any] = {}
    inputs: dict[str, dict[str, str]] = {}  # input name -> {"stage": "name@version", "fingerprint": ...}
    code: dict[str, str] = {}  # file of the source closure -> xxh3
    facts: dict[str, Any] = {}
    files: dict[str, dict[str, Any]] = {}  # relative path -> {"bytes", "xxh3"}
    machine: dict[str, Any] = {}
    placement: Placement = Placement()
    prediction_hash: str | None = None  # of the prediction that this run was started under
    chain_length: int | None = None  # length of the prediction chain at the start
    error: str | None = None


class ExperimentRecord(Record, kw_only=True):
    """`experiment.json`: the graph and its question, written before anything runs."""

    schema: int = SCHEMA
    name: str
    question: str
    file: str
    started_at: str
    ended_at: str | None = None
    status: Status = "running"
    stages: tuple[str, ...] = ()  # "name@version" in running order
    edges: tuple[tuple[str, str], ...] = ()  # (from, to)
    expected: str = ""
    seconds: float = 0.0


class Event(Record, kw_only=True):
    """Something that happened: one line of `events.jsonl`."""

    at: str
    kind: str  # e.g. "crash", "restart", "kill-injected", "code-accepted", "sentinel"
    text: str  # one sentence for a reader
    cause: str | None = None  # cause class
    step: int | None = None
    attempt: int = 0
    steps_lost: int | None = None
    seconds_lost: float | None = None
    data: dict[str, Any] = {}


class Progress(Record, kw_only=True):
    """Heartbeat: one line of `progress.jsonl`."""

    step: int
    of: int
    unit: str = "steps"
    phase: Phase = "run"
    at: str
    monotonic: float
    attempt: int = 0
    rate: float | None = None  # units per second
    text: str = ""


class Prediction(Record, kw_only=True):
    """A frozen forecast of one metric of one run that does not exist yet."""

    schema: int = SCHEMA
    experiment: str
    run: str  # address "name@version" of the predicted stage
    metric: str
    unit: str
    components: tuple[tuple[float, float, float], ...]  # (weight, mean, std): a mixture of normals
    median: float
    interval: tuple[float, float]  # central 90 %
    baseline: tuple[float, float]  # (mean, std) of "same as the last rung"
    regime: dict[str, Any] = {}  # what must hold for the comparison to count
    inputs: dict[str, str] = {}  # stage -> fingerprint of everything the forecast was made from
    method: dict[str, Any] = {}
    code: str = ""  # hash of the source closure
    decision: str = ""
    frozen_at: str
    hash: str = ""


class Verdict(Record, kw_only=True):
    """The prediction held against the result."""

    schema: int = SCHEMA
    prediction_hash: str
    run: str
    metric: str
    result: float
    inside: bool
    error_percent: float
    z: float
    log_score: float
    log_score_baseline: float
    crps: float
    comparable: bool = True
    reason: str = ""
    late: bool = False
    sentence: str
    at: str


class Check(Record, kw_only=True):
    """One line of a receipt."""

    name: str
    value: float
    bound: float
    passed: bool


class Receipt(Record, kw_only=True):
    """Proof that two things agree."""

    schema: int = SCHEMA
    kind: str
    subject: str
    subject_digest: str
    against: str
    against_digest: str
    engine: str
    versions: dict[str, str] = {}
    checks: tuple[Check, ...]
    passed: bool
    seed: int = 0
    at: str


class CheckpointManifest(Record, kw_only=True):
    """`manifest.json` of a checkpoint, written last."""

    schema: int = SCHEMA
    step: int
    kind: Literal["permanent", "temporary", "final"]
    attempt: int
    fence: int
    arrays: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]
    tokens: int
    at: str


def now() -> str:
    """Current time as ISO 8601 in UTC with milliseconds."""
    return (datetime.now(UTC) + _clock_error).isoformat(timespec="milliseconds")


def shift_clock(seconds: float) -> None:
    """Let the wall clock of this process be wrong by `seconds`, as a machine's may be: a fault to be injected."""
    global _clock_error
    _clock_error = timedelta(seconds=seconds)


def encode(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, non-finite numbers as strings. The same value gives the same bytes."""
    return msgspec.json.encode(_finite(msgspec.to_builtins(value)), order="deterministic")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
