"""What `noon show` prints of a training run: the optimiser's groups, without asking for everything."""

from noonsight.cli import summary
from noonsight.logbook import read, record
from noonsight.logbook.write import write_atomic
from tests.atlas.sample import write_sample


def test_the_optimiser_groups_are_shown_and_other_tables_wait_for_text(tmp_path):
    run = record.Run(
        experiment="e", name="small", version="1", fingerprint="f", function="m.f", status="done", started_at="t"
    )
    (tmp_path / "tables").mkdir()
    groups = {"title": "Optimiser groups", "columns": ["leaf", "group"], "text": "Kind muonh."}
    groups["rows"] = [["layers.wq", "muonh"], ["head", "adamh"]]
    write_atomic(tmp_path / "tables" / "optimizer.json", record.encode(groups))
    write_atomic(tmp_path / "tables" / "health.json", record.encode({**groups, "title": "Sentinels"}))
    report = summary.stage(tmp_path, run)
    short, whole = (summary.stage_lines(report, whole=each) for each in (False, True))
    assert short[-4:] == ["Kind muonh.", "leaf       group", "layers.wq  muonh", "head       adamh"]
    assert "Sentinels" in whole and "Sentinels" not in short


def test_a_kill_and_its_resume_are_told_in_the_terminal(tmp_path):
    write_sample(tmp_path, steps=640)
    (found,) = read.experiments(tmp_path)
    report = summary.experiment(tmp_path, found)
    told = "1 incident at step 600: Started again from step 588: 12 steps done twice, 4.1 s lost"
    shown = summary.lines(report, whole=True)
    place = next(index for index, line in enumerate(shown) if line.startswith("  target@1"))
    assert told in shown[place + 1] and sum("incident" in line for line in shown) == 1
    out = tmp_path / "miniature" / "target@1"
    assert any(told in line for line in summary.stage_lines(summary.stage(out, read.run(out)), whole=True))
