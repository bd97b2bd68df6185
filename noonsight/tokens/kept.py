"""The kept documents, one after the other, in one defined order.

`documents.parquet` holds the text and `kept.parquet` says which documents train, which are held out and which cell
each belongs to. Both are sorted by `doc_uid`; the stream below is that order, whatever wrote the files, because
everything after it (tokenizer, store, order of training) inherits it. A document that is out of order, twice there,
or chosen but missing stops the stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SPLITS = ("heldout", "train")
READ_ROWS = 256  # documents in memory at once


class KeptDocument(NamedTuple):
    """One chosen document with its text and where the text came from."""

    doc_uid: str
    split: str  # "train" or "heldout"
    domain: str
    level: int  # quality level; higher is better
    cell: str  # name of the (domain, level) cell that the mixture weighs
    source: str
    file: str
    start: int  # byte range in `file`
    end: int
    text: str


def kept_documents(documents: Path, select: Path, split: str | None = None) -> Iterator[KeptDocument]:
    """Yields the kept documents in order of `doc_uid`, of one split or of both.

    Raises ValueError when a file is missing or unreadable, when documents are not strictly ascending by `doc_uid`,
    or when a kept document is not among the documents; the message names the file and the document.
    """
    source, chosen = documents / "documents.parquet", select / "kept.parquet"
    kept = {row["doc_uid"]: row for row in _open(chosen).read().to_pylist()}
    for row in kept.values():
        if row["split"] not in SPLITS:
            raise ValueError(f"{chosen}: document {row['doc_uid']} has split {row['split']!r}; known are {SPLITS}")
    wanted = {uid for uid, row in kept.items() if split in (None, row["split"])}
    columns = ["doc_uid", "source", "file", "start", "end", "text"]
    previous = None
    for batch in _open(source).iter_batches(batch_size=READ_ROWS, columns=columns):
        uids = batch.column("doc_uid").to_pylist()
        for uid in uids:
            if previous is not None and uid <= previous:
                raise ValueError(
                    f"{source}: document {uid} follows {previous}; uids must ascend without repetition. "
                    "Run the stage that wrote this file again."
                )
            previous = uid
        rows = [row for row, uid in enumerate(uids) if uid in wanted]
        for document in batch.take(pa.array(rows, pa.int64())).to_pylist():
            uid = document.pop("doc_uid")
            wanted.remove(uid)
            choice = kept[uid]
            yield KeptDocument(
                uid, choice["split"], str(choice["domain"]), int(choice["level"]), choice["cell"], **document
            )
    if wanted:
        raise ValueError(
            f"{chosen} chooses {len(wanted)} documents that {source} does not hold, the first is {min(wanted)}. "
            "The two files come from different runs: run select again."
        )


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the stage that writes it has not finished; run it first") from None
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no readable parquet file ({error}); run the stage that wrote it again") from error
