"""SQL over the logbook: an in-memory DuckDB that is filled from the files and then locked in.

The tables are made by our own readers, so a query sees what pages see (surviving lines carry `surviving = true`, all
attempts are there). Before the query runs, access to files and to settings is switched off: nothing outside the root
can be read, nothing at all can be written.

    runs(experiment, stage, version, status, sentence, fingerprint, started_at, ended_at, seconds, facts, config, error)
    events(experiment, stage, at, kind, cause, step, attempt, steps_lost, seconds_lost, text)
    metrics(experiment, stage, attempt, step, name, value, surviving)
    predictions(experiment, stage, run, metric, unit, median, low, high, frozen_at, hash)
    verdicts(experiment, stage, run, metric, result, inside, error_percent, z, log_score, crps, sentence, at)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from noonsight.logbook import read

TABLES: dict[str, dict[str, str]] = {
    "runs": {
        **dict.fromkeys(("experiment", "stage", "version", "status", "sentence", "fingerprint"), "string"),
        **dict.fromkeys(("started_at", "ended_at"), "string"),
        "seconds": "double",
        **dict.fromkeys(("facts", "config", "error"), "string"),
    },
    "events": {
        **dict.fromkeys(("experiment", "stage", "at", "kind", "cause"), "string"),
        **dict.fromkeys(("step", "attempt", "steps_lost"), "int64"),
        "seconds_lost": "double",
        "text": "string",
    },
    "metrics": {
        **dict.fromkeys(("experiment", "stage"), "string"),
        **dict.fromkeys(("attempt", "step"), "int64"),
        "name": "string",
        "value": "double",
        "surviving": "bool",
    },
    "predictions": {
        **dict.fromkeys(("experiment", "stage", "run", "metric", "unit"), "string"),
        **dict.fromkeys(("median", "low", "high"), "double"),
        **dict.fromkeys(("frozen_at", "hash"), "string"),
    },
    "verdicts": {
        **dict.fromkeys(("experiment", "stage", "run", "metric"), "string"),
        "result": "double",
        "inside": "bool",
        **dict.fromkeys(("error_percent", "z", "log_score", "crps"), "double"),
        **dict.fromkeys(("sentence", "at"), "string"),
    },
}


def select(root: Path, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run one SELECT and return (column names, rows).

    Raises ValueError for anything but a single SELECT, for SQL that DuckDB refuses, and for a query that would leave
    the root; `LogbookError` for a logbook that cannot be read.
    """
    import duckdb
    import pyarrow

    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise ValueError(f"the query is not SQL that DuckDB reads: {error}") from None
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise ValueError("the logbook answers one SELECT at a time; it is read-only, so nothing else is allowed.")
    connection = duckdb.connect(":memory:")
    try:
        for table, rows in _rows(Path(root)).items():
            schema = pyarrow.schema([(name, kind) for name, kind in TABLES[table].items()])
            columns = list(zip(*rows)) or [()] * len(schema)
            arrays = [pyarrow.array(column, type=field.type) for column, field in zip(columns, schema)]
            connection.register("arriving", pyarrow.Table.from_arrays(arrays, schema=schema))
            connection.execute(f"CREATE TABLE {table} AS SELECT * FROM arriving")
            connection.unregister("arriving")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET python_enable_replacements = false")
        connection.execute("SET lock_configuration = true")
        answer = connection.execute(query)
        return [column[0] for column in answer.description], answer.fetchall()
    except duckdb.PermissionException as error:
        raise ValueError(
            f"the query reaches outside the logbook, which is closed: {error}\nTables: {', '.join(TABLES)}"
        ) from None
    except duckdb.Error as error:
        raise ValueError(f"DuckDB refuses the query: {error}\nTables: {', '.join(TABLES)}") from None
    finally:
        connection.close()


def _rows(root: Path) -> dict[str, list[tuple[Any, ...]]]:
    rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in TABLES}
    for out in read.all_folders(root):
        run = read.run(out)
        if run is None:
            continue
        where = (run.experiment, run.name)
        facts, config = json.dumps(run.facts), json.dumps(run.config)
        times = (run.started_at, run.ended_at, run.seconds)
        about = (run.version, run.status, run.sentence, run.fingerprint)
        rows["runs"].append((*where, *about, *times, facts, config, run.error))
        for e in read.events(out):
            rows["events"].append(
                (*where, e.at, e.kind, e.cause, e.step, e.attempt, e.steps_lost, e.seconds_lost, e.text)
            )
        rows["metrics"].extend((*where, *row) for row in _metric_rows(out))
        if p := read.prediction(out):
            rows["predictions"].append((*where, p.run, p.metric, p.unit, p.median, *p.interval, p.frozen_at, p.hash))
        if v := read.verdict(out):
            scores = (v.result, v.inside, v.error_percent, v.z, v.log_score, v.crps)
            rows["verdicts"].append((*where, v.run, v.metric, *scores, v.sentence, v.at))
    return rows


def _metric_rows(out: Path) -> list[tuple[int, int, str, float, bool]]:
    surviving = read.metrics(out)
    alive = {name: set(zip(line.steps, line.attempts)) for name, line in surviving.items()}
    return [
        (attempt, step, name, value, (step, attempt) in alive.get(name, ()))
        for name, line in read.metrics(out, attempts="all").items()
        for step, value, attempt in zip(line.steps, line.values, line.attempts)
    ]
