"""An experiment file for the tests, copied into a folder of its own and edited there."""

import dataclasses
import os
import subprocess
import time

import msgspec
from beside import triple

from noonsight.logbook import chain, read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Artifact, Placement, Prediction, now
from noonsight.logbook.write import Writer, write_atomic
from noonsight.plan.stage import Experiment, Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    value: int = 2
    inner: Inner = Inner()
    sizes: tuple[int, ...] = (1, 2)


def number(config, inputs, out):
    (out / "n.txt").write_text(str(triple(config.value)))
    return Artifact(facts={"value": config.value, "devices": read.placement(out).num_devices})


def full(config, inputs, out):
    """What no file can hold any more is said to the screen."""
    os.write(int(os.environ["NOONSIGHT_TERMINAL"]), b"Paused: the disk is full.\n")
    return Artifact()


def double(config, inputs, out):
    value = int((inputs["number"] / "n.txt").read_text()) * 2
    (out / "n.txt").write_text(str(value))
    with claim(out) as mine:
        Writer(out, mine).progress(1, 1, phase="done", text=f"the double is {value}")
    return Artifact(facts={"value": value})


def wait(config, inputs, out):
    """Leaves a child of its own, says who they are, and never ends by itself."""
    child = subprocess.Popen(["sleep", "600"])
    with claim(out) as mine:
        Writer(out, mine).progress(1, 10)
        write_atomic(out / "pids.json", msgspec.json.encode([os.getpid(), child.pid]))
        time.sleep(600)
    return Artifact()


def collect(config, inputs, out):
    """Adds a line to a file, and fails until there are two."""
    with open(out / "lines.txt", "a") as file:
        file.write("line\n")
    if (num_lines := len((out / "lines.txt").read_text().splitlines())) < 2:
        raise RuntimeError("one line is not enough")
    return Artifact(facts={"lines": num_lines})


def forecast(config, inputs, out):
    draft = Prediction(
        experiment="toy",
        run="double@1",
        metric="eval/bits_per_byte",
        unit="bits/byte",
        components=((1.0, 2.0, 0.1),),
        median=2.0,
        interval=(1.8, 2.2),
        baseline=(2.0, 0.2),
        frozen_at=now(),
    )
    frozen = msgspec.structs.replace(draft, hash=chain.content_hash(draft))
    write_atomic(out / "prediction.json", msgspec.json.encode(frozen))
    chain.append(out.parent.parent / "predictions.jsonl", frozen)
    return Artifact()


def unrelated():
    return "nobody's business"


def experiment():
    first = Stage(name="number", version="1", function=number, config=Config(), sentence="A number.")
    second = Stage(name="double", version="1", function=double, config=Config(), inputs={"number": first})
    last = []  # more stages
    return Experiment(name="toy", question="Does it run?", stages=(second, *last), expected=str(Placement()))
