"""What readers make of the files: surviving lines, SQL that stays inside, names that mean something."""

import pytest

from noonsight.logbook import read, record
from noonsight.logbook.claim import claim
from noonsight.logbook.vocabulary import METRICS
from noonsight.logbook.write import Writer


def rewound(out):
    """Attempt 0 measures steps 1 to 5, dies; attempt 1 goes on from step 4."""
    with claim(out) as mine:
        for step in range(1, 6):
            Writer(out, mine, attempt=0).metrics(step, {"loss": step, "step_s": 0.5})
        for step in range(4, 7):
            Writer(out, mine, attempt=1).metrics(step, {"loss": step + 100})


def test_the_surviving_line_holds_the_latest_attempt_and_all_keeps_history(tmp_path):
    rewound(tmp_path)
    line = read.metrics(tmp_path)["loss"]
    assert line.steps == (1, 2, 3, 4, 5, 6)
    assert line.values == (1, 2, 3, 104, 105, 106)
    assert line.attempts == (0, 0, 0, 1, 1, 1)
    history = read.metrics(tmp_path, attempts="all")["loss"]
    assert history.steps == (1, 2, 3, 4, 5, 4, 5, 6)


def test_old_points_beyond_a_rewind_do_not_stay(tmp_path):
    rewound(tmp_path)
    assert read.metrics(tmp_path)["step_s"].steps == (1, 2, 3)  # 4 and 5 were of the lost line
    with claim(tmp_path) as mine:
        Writer(tmp_path, mine, attempt=2).metrics(2, {"loss": 0.5})
    assert read.metrics(tmp_path)["loss"].steps == (1, 2)


def voyage(root):
    out = root / "miniature" / "target@1"
    rewound(out)
    run = record.Run(
        experiment="miniature",
        name="target",
        version="1",
        fingerprint="f",
        function="m:f",
        status="done",
        started_at="2026-01-01",
        seconds=3.5,
        facts={"tokens": 10},
    )
    with claim(out) as mine:
        Writer(out, mine).record(run)
        Writer(out, mine).event("kill-injected", "on purpose", cause="injected", step=5)


def test_sql_sees_runs_events_and_long_metrics(tmp_path):
    voyage(tmp_path)
    columns, rows = read.sql(tmp_path, "SELECT stage, status, seconds FROM runs")
    assert (columns, rows) == (["stage", "status", "seconds"], [("target", "done", 3.5)])
    query = "SELECT max(value) FROM metrics WHERE name = 'loss' AND surviving AND step <= 4"
    assert read.sql(tmp_path, query)[1] == [(104.0,)]
    assert read.sql(tmp_path, "SELECT kind, step FROM events")[1] == [("kill-injected", 5)]
    assert read.sql(tmp_path, "SELECT count(*) FROM predictions, verdicts")[1] == [(0,)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM voyage_rows",
        "COPY runs TO 'stolen.csv'",
        "ATTACH 'x.db'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "DROP TABLE runs",
        "SELECT 1; DROP TABLE runs",
        "SELEC 1",
        "",
    ],
)
def test_sql_only_reads_and_only_the_logbook(tmp_path, query):
    voyage_rows = [1]  # a Python variable of the caller must not be a table
    voyage(tmp_path)
    with pytest.raises(ValueError, match=r"."):
        read.sql(tmp_path, query)
    assert voyage_rows == [1] and not list(tmp_path.glob("*.csv"))


def test_experiments_of_an_absent_or_empty_root(tmp_path):
    assert read.experiments(tmp_path) == [] == read.experiments(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="cannot read"):
        read.experiments(tmp_path / "file")


def test_vocabulary_explains_names_and_families():
    assert METRICS["loss"].unit == "nats/token"
    assert METRICS["norm/grad/router"].direction == "steady"
    assert METRICS["eval/bits_per_byte/code"].direction == "lower"
    assert "norm/grad/router" in METRICS
    for name in ("los", "norm", "norm/grad//", "norm/other/x", "eval/bits_per_byte_code"):
        with pytest.raises(KeyError, match="vocabulary"):
            METRICS[name]
    assert all(metric.sentence.endswith(".") and metric.unit for metric in METRICS.values())
