"""What surrounds a command: terminals that cannot show a letter, readers that leave, output that is closed, odd roots."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from noonsight.cli.app import run as noon
from noonsight.logbook import record
from noonsight.plan.stage import Experiment
from tests.plan.conftest import TOY

ROOT = Path(__file__).parents[2]
NOON = "import sys; from noonsight.cli import main; main()"
RUN = [sys.executable, "-c", NOON, "run", "toy.py"]


@pytest.fixture
def place(tmp_path):
    """A folder with the toy experiment, and the environment of a process of its own in it."""
    (tmp_path / "toy.py").write_text(TOY.read_text())
    (tmp_path / "beside.py").write_text("def triple(value):\n    return value * 3\n")
    return {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}


def test_a_terminal_without_unicode_shows_what_it_can(place):
    place["env"] |= {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(RUN, capture_output=True, text=True, **place)
    assert done.returncode == 0, done.stderr
    assert "2 stages, 0 done (?)" in done.stdout and "the double is 12" in done.stdout


def test_closed_output_stops_nothing(place):
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *RUN], stderr=subprocess.PIPE, text=True, **place)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_whose_reader_left_does_not_say_that_it_is_done(place):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(RUN, stdout=write, stderr=subprocess.PIPE, text=True, **place)
    os.close(write)
    assert done.returncode == 1 and "the same command goes on from here" in done.stderr


def test_doctor_sees_that_a_file_is_in_the_way(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert noon(["doctor", "--root", str(tmp_path / "file" / "voyages")]) == 1
    assert "cannot be written. Choose another folder" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["site", "predictions.jsonl", "predictions.jsonl.lock"])
def test_names_that_the_root_needs_itself_are_refused_as_such(name):
    with pytest.raises(ValueError, match="keeps something of its own"):
        Experiment(name=name, question="", stages=())


def test_export_of_a_damaged_checkpoint_is_one_message_and_writes_nothing(tmp_path, capsys):
    run = record.Run(
        experiment="toy",
        name="small",
        version="1",
        fingerprint="",
        function="m:f",
        status="done",
        started_at=record.now(),
        facts={"checkpoint": "checkpoints/step_00000001"},
    )
    checkpoint = tmp_path / "small@1" / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{")
    (tmp_path / "small@1" / "record.json").write_bytes(record.encode(run))
    assert noon(["export", str(tmp_path / "small@1"), str(tmp_path / "out")]) == 2
    assert "step_00000001 cannot be trusted: manifest.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
