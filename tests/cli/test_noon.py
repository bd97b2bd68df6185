"""The door: what scripts read, and one message for each wrong use."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from noonsight.cli.app import run as noon
from noonsight.logbook import chain, record
from noonsight.logbook.claim import claim
from noonsight.logbook.write import Writer, write_atomic
from tests.plan.conftest import TOY

ROOT = Path(__file__).parents[2]


def make_run(root, name, **fields):
    out = root / "miniature" / f"{name}@1"
    fields = {"status": "done", "started_at": "2026-01-02T00:00:00.000+00:00", "seconds": 10.0, **fields}
    run = record.Run(experiment="miniature", name=name, version="1", fingerprint=name, function="m:f", **fields)
    with claim(out) as mine:
        Writer(out, mine).record(run)
    return out


@pytest.fixture
def root(tmp_path):
    """A finished voyage, written by hand: forecast, target (killed once on purpose), verdict."""
    root = tmp_path / "voyages"
    draft = record.Prediction(
        experiment="miniature",
        run="target@1",
        metric="eval/bits_per_byte",
        unit="bits/byte",
        components=((1.0, 2.0, 0.05),),
        median=2.0,
        interval=(1.92, 2.08),
        baseline=(2.2, 0.2),
        frozen_at="2026-01-01T00:00:00.000+00:00",
    )
    frozen = msgspec.structs.replace(draft, hash=chain.content_hash(draft))
    forecast = make_run(root, "forecast")
    write_atomic(forecast / "prediction.json", record.encode(frozen))
    chain.append(root / "predictions.jsonl", frozen)
    facts = {"tokens": 1000, "tokens_per_s": 50.0, "resumed_bit_identical": True}
    inputs = {"forecast": {"stage": "forecast@1", "fingerprint": "forecast"}}
    # After the chain's entry, whose time is now.
    started = record.now()
    target = make_run(root, "target", started_at=started, facts=facts, inputs=inputs, prediction_hash=frozen.hash)
    with claim(target) as mine:
        Writer(target, mine).event("kill-injected", "On purpose.", step=5)
    verdict = make_run(root, "verdict")
    write_atomic(
        verdict / "verdict.json",
        record.encode(
            record.Verdict(
                prediction_hash=frozen.hash, run="target@1", metric="eval/bits_per_byte", result=2.03, inside=True,
                error_percent=1.5, z=0.6, log_score=1.9, log_score_baseline=0.4, crps=0.02, sentence="Inside: 2.03.",
                at="2026-01-03",
            )
        ),
    )  # fmt: skip
    graph = record.ExperimentRecord(
        name="miniature", question="Can a small ladder predict?", file="miniature.py", started_at="2026-01-01",
        status="done", stages=("forecast@1", "target@1", "verdict@1"), edges=(("forecast@1", "target@1"),),
    )  # fmt: skip
    write_atomic(root / "miniature" / "experiment.json", record.encode(graph))
    (root / "site").mkdir()
    (root / "site" / "index.html").write_text("<p>")
    return root


def test_show_json_is_the_contract_for_scripts(root, capsys):
    assert noon(["show", "miniature", "--root", str(root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["stage"] for each in shown["stages"]] == ["forecast@1", "target@1", "verdict@1"]
    assert shown["prediction"]["interval"] == [1.92, 2.08] and shown["prediction"]["median"] == 2.0
    assert len(shown["prediction"]["hash"]) == 64
    assert shown["prediction"]["frozen_at"] < shown["started_at"]
    expected = {
        "result": 2.03, "verdict": "inside", "error_percent": 1.5, "kills": 1, "resumed_bit_identical": True,
        "seconds": 30.0, "tokens": 1000, "tokens_per_s": 50.0, "site": str(root / "site" / "index.html"),
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected


@pytest.mark.parametrize("text", [[], ["--text"]])
def test_show_for_people(root, capsys, text):
    for name, word in ((None, "3/3 stages"), ("miniature", "verdict: Inside"), ("miniature/target", "kill-injected")):
        assert noon(["show", *([name] if name else []), "--root", str(root), *text]) == 0
        said = capsys.readouterr().out
        assert word in said and (text or all(len(line) <= 100 for line in said.splitlines()))


def test_show_of_a_stage_as_json_holds_its_record(root, capsys):
    assert noon(["show", "miniature/target@1", "--root", str(root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprint"] == "target" and shown["events"][0]["step"] == 5


def test_sql_prints_rows(root, capsys):
    assert noon(["sql", "SELECT stage, result FROM verdicts", "--root", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stage": "verdict", "result": 2.03}


def test_check_finds_a_changed_prediction_and_a_changed_file(root, capsys):
    for kind in ("predictions", "logbook"):
        assert noon(["check", kind, "--root", str(root)]) == 0
    path = root / "miniature" / "forecast@1" / "prediction.json"
    path.write_text(path.read_text().replace('"median":2.0', '"median":2.01'))
    assert noon(["check", "predictions", "--root", str(root)]) == 1
    assert "forecast@1/prediction.json was changed after it was hashed" in capsys.readouterr().out
    out = make_run(root, "other", files={"x.bin": {"bytes": 1, "xxh3": "0"}})
    (out / "x.bin").write_bytes(b"y")
    with claim(out) as mine:
        Writer(out, mine).metrics(1, {"lss": 1.0})
    assert noon(["check", "logbook", "--root", str(root)]) == 1
    said = capsys.readouterr().out
    assert "x.bin is not what the stage wrote" in said and "no meaning for metric lss" in said


def test_prune_lists_first_and_never_touches_what_is_cited(root, capsys):
    manifest = record.CheckpointManifest(
        step=1, kind="temporary", attempt=0, fence=1, arrays={}, files={}, tokens=1, at="t"
    )
    checkpoint = root / "miniature" / "target@1" / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    write_atomic(checkpoint / "manifest.json", record.encode(manifest))
    stray = root / "miniature" / "target@1" / ".x.1.tmp"
    stray.write_bytes(b"x")
    old = make_run(root, "old")  # in no graph
    source = make_run(root, "source")  # in no graph, but an input of one that is not either
    user = make_run(root, "user", inputs={"s": {"stage": "source@1", "fingerprint": "f"}})
    busy = make_run(root, "busy")
    early = make_run(root, "early")
    shutil.copy(root / "miniature" / "forecast@1" / "prediction.json", early / "prediction.json")
    with claim(busy):
        assert noon(["prune", "--root", str(root)]) == 0
        assert "4 can go" in capsys.readouterr().out and old.exists() and stray.exists()
        assert noon(["prune", "--root", str(root), "--apply"]) == 0
    assert not old.exists() and not user.exists() and not stray.exists() and not checkpoint.exists()
    assert source.exists() and busy.exists() and early.exists()
    for name in ("forecast@1", "target@1", "verdict@1"):
        assert (root / "miniature" / name / "record.json").exists()


WRONG = {
    "missing file": (["run", "absent.py"], 2, "no experiment file at absent.py. Files there: bare.py"),
    "a folder": (["run", "."], 2, "no experiment file at .. Files there: bare.py"),
    "not Python": (["run", "notes.md"], 2, "no experiment file at notes.md. Files there: bare.py"),
    "no experiment()": (["run", "bare.py"], 2, "bare.py defines no function experiment()"),
    "raises": (["run", "raises.py"], 2, "raises.py, line 3: return 1 / 0\n  ZeroDivisionError: division by zero"),
    "exits": (["run", "exits.py"], 2, "exits.py, line 1: raise SystemExit('no')"),
    "not an experiment": (["run", "returns.py"], 2, "returned int; it must return an Experiment"),
    "syntax": (["run", "syntax.py"], 2, "syntax.py, line 1: "),
    "root is a file": (["run", "toy.py", "--root", "bare.py"], 2, "choose another folder with --root"),
    "no such root": (["show", "--root", "nowhere"], 2, "there is no experiment in nowhere"),
    "unreadable root": (["show", "--root", "bare.py"], 2, "cannot read bare.py"),
    "unknown experiment": (["show", "minature"], 2, "Did you mean miniature?"),
    "unknown stage": (["show", "miniature/targt"], 2, "Did you mean target@1?"),
    "not SQL": (["sql", "SELEC 1"], 2, "not SQL"),
    "a write": (["sql", "DROP TABLE runs"], 2, "read-only"),
    "unknown verb": (["rnu"], 2, 'Did you mean "run"?'),
    "unknown option": (["run", "toy.py", "--rot", "x"], 2, "--rot"),
    "unknown check": (["check", "everything"], 2, "everything"),
    "export of nothing": (["export", "nowhere", "out"], 2, "there is no folder nowhere"),
    "export over something": (["export", "voyages", "voyages"], 2, "not an empty folder"),
    "prune of nothing": (["prune", "--root", "nowhere"], 2, "there is no folder nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_message(root, monkeypatch, capsys, case):
    arguments, code, message = WRONG[case]
    folder = root.parent
    monkeypatch.chdir(folder)
    (folder / "bare.py").write_text("x = 1\n")
    (folder / "notes.md").write_text("# Notes\n")
    (folder / "raises.py").write_text("def experiment():\n    x = 1\n    return 1 / 0\n")
    (folder / "exits.py").write_text("raise SystemExit('no')\n")
    (folder / "returns.py").write_text("def experiment():\n    return 3\n")
    (folder / "syntax.py").write_text("def experiment(:\n")
    (folder / "beside.py").write_text("def triple(value):\n    return value\n")
    shutil.copy(TOY, folder / "toy.py")
    before = sorted(folder.rglob("*"))
    assert noon(arguments) == code
    captured = capsys.readouterr()
    assert " ".join(message.split()) in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err and captured.err.count("noon: ") <= 1
    after = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before
    sys.modules.pop("beside", None)


def test_a_held_folder_names_the_holder(root, monkeypatch, capsys):
    monkeypatch.chdir(root.parent)
    shutil.copy(TOY, "toy.py")
    Path("beside.py").write_text("def triple(value):\n    return value\n")
    with claim(root / "toy", "runner"):
        assert noon(["run", "toy.py", "--root", str(root)]) == 4
    assert f"process {os.getpid()} on " in capsys.readouterr().err
    sys.modules.pop("beside", None)


def in_process(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_an_old_python_is_told_so():
    done = in_process("import sys; sys.version_info = (3, 8, 1); sys.version = '3.8.1 (x)'; import noonsight.cli")
    assert done.returncode == 2
    assert done.stderr.startswith("noon: Python 3.8.1 is too old: noonsight needs 3.11 or newer. Install one")
    assert done.stderr.count("\n") == 1


def test_help_names_every_verb_and_loads_nothing_heavy():
    heavy = "{'jax', 'numpy', 'duckdb', 'pyarrow', 'noonsight.plan.runner', 'noonsight.logbook.read'}"
    done = in_process(
        "import resource, sys\n"
        "try:\n    import noonsight.cli; noonsight.cli.main(['--help'])\n"
        f"finally:\n    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime\n"
        f"    print('heavy', sorted({heavy} & set(sys.modules)), used < 0.5)\n"
    )
    for verb in ("run", "show", "check", "sql", "site", "count", "drill", "export", "prune", "doctor"):
        assert f" {verb} " in done.stdout
    assert done.stdout.splitlines()[-1] == "heavy [] True" and "Exit codes" in done.stdout


def test_doctor_says_what_to_do(tmp_path, capsys):
    noon(["doctor", "--root", str(tmp_path / "new" / "voyages")])
    said = capsys.readouterr().out
    assert "ok    Python 3." in said and "huge pages" in said and "jax " in said
    (tmp_path / "file").write_text("x")
    assert noon(["doctor", "--root", str(tmp_path / "file")]) == 1
    assert "Choose another folder with --root" in capsys.readouterr().out
    assert noon(["doctor", "--root", "/proc/voyages"]) == 1, "it may be written there by its permissions only"


def test_no_line_of_a_run_is_wide_even_under_long_paths(tmp_path, capsys):
    deep = tmp_path / ("a" * 30) / ("b" * 30)
    deep.mkdir(parents=True)
    noon(["run", str(deep / "missing.py"), "--root", str(deep / "voyages")])
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == f"noon run {deep / 'missing.py'}" and second == f"results in {deep / 'voyages'}"
