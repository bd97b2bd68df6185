"""What `noon check` compares; each function returns (how many things were checked, what is wrong)."""

from __future__ import annotations

from pathlib import Path

import xxhash

from noonsight.logbook import chain, read
from noonsight.logbook.vocabulary import METRICS
from noonsight.logbook.write import LogbookError


def predictions(root: Path) -> tuple[int, list[str]]:
    """The chain, each prediction's hash and place in it, each predicted run's and verdict's link to one."""
    try:
        entries = chain.verify(root / "predictions.jsonl")
    except chain.BrokenChain as error:
        return 0, [str(error)]
    frozen_at = {entry.prediction: entry.at for entry in entries}
    num_checked, wrong = len(entries), []
    for out in read.all_folders(root):
        if found := read.prediction(out):
            num_checked += 1
            if found.hash != chain.content_hash(found):
                wrong.append(f"{out}/prediction.json was changed after it was hashed")
            elif found.hash not in frozen_at:
                wrong.append(f"{out}/prediction.json is not in the chain")
        run = read.run(out)
        if run is not None and run.prediction_hash is not None:
            num_checked += 1
            if run.prediction_hash not in frozen_at:
                wrong.append(f"{out} ran under the prediction {run.prediction_hash[:12]}, which is not in the chain")
            elif run.started_at < frozen_at[run.prediction_hash]:
                wrong.append(f"{out} started before its prediction was frozen")
        if verdict := read.verdict(out):
            num_checked += 1
            if verdict.prediction_hash not in frozen_at:
                wrong.append(f"{out}/verdict.json is about a prediction that is not in the chain")
    return num_checked, wrong


def logbook(root: Path) -> tuple[int, list[str]]:
    """Every record and line parses, every metric has a meaning, every file of a finished stage has its bytes."""
    num_checked, wrong = 0, []
    for out in read.all_folders(root):
        try:
            run = read.run(out)
            assert run is not None
            read.events(out), read.lines(out / "progress.jsonl"), read.receipts(out), read.tables(out)
            wrong += [f"{out}: no meaning for metric {name}" for name in read.metrics(out) if name not in METRICS]
        except LogbookError as error:
            wrong.append(str(error))
            continue
        num_checked += 1
        for name, file in run.files.items():
            num_checked += 1
            try:
                digest = xxhash.xxh3_128_hexdigest((out / name).read_bytes())
            except OSError:
                wrong.append(f"{out / name} is gone")
                continue
            if digest != file["xxh3"]:
                wrong.append(f"{out / name} is not what the stage wrote")
    return num_checked, wrong
