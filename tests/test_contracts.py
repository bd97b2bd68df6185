"""The seams of docs/decisions/contracts.md that the logbook and the plan carry: names, forms and signatures.

Behaviour is tested in the rooms; what fails here is a change that other rooms would feel.
"""

import hashlib
import inspect

import msgspec
import pytest

from noonsight.logbook import chain, read, record
from noonsight.logbook.claim import ROLES, Claim, Fenced, Held, claim
from noonsight.logbook.vocabulary import METRICS, Metric
from noonsight.logbook.write import Writer, append_line, write_atomic
from noonsight.plan import runner
from noonsight.plan.stage import Experiment, Stage


def fields(kind) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_1_stage_artifact_placement():
    assert parameters(Stage) == [
        "name", "version", "function", "config", "inputs", "sentence", "resumable", "placement", "prediction",
    ]  # fmt: skip
    assert parameters(Experiment) == ["name", "question", "stages", "expected"]
    assert fields(record.Artifact) == ["facts"]
    assert fields(record.Placement) == [
        "num_devices", "num_processes", "mesh", "exchange", "capacity_factor", "moments_on_host", "faults", "hang_floor_s",
        "grace_s", "checkpoints", "temporary_every_s", "record_batches", "environment", "locations",
    ]  # fmt: skip
    assert {"path", "root", "accept_code", "after"} <= set(parameters(runner.run_experiment))
    codes = (runner.DONE, runner.FAILED, runner.WRONG_USE, runner.MOVED, runner.LOCKED, runner.INTERRUPTED)
    assert codes == (0, 1, 2, 3, 4, 130)


def test_2_program():
    from noonsight.model.families import miniature
    from noonsight.model.program import Program
    from noonsight.model.transformer import make_program

    assert list(Program.__dataclass_fields__ if hasattr(Program, "__dataclass_fields__") else Program._fields) == [
        "init",
        "loss",
        "after_step",
    ]
    program = make_program(miniature(16, 2, 64))
    assert parameters(program.init) == ["key"]
    assert parameters(program.loss) == ["params", "extra", "batch"]
    assert parameters(program.after_step) == ["extra", "aux"]


def test_3_batch():
    from noonsight.tokens.batches import Batch, open_batches

    assert Batch._fields == ("tokens", "segments", "weights")
    assert parameters(open_batches)[:5] == ["store", "mixture", "seed", "sequence_length", "batch_size"]


def test_9_page():
    from noonsight.atlas.pages import front, predictions, run, stage

    for page in (front, predictions, run, stage):
        assert parameters(page.collect)[0] == "root" and parameters(page.render) == ["data"]


def test_4_claim(tmp_path):
    assert ROLES == ("stage", "worker", "runner")
    with claim(tmp_path, "worker") as mine:
        assert isinstance(mine, Claim) and mine.fence == 1
        assert (tmp_path / "worker.lock").exists() and (tmp_path / "worker.fence").read_text() == "1"
        with pytest.raises(Held):
            claim(tmp_path, "worker")
        (tmp_path / "worker.fence").write_text("2")
        with pytest.raises(Fenced):
            mine.check()


def test_5_logbook(tmp_path):
    assert record.SCHEMA == 1
    assert parameters(Writer) == ["out", "claim", "attempt"]
    with claim(tmp_path) as mine:
        writer = Writer(tmp_path, mine, attempt=3)
        writer.event("crash", "It fell.", cause="crash", step=4, steps_lost=2, seconds_lost=1.5)
        writer.metrics(4, {"loss": float("-inf")})
        writer.progress(4, 9, unit="steps", phase="run", rate=1.0, text="x")
    (line,) = read.lines(tmp_path / "metrics.jsonl")
    assert line.keys() == {"step", "attempt", "at", "loss"} and (line["attempt"], line["loss"]) == (3, "-inf")
    (event,) = read.events(tmp_path)
    assert (event.kind, event.cause, event.attempt, event.steps_lost) == ("crash", "crash", 3, 2)
    write_atomic(tmp_path / "placement.json", record.encode(record.Placement(num_devices=4)))
    assert read.placement(tmp_path).num_devices == 4 and read.placement(tmp_path / "none").num_devices == 1
    append_line(tmp_path / "metrics.jsonl", b'{"step":5,"attempt":3,"at":"t","loss":1.0}')
    assert read.metrics(tmp_path)["loss"].steps == (4, 5)
    assert isinstance(METRICS["loss"], Metric)
    with pytest.raises(msgspec.ValidationError, match="unknown"):
        msgspec.convert({"experiment": "e", "unknown": 1}, record.Run)


def test_6_prediction_and_chain(tmp_path):
    prediction = record.Prediction(
        experiment="e", run="a@1", metric="m", unit="u", components=((1.0, 0.0, 1.0),), median=0.0,
        interval=(-1.645, 1.645), baseline=(0.0, 2.0), frozen_at="t",
    )  # fmt: skip
    content = msgspec.to_builtins(prediction)
    del content["hash"]
    digest = hashlib.sha256(record.encode(content)).hexdigest()
    frozen = msgspec.structs.replace(prediction, hash=digest)
    entry = chain.append(tmp_path / "predictions.jsonl", frozen)
    (line,) = read.lines(tmp_path / "predictions.jsonl")
    assert line.keys() == {"index", "previous", "hash", "prediction", "at"} and line["prediction"] == digest
    link = {name: line[name] for name in ("index", "previous", "prediction", "at")}
    assert line["hash"] == entry.hash == hashlib.sha256(record.encode(link)).hexdigest()


def test_7_progress():
    assert fields(record.Progress) == [
        "step", "of", "unit", "phase", "at", "monotonic", "attempt", "rate", "text",
    ]  # fmt: skip
    assert record.Phase.__args__ == ("start", "compile", "run", "save", "evaluate", "done")


def test_8_checkpoint_manifest():
    assert fields(record.CheckpointManifest) == [
        "schema", "step", "kind", "attempt", "fence", "arrays", "files", "tokens", "at",
    ]  # fmt: skip


def test_10_receipt():
    assert fields(record.Check) == ["name", "value", "bound", "passed"]
    assert {"kind", "subject_digest", "against_digest", "engine", "versions", "checks", "passed", "seed"} <= set(
        fields(record.Receipt)
    )
