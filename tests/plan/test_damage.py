"""Damage and misuse: each is one message that says what and where, and none of them ends a run that could go on."""

import json

import pytest

from noonsight.logbook import read
from noonsight.plan import prune, runner, worker


def odd(voyage, body: str) -> tuple[int, str]:
    """Run the toy with a first stage whose function has this body."""
    voyage.edit("def number(config, inputs, out):\n", f"def number(config, inputs, out):\n    {body}\n")
    return voyage.run()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return Artifact(facts={'a': object()})", "fact 'a' cannot be written as JSON"),
        ("return Artifact(facts={'a': '\\ud800'})", "fact 'a' cannot be written as JSON"),
        ("(out / '\\udcff.txt').write_text('')", "cannot be written as JSON"),
        ("raise ValueError('\\ud800 is odd')", "\\ud800 is odd"),
    ],
)
def test_what_cannot_be_written_down_fails_the_stage_by_name(voyage, body, named):
    code, said = odd(voyage, body)
    run = read.run(voyage.out("number@1"))
    assert code == runner.FAILED and run is not None and run.status == "failed"
    assert named in run.error and "number failed" in said


def test_a_signal_without_a_name_is_told_by_its_number(voyage):
    code, said = odd(voyage, "os.kill(os.getpid(), 40)")
    assert code == runner.FAILED and "killed (signal 40)" in said


def test_a_heartbeat_longer_than_the_end_of_the_file_ends_nothing(voyage):
    body = "\n    ".join(("with claim(out) as mine:", "    Writer(out, mine).progress(1, 2, text='q' * 20_000)"))
    code, _ = odd(voyage, body + "\n    time.sleep(0.5)")
    assert code == runner.DONE
    assert len(read.last_progress(voyage.out("number@1")).text) == 20_000


def test_an_edited_result_of_the_same_size_is_seen(voyage):
    voyage.add('Stage(name="forecast", version="1", function=forecast, config=Config())')
    voyage.run()
    file = voyage.out("forecast@1") / "prediction.json"
    file.write_text(file.read_text().replace('"median":2.0', '"median":2.1'))
    code, said = voyage.run()
    assert code == runner.MOVED and "forecast@1  file prediction.json is not what the stage wrote" in said


def test_a_checkpoint_without_a_readable_manifest_is_no_result_and_can_be_pruned(voyage):
    voyage.run()
    out = voyage.out("number@1")
    manifest = out / "checkpoints" / "step_00000001" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{")
    assert worker._hash_files(out).keys() == {"n.txt"}
    assert [each.path for each in prune.prunable(voyage.root)] == [manifest.parent]


def test_a_damaged_fence_is_named(voyage):
    voyage.run()
    (voyage.out("number@1").parent / "runner.fence").write_text("")
    with pytest.raises(OSError, match=r"runner\.fence: it holds no number"):
        voyage.run()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"\x00", r"bad\.py: source code string cannot contain null bytes$"),
        (b"class Odd(BaseException): pass\nraise Odd('x')\n", r"line 2: raise Odd\('x'\)\n  Odd: x"),
    ],
)
def test_an_experiment_file_that_cannot_be_loaded_is_named(tmp_path, text, named):
    (tmp_path / "bad.py").write_bytes(text)
    with pytest.raises(ValueError, match=named):
        runner.load_experiment(tmp_path / "bad.py")


def test_a_line_that_is_no_heartbeat_is_passed_over(voyage):
    voyage.run()
    file = voyage.out("double@1") / "progress.jsonl"
    with open(file, "ab") as beats:
        beats.write(b'{"bad\n' + b"\x00" * 9000 + b"\n")
    assert read.last_progress(file.parent).text == "the double is 12"
    assert json.loads(file.read_bytes().splitlines()[0])["phase"] == "done"


def test_an_altered_ledger_is_seen_although_everything_is_done(voyage):
    assert voyage.run()[0] == runner.DONE
    (voyage.root / "predictions.jsonl").write_text('{"index": 0}\n')
    with pytest.raises(ValueError, match=r"predictions\.jsonl"):
        voyage.run()
