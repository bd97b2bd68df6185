"""What `noon show` prints of a training run: the optimiser's groups, without asking for everything."""

from noonsight.cli import summary
from noonsight.logbook import record
from noonsight.logbook.write import write_atomic


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
