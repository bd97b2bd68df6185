"""A tiny corpus and the stages up to an open run, for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from noonsight.logbook.record import encode
from noonsight.tokens.mixture import MixtureConfig, plan_mixture
from noonsight.tokens.store import CellEntry, FileEntry, SplitEntry, StoreConfig, StoreManifest, build_store
from noonsight.tokens.tokenizer import TokenizerConfig, train_tokenizer

WORDS = "the sea lay calm at noon and the navigator took the sun with 12 degrees of error then wrote it down".split()


def sentence(rng: np.random.Generator, num_words: int) -> str:
    """Text with enough repetition to merge and enough chance to tell documents apart."""
    return " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=num_words)) + f" {rng.integers(1 << 40)}.\n"


def write_corpus(root: Path, texts: list[str], cells: list[str] | None = None, splits: list[str] | None = None) -> None:
    """`root/documents` and `root/select` as the corpus room writes them; a cell is named `<domain>q<level>`."""
    cells = cells or ["seaq0"] * len(texts)
    splits = splits or ["train"] * len(texts)
    rows = []
    for number, (text, cell, split) in enumerate(zip(texts, cells, splits)):
        size = len(text.encode())
        rows.append(
            {
                "doc_uid": xxhash.xxh3_128_hexdigest(f"doc {number}".encode()),
                "source": f"source{number % 2}",
                "kind": "prose",
                "file": f"{number}.txt",
                "start": 7,
                "end": 7 + size,
                "num_bytes": size,
                "text_hash": xxhash.xxh3_128_hexdigest(text.encode()),
                "text": text,
                "split": split,
                "domain": cell.split("q")[0],
                "level": int(cell.split("q")[1]),
                "cell": cell,
            }
        )
    rows.sort(key=lambda row: row["doc_uid"])
    kept = ["doc_uid", "split", "domain", "level", "cell"]
    documents = ["doc_uid", "source", "kind", "file", "start", "end", "num_bytes", "text_hash", "text"]
    for folder, name, columns in [("documents", "documents", documents), ("select", "kept", kept)]:
        (root / folder).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({c: [row[c] for row in rows] for c in columns}), root / folder / f"{name}.parquet")


def run_tokenizer(root: Path, vocab_size: int = 300) -> Path:
    """Runs the stage into `root/tokenizer`."""
    out = root / "tokenizer"
    out.mkdir()
    inputs = {"documents": root / "documents", "select": root / "select"}
    train_tokenizer(TokenizerConfig(vocab_size=vocab_size), inputs, out)
    return out


def run_store(root: Path, tokenizer: Path) -> Path:
    """Runs the stage into `root/store`."""
    store_facts(root, tokenizer)
    return root / "store"


def store_facts(root: Path, tokenizer: Path) -> dict:
    """Runs the stage into `root/store`; returns its facts."""
    out = root / "store"
    out.mkdir()
    artifact = build_store(
        StoreConfig(), {"documents": root / "documents", "select": root / "select", "tokenizer": tokenizer}, out
    )
    return artifact.facts


def run_mixture(root: Path, store: Path, config: MixtureConfig | None = None, name: str = "mixture") -> Path:
    """Runs the stage into `root/<name>`."""
    out = root / name
    out.mkdir(exist_ok=True)
    plan_mixture(config or MixtureConfig(block_rows=16), {"store": store}, out)
    return out


def synthetic_store(root: Path, cell_tokens: dict[str, int], tokens: np.ndarray | None = None) -> Path:
    """A store without documents or spans: the given tokens, or a sparse file of zeros however large."""
    out = root / "store"
    out.mkdir(parents=True)
    total = sum(cell_tokens.values())
    if tokens is None:
        with (out / "train.bin").open("wb") as file:
            file.truncate(2 * total)
    else:
        (out / "train.bin").write_bytes(tokens.astype("<u2").tobytes())
    cells, start = [], 0
    for name, size in cell_tokens.items():
        cells.append(
            CellEntry(
                name=name,
                domain=name.split("q")[0],
                level=int(name.split("q")[1]),
                start=start,
                num_tokens=size,
                num_documents=0,
                num_bytes=0,
                sources={},
            )
        )
        start += size
    manifest = StoreManifest(
        dtype="<u2",
        vocab_size=1 << 16,
        eos=0,
        tokenizer_digest="",
        splits={"train": SplitEntry(num_tokens=total, num_documents=0, num_bytes=0, cells=tuple(cells))},
        files={"train.bin": FileEntry(bytes=2 * total, xxh3="")},
    )
    (out / "manifest.json").write_bytes(encode(manifest))
    return out
