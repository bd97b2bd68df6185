"""What the whole miniature must leave behind. Run by `.ci/lanes/voyage.sh` on a root where it has just ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.lane("voyage"),
    pytest.mark.skipif("NOON_ROOT" not in os.environ, reason="the voyage lane sets NOON_ROOT"),
]
NOON = Path(sys.executable).parent / "noon"


def noon(*words: str) -> str:
    done = subprocess.run([NOON, *words, "--root", os.environ["NOON_ROOT"]], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_contract_for_scripts():
    shown = json.loads(noon("show", "miniature", "--json"))
    low, high = shown["prediction"]["interval"]
    assert low < shown["prediction"]["median"] < high
    assert high - low <= 0.10 * shown["prediction"]["median"]
    assert shown["prediction"]["frozen_at"] < shown["started_at"]
    assert shown["verdict"] in ("inside", "outside")
    assert (shown["verdict"] == "inside") == (low <= shown["result"] <= high)
    assert abs(shown["error_percent"] - 100 * (shown["result"] / shown["prediction"]["median"] - 1)) < 1e-6
    assert shown["kills"] == 1 and shown["resumed_bit_identical"] is True
    assert shown["tokens"] == 1_380_352 and shown["tokens_per_s"] > 0 and shown["seconds"] > 0
    assert Path(shown["site"]).is_file()


def test_no_heldout_cluster_trains():
    import pyarrow.parquet as pq

    root = Path(os.environ["NOON_ROOT"]) / "miniature"
    kept = pq.read_table(root / "select@1" / "kept.parquet").to_pylist()
    clusters = {
        row["doc_uid"]: row["cluster"]
        for row in pq.read_table(root / "duplicates@1" / "duplicates.parquet").to_pylist()
    }
    heldout = {clusters[row["doc_uid"]] for row in kept if row["split"] == "heldout"}
    train = {clusters[row["doc_uid"]] for row in kept if row["split"] == "train"}
    assert heldout and train and not heldout & train


def test_receipt_samples_and_chain():
    root = Path(os.environ["NOON_ROOT"]) / "miniature"
    assert json.loads((root / "export@1" / "receipts" / "export.json").read_text())["passed"] is True
    samples = json.loads((root / "samples@1" / "tables" / "samples.json").read_text())
    assert len(samples["rows"]) == 3 and all(text.strip() for _, text in samples["rows"])
    assert " 0 wrong" in noon("check", "predictions")
    assert " 0 wrong" in noon("check", "logbook")


def test_sql_cannot_leave_the_root():
    done = subprocess.run(
        [NOON, "sql", "select * from read_csv('/etc/passwd')", "--root", os.environ["NOON_ROOT"]],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "root:" not in done.stdout
