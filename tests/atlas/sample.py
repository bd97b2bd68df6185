"""A logbook like the miniature's, made without training anything: for the tests of the atlas and for looking at pages.

`python -m tests.atlas.sample FOLDER` writes it and renders the site. Losses follow a power law with noise; the target is
killed at step 600 and repeats twelve steps. All values come from one seed, so the same call writes the same bytes.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from noonsight.logbook.chain import content_hash
from noonsight.logbook.record import (
    Check,
    Event,
    ExperimentRecord,
    Fault,
    Placement,
    Prediction,
    Progress,
    Receipt,
    Run,
    Verdict,
    encode,
)

START = datetime(2026, 12, 1, 11, 42, 7, tzinfo=UTC)
TOKENS_PER_STEP = 1024
BYTES_PER_TOKEN = 3.12
NATS = 2.13  # mean training loss at the end of a run whose bits per byte are 1
GROUPS = ("muonh", "adamh", "adam")
SOURCES = {"shakespeare": 5.46, "milton": 0.51, "jargon-file": 1.31, "sqlite-docs": 1.87, "sqlite-source": 2.74}
STAGES: dict[str, tuple[tuple[str, ...], float, str]] = {
    "documents@1": ((), 3.1, "Reads the shipped public-domain texts and cuts them into documents."),
    "duplicates@1": (("documents@1",), 4.8, "Finds exact copies and near copies, such as two editions of one play."),
    "quality@1": (("documents@1",), 2.9, "Judges every document by rules that name their evidence."),
    "domains@1": (("documents@1",), 2.2, "Sorts documents into domains by what they are about."),
    "select@1": (("documents@1", "duplicates@1", "quality@1", "domains@1"), 1.4, "Decides what trains, what is held out and what leaves, each with its reason."),
    "tokenizer@1": (("documents@1", "select@1"), 5.7, "Trains a byte-pair encoding of 4,096 tokens on what was kept."),
    "store@1": (("documents@1", "select@1", "tokenizer@1"), 3.3, "Writes the kept text as one flat file of token ids."),
    "mixture@1": (("store@1",), 0.6, "Plans which share of each step comes from which part of the corpus."),
    "rung-32@1": (("store@1", "mixture@1"), 12.4, "First rung of the ladder: width 32, two layers."),
    "rung-40@1": (("store@1", "mixture@1"), 17.9, "Second rung of the ladder: width 40, two layers."),
    "rung-48@1": (("store@1", "mixture@1"), 22.6, "Third rung of the ladder: width 48, two layers."),
    "rung-64@1": (("store@1", "mixture@1"), 29.3, "Fourth rung of the ladder: width 64, two layers."),
    "forecast@1": (("rung-32@1", "rung-40@1", "rung-48@1", "rung-64@1"), 1.9, "Predicts where the target will end, and freezes that before it may start."),
    "target@1": (("store@1", "mixture@1", "forecast@1"), 200.4, "Trains the target: width 96, three layers, eight experts."),
    "evaluate@1": (("target@1", "store@1"), 9.8, "Measures bits per byte on held-out documents, by domain."),
    "verdict@1": (("forecast@1", "evaluate@1"), 0.4, "Holds the prediction against the result."),
    "export@1": (("target@1", "tokenizer@1"), 6.2, "Writes the model in Hugging Face form and proves that it computes the same."),
    "samples@1": (("export@1",), 3.0, "Writes three short texts in the model's own voice."),
}  # fmt: skip
RUNGS = {"rung-32@1": (166, 2.61), "rung-40@1": (220, 2.47), "rung-48@1": (271, 2.37), "rung-64@1": (332, 2.24)}


def write_sample(
    root: Path, *, experiment: str = "miniature", seed: int = 7, steps: int = 1348, status: str = "done"
) -> Path:
    """Write one experiment below `root`. `status` is that of the target: done, running or failed."""
    random.seed(seed)
    folder = root / experiment
    clock = START
    prediction = _prediction(experiment)
    for address, (inputs, seconds, sentence) in STAGES.items():
        out = folder / address
        out.mkdir(parents=True, exist_ok=True)
        ended = clock + timedelta(seconds=seconds)
        run = Run(
            experiment=experiment,
            name=address.split("@")[0],
            version="1",
            fingerprint=_digest(address)[:32],
            function=f"noonsight.recipe.{address.split('@')[0].split('-')[0]}",
            status="done",
            sentence=sentence,
            started_at=_iso(clock),
            ended_at=_iso(ended),
            seconds=seconds,
            config=_config(address),
            inputs={item.split("@")[0]: {"stage": item, "fingerprint": _digest(item)[:32]} for item in inputs},
            code={f"noonsight/{address.split('@')[0].split('-')[0]}.py": _digest(address)[:16]},
            facts=_facts(address, steps),
            files={"output.bin": {"bytes": int(seconds * 91_423), "xxh3": _digest(address)[:16]}},
            machine={"cpu": "two cores", "python": "3.11.2", "jax": "0.10.2"},
            prediction_hash=prediction.hash if address == "target@1" else None,
            chain_length=1 if address == "target@1" else None,
            placement=Placement(faults=(Fault(kind="kill", at_step=600),) if address == "target@1" else ()),
        )
        if status != "done" and (address == "target@1" or "target@1" in _ancestors(address)):
            if address != "target@1":
                continue
            run = _unfinished(run, status)
        _write(out / "record.json", encode(run))
        _content(out, address, prediction, clock, steps if run.status == "done" else 820)
        clock = ended
    record = ExperimentRecord(
        name=experiment,
        question="Can four small models trained in a minute tell where one eight times their cost will end?",
        file=f"experiments/{experiment}.py",
        started_at=_iso(START),
        ended_at=_iso(clock) if status == "done" else None,
        status="done" if status == "done" else "running" if status == "running" else "failed",
        stages=tuple(STAGES),
        edges=tuple((item, address) for address, (inputs, _, _) in STAGES.items() for item in inputs),
        expected="Bits per byte near 2.03; the interval no wider than a tenth of its median.",
        seconds=(clock - START).total_seconds(),
    )
    _write(folder / "experiment.json", encode(record))
    entry_at = prediction.frozen_at
    entry = {"index": 0, "previous": "0" * 64, "prediction": prediction.hash, "at": entry_at}
    _write(root / "predictions.jsonl", encode({**entry, "hash": hashlib.sha256(encode(entry)).hexdigest()}) + b"\n")
    return folder


def _content(out: Path, address: str, prediction: Prediction, clock: datetime, steps: int) -> None:
    match address:
        case "target@1":
            _training(out, clock, steps, last=2.031, seconds=200.4 * steps / 1348, kill=600)
            _write(out / "tables/health.json", encode(_health()))
        case "forecast@1":
            _write(out / "prediction.json", encode(prediction))
            _write(out / "tables/band.json", encode(_band(1348, 2.031 * NATS)))
        case "verdict@1":
            _write(out / "verdict.json", encode(_verdict(prediction)))
        case "select@1":
            _write(out / "tables/flow.json", encode(_flow()))
            _write(out / "tables/reasons.json", encode(_reasons()))
        case "samples@1":
            _write(out / "tables/samples.json", encode(_samples()))
        case "export@1":
            _write(out / "receipts/parity.json", encode(_receipt()))
        case _ if address in RUNGS:
            rung_steps, last = RUNGS[address]
            _training(out, clock, rung_steps, last=last, seconds=STAGES[address][1], kill=None)


def _training(out: Path, clock: datetime, steps: int, *, last: float, seconds: float, kill: int | None) -> None:
    nats = last * NATS
    lines, events, beats, attempt, extra, replay = [], [], [], 0, 0.0, {}
    of, pace = max(steps, 1348) if kill else steps, (seconds - 5)
    order = list(range(steps))
    if kill is not None:
        order = [*range(kill), *range(kill - 12, steps)]
    for index, step in enumerate(order):
        if kill is not None and index == kill:
            attempt, extra = 1, 4.1
            events = _kill_events(clock + timedelta(seconds=kill * seconds / steps), kill)
        values = replay.get(step) or _measurements(step, steps, nats)
        replay[step] = values
        since = 0.4 + extra + index * pace / max(1, len(order))
        at = clock + timedelta(seconds=since)
        if index in (0, kill):
            phases = (("start", 0.38 if index == 0 else 1.6), ("compile", 0.3 if index == 0 else 0.7))
            beats += [_beat(clock, since - ago, step, of, attempt, phase) for phase, ago in phases]
        beats.append(_beat(clock, since, step + 1, of, attempt, "run"))
        lines.append(encode({"step": step, "attempt": attempt, "at": _iso(at), **values}))
    _write(out / "metrics.jsonl", b"\n".join(lines) + b"\n")
    _write(out / "events.jsonl", b"".join(encode(event) + b"\n" for event in events))
    _write(out / "progress.jsonl", b"".join(encode(beat) + b"\n" for beat in beats))


def _beat(clock: datetime, since: float, step: int, of: int, attempt: int, phase: str) -> Progress:
    at = _iso(clock + timedelta(seconds=since))
    return Progress(step=step, of=of, phase=phase, at=at, monotonic=1.0 + since, attempt=attempt, rate=6.7)


def _measurements(step: int, steps: int, last: float) -> dict[str, Any]:
    warm = min(1.0, (step + 1) / (0.02 * steps))
    rate = warm * (1 - 0.95 * step / steps)
    curve = _curve(step, steps, last)
    loss = curve + random.gauss(0, 0.09)
    gradient = 0.9 / (1 + step / 60) ** 0.35
    values: dict[str, Any] = {
        "loss": loss + 2e-4,
        "cross_entropy": loss,
        "z_loss": 2e-4 + random.random() * 4e-5,
        "tokens": (step + 1) * TOKENS_PER_STEP,
        "tokens_per_s": 6900 + random.gauss(0, 160) - (2600 if step % 120 == 119 else 0),
        "step_s": 0.148 + random.random() * 0.006,
        "norm/grad": gradient + random.gauss(0, 0.03),
        "router/entropy": 1.86 + 0.2 * (1 - math.exp(-step / 200)) + random.gauss(0, 0.006),
        "router/load_max_over_mean": 1.9 - 0.7 * (1 - math.exp(-step / 90)) + random.gauss(0, 0.05),
        "router/drop_rate": max(0.0, 0.05 * math.exp(-step / 70) + random.gauss(0, 0.0015)),
    }
    for place, group in enumerate(GROUPS):
        values[f"norm/grad/{group}"] = gradient * (0.8, 0.45, 0.2)[place] + random.gauss(0, 0.02)
        values[f"norm/param/{group}"] = (24.0, 9.5, 4.0)[place] * (1 + (0, 0, 0.3)[place] * step / steps)
        values[f"rate/{group}"] = rate * (0.0158, 0.00365, 0.00365)[place]
    if step % 150 == 0 or step == steps - 1:
        values["eval/bits_per_byte"] = curve / NATS
    return values


def _kill_events(moment: datetime, step: int) -> list[Event]:
    later, resumed = moment + timedelta(seconds=4.1), step - 12
    return [
        Event(
            at=_iso(moment),
            kind="checkpoint",
            text=f"Checkpoint after {resumed} steps (permanent, 12.5 MB).",
            step=resumed,
        ),
        Event(
            at=_iso(moment),
            kind="kill-injected",
            text=f"The worker kills itself after step {step}.",
            cause="injected",
            step=step,
        ),
        Event(
            at=_iso(moment),
            kind="killed",
            text="The worker was killed from outside.",
            cause="injected",
            step=step,
            data={"attempt": 0},
        ),
        Event(at=_iso(later), kind="restored", text=f"Went on from step_{resumed:08d}.", step=resumed, attempt=1),
        Event(
            at=_iso(later),
            kind="restart",
            text=f"Started again from step {resumed}: 12 steps done twice, 4.1 s lost (injected).",
            cause="injected",
            step=step,
            steps_lost=12,
            seconds_lost=4.1,
        ),
        Event(
            at=_iso(later),
            kind="sentinel",
            text="The gradient jumped to 3.1 at step 640.",
            cause="gradient-jump",
            step=640,
        ),
    ]


def _unfinished(run: Run, status: str) -> Run:
    changes: dict[str, Any] = {"status": status, "ended_at": None, "seconds": 121.0, "facts": {}}
    if status == "failed":
        changes["error"] = (
            "Traceback (most recent call last):\n  ...\nOSError: no space left on the disk of the run's folder"
        )
    return Run(**{name: changes.get(name, getattr(run, name)) for name in run.__struct_fields__})


def _prediction(experiment: str) -> Prediction:
    prediction = Prediction(
        experiment=experiment,
        run="target@1",
        metric="bits_per_byte",
        unit="bits per byte",
        components=((0.6, 2.034, 0.026), (0.4, 2.041, 0.042)),
        median=2.036,
        interval=(1.982, 2.094),
        baseline=(2.24, 0.12),
        regime={"tokens": 1_380_352, "vocabulary": 4096},
        inputs={address: _digest(address)[:32] for address in RUNGS},
        method={"form": "power law in FLOPs with a floor", "draws": 4000},
        code=_digest("forecast")[:32],
        decision="Start the target: the interval is narrower than a tenth of its median.",
        frozen_at=_iso(START + timedelta(seconds=109)),
    )
    digest = content_hash(prediction)
    return Prediction(
        **{name: digest if name == "hash" else getattr(prediction, name) for name in prediction.__struct_fields__}
    )


def _verdict(prediction: Prediction) -> Verdict:
    return Verdict(
        prediction_hash=prediction.hash,
        run="target@1",
        metric="bits_per_byte",
        result=2.031,
        inside=True,
        error_percent=-0.25,
        z=-0.16,
        log_score=2.31,
        log_score_baseline=0.72,
        crps=0.008,
        sentence="Inside: 2.031 bits per byte against 2.036, predicted between 1.982 and 2.094 before the run began.",
        at=_iso(START + timedelta(seconds=321)),
    )


def _facts(address: str, steps: int) -> dict[str, Any]:
    if address in RUNGS:
        count, result = RUNGS[address]
        return {
            "tokens": count * TOKENS_PER_STEP,
            "num_steps": count,
            "bits_per_byte": result,
            "seconds": STAGES[address][1],
        }
    return {
        "documents@1": {"documents": 2914, "bytes": 11_890_000},
        "duplicates@1": {"documents": 2914, "exact": 162, "fuzzy": 641},
        "select@1": {"documents": 1988, "train_bytes": 5_120_000, "heldout_bytes": 402_000},
        "tokenizer@1": {"vocab_size": 4096, "bytes_per_token": BYTES_PER_TOKEN},
        "store@1": {"num_tokens": {"train": 1_640_000, "heldout": 72_000}},
        "target@1": {
            "tokens": steps * TOKENS_PER_STEP,
            "num_steps": steps,
            "tokens_per_s": 6888.0,
            "seconds": 200.4,
            "bits_per_byte": 2.031,
            "resumed_bit_identical": True,
            "active_parameters": 1_204_000,
            "train_flops": 6.7e12,
        },
        "evaluate@1": {
            "bits_per_byte": 2.031,
            "macro": 2.087,
            "by_domain": {"verse": 2.201, "drama": 2.314, "dictionary": 2.112, "manual": 1.904, "program": 1.903},
        },
        "verdict@1": {"verdict": "inside", "error_percent": -0.25},
        "export@1": {"receipt_passed": True},
    }.get(address, {})


def _config(address: str) -> dict[str, Any]:
    if address == "target@1" or address in RUNGS:
        width = 96 if address == "target@1" else int(address.split("-")[1].split("@")[0])
        model = {
            "width": width,
            "num_layers": 3 if width == 96 else 2,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "vocab_size": 4096,
        }
        return {
            "model": model,
            "sequence_length": 256,
            "batch_size": 4,
            "seed": 1,
            "rates": {"muonh": 0.0158, "adamh": 0.00365},
        }
    return {"seed": 1, "threshold": 0.8}


def _band(steps: int, last: float) -> dict[str, Any]:
    """The forecast of the loss, averaged over the 15 % of the run before each progress."""
    rows = []
    for twentieth in range(8, 21):
        end = twentieth / 20
        middle = 0.5 * (_curve(end * steps, steps, last) + _curve((end - 0.15) * steps, steps, last)) + 0.03
        rows.append([end, end * steps * TOKENS_PER_STEP, 0.15, middle - 0.12, middle, middle + 0.13])
    columns = ["progress", "step_tokens", "window", "low", "median", "high"]
    return {"title": "The band of the training loss", "columns": columns, "rows": rows, "text": "90 %."}


def _curve(step: float, steps: int, last: float) -> float:
    return last + (math.log(4096) - last) * (1 + step / 14) ** -0.9 + 0.12 * (1 - step / steps)


def _flow() -> dict[str, Any]:
    columns = [
        "source",
        "documents in",
        "bytes in",
        "documents kept",
        "bytes kept",
        "bytes heldout",
        "bytes dropped",
        "lost",
    ]
    rows = []
    for place, (source, megabytes) in enumerate(SOURCES.items()):
        size, dropped = int(megabytes * 1e6), int(megabytes * 1e6 * (0.03, 0.0, 0.22, 0.09, 0.01)[place])
        rows.append(
            [source, size // 4100, size, (size - dropped) // 4200, size - dropped - 40_000, 40_000, dropped, "3 %"]
        )
    text = "In = kept + heldout + dropped, for each source."
    return {"title": "From sources to kept documents", "columns": columns, "rows": rows, "text": text}


def _reasons() -> dict[str, Any]:
    rows = [["fuzzy-duplicate", "shakespeare", 641, 3_214_000], ["too-few-letters", "sqlite-docs", 71, 118_000]]
    columns = ["rule", "source", "documents", "bytes"]
    return {"title": "Why documents left", "columns": columns, "rows": rows, "text": "Largest losses first."}


def _samples() -> dict[str, Any]:
    rows = [
        ["The king", " shall have the letters of the world, and so the sea\nDoth make him sweet: I will not be."],
        ["To build the database", ", the query planner is used to the index when the value is not a column."],
        [
            "hacker",
            " /n./ One who writes <script>alert(1)</script> in a sample & <b onclick=x>hopes</b>.",
        ],
    ]
    return {"title": "Samples", "columns": ["prompt", "continuation"], "rows": rows, "text": "Temperature 0.8, seed 1."}


def _health() -> dict[str, Any]:
    rows = [
        ["non-finite", "Every measurement is a finite number.", "green", "never"],
        [
            "gradient-jump",
            "The gradient norm is at most 10 times the median of the last 50 steps.",
            "amber",
            "1 times, first at step 640",
        ],
        ["rate-off-schedule", "The learning rate of every group equals the schedule.", "green", "never"],
    ]
    return {"title": "Sentinels", "columns": ["name", "rule", "state", "value"], "rows": rows, "text": ""}


def _receipt() -> Receipt:
    checks = (
        Check(name="largest difference of logits", value=2.4e-6, bound=1e-4, passed=True),
        Check(name="tokens with another first choice", value=0.0, bound=0.0, passed=True),
    )
    return Receipt(
        kind="export parity",
        subject="export@1",
        subject_digest=_digest("export"),
        against="target@1",
        against_digest=_digest("target@1"),
        engine="numpy reference",
        versions={"numpy": "2.2"},
        checks=checks,
        passed=True,
        at=_iso(START + timedelta(seconds=330)),
    )


def _ancestors(address: str) -> set[str]:
    inputs = STAGES[address][0]
    return set(inputs).union(*(_ancestors(item) for item in inputs)) if inputs else set()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    from noonsight.atlas.site import build_site

    write_sample(Path(sys.argv[1]))
    print(build_site(Path(sys.argv[1])))
