"""The token store: one flat file of ids per split, and a span for every document in it.

A document is its tokens followed by EOS. Within a split, cells follow each other by name and the documents of a cell by
`doc_uid`, so a cell is one contiguous stream and a row of a batch is a slice of it. The spans say which document every
position belongs to; they are never read for training, only for trace and for the held-out documents.

Invariant: tokens in = tokens out. Each span holds exactly the encoding of its document plus one EOS, and the bytes that
its tokens stand for are the bytes of its text.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from noonsight.logbook.record import Artifact, Record, encode
from noonsight.logbook.write import write_atomic
from noonsight.tokens import tokenizer as tokenizers
from noonsight.tokens.kept import READ_ROWS, SPLITS, KeptDocument, kept_documents

SCHEMA = 1
SPAN_ROWS = 1 << 16  # spans in one row group: what trace reads to find one position
FLUSH_TOKENS = 1 << 20  # of one cell, held in memory before they are written


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Nothing to choose: the documents, the choice and the tokenizer decide the store."""


class CellEntry(Record, kw_only=True):
    """Where a cell lies in the file of its split, in tokens, and what it is made of."""

    name: str
    domain: str
    level: int
    start: int
    num_tokens: int  # EOS included
    num_documents: int
    num_bytes: int  # of text
    sources: dict[str, int]  # source -> tokens


class SplitEntry(Record, kw_only=True):
    """One split: totals, and its cells in the order of the file."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    cells: tuple[CellEntry, ...]


class FileEntry(Record, kw_only=True):
    """Size and hash of one file."""

    bytes: int
    xxh3: str


class StoreManifest(Record, kw_only=True):
    """`manifest.json`, written last: a folder without it is no store."""

    schema: int = SCHEMA
    dtype: str  # "<u2" or "<u4"
    vocab_size: int
    eos: int
    tokenizer_digest: str
    splits: dict[str, SplitEntry]
    files: dict[str, FileEntry]


@dataclass(frozen=True, kw_only=True)
class Store:
    """An open store; made by `open_store`."""

    folder: Path
    manifest: StoreManifest
    digest: str  # xxh3-128 of manifest.json: the identity of the store

    def tokens(self, split: str) -> TokenFile:
        """The tokens of a split, read where asked for."""
        return TokenFile(self.folder / f"{split}.bin", np.dtype(self.manifest.dtype))

    def spans(self, split: str) -> pq.ParquetFile:
        """The span table of a split, ascending by `start`."""
        return pq.ParquetFile(self.folder / f"{split}.spans.parquet")

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that made the store; a copy of it lies in the folder."""
        return tokenizers.load(self.folder / "tokenizer.json")


class TokenFile:
    """A flat file of ids. Read by position and not memory-mapped: a cold row is one read, where a map takes page faults
    and reads ahead (60 ms against 0.1 ms a step, measured on a sparse file of 10 billion tokens)."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path = path
        self._dtype = dtype
        self._file = path.open("rb", buffering=0)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens from `start` on, u16[count] or u32[count]. Safe from several threads."""
        size = self._dtype.itemsize
        content = os.pread(self._file.fileno(), int(count) * size, int(start) * size)
        if len(content) != count * size:
            raise ValueError(
                f"{self.path} ends before token {start + count}: it was cut while open; restore it or build again"
            )
        return np.frombuffer(content, self._dtype)


def build_store(config: StoreConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: encodes the kept documents into `<split>.bin`, `<split>.spans.parquet` and, last, `manifest.json`.

    Inputs: `documents` (documents.parquet), `select` (kept.parquet), `tokenizer` (tokenizer.json).
    Raises ValueError when no document trains, or when tokens do not stand for exactly the bytes of their document.
    """
    tokenizer = tokenizers.load(inputs["tokenizer"])
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    parts = {split: _SplitParts(out / f".{split}", dtype) for split in SPLITS}
    num_control_strings = 0  # encoded as text; counted, because someone will ask
    for documents in _groups(kept_documents(inputs["documents"], inputs["select"]), READ_ROWS):
        for document, ids in zip(documents, tokenizer.encode_batch([d.text for d in documents])):
            num_control_strings += sum(map(document.text.count, tokenizers.SPECIALS))
            tokens = np.array([*ids, tokenizer.eos], dtype)
            num_bytes = len(document.text.encode("utf-8"))
            if tokenizer.byte_lengths[tokens].sum() != num_bytes:
                raise ValueError(f"{inputs['tokenizer']}: the tokens of document {document.doc_uid} are not its text")
            parts[document.split].add(document, tokens, num_bytes)
    if not parts["train"].spans:
        raise ValueError(
            f"{inputs['select'] / 'kept.parquet'} keeps no document of split train: loosen the rules or add text"
        )
    files = {}
    splits = {split: parts[split].join(out, split, files) for split in SPLITS}
    content = (inputs["tokenizer"] / "tokenizer.json").read_bytes()
    (out / "tokenizer.json").write_bytes(content)
    files["tokenizer.json"] = FileEntry(bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))
    manifest = StoreManifest(
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
        tokenizer_digest=tokenizer.digest,
        splits=splits,
        files=files,
    )
    _write_table(out, splits)
    write_atomic(out / "manifest.json", encode(manifest))
    return Artifact(
        facts={
            "num_tokens": {split: entry.num_tokens for split, entry in splits.items()},
            "num_documents": {split: entry.num_documents for split, entry in splits.items()},
            "num_bytes": {split: entry.num_bytes for split, entry in splits.items()},
            "num_cells": len(splits["train"].cells),
            "num_control_strings": num_control_strings,
            "dtype": dtype,
            "digest": xxhash.xxh3_128_hexdigest(encode(manifest)),
        }
    )


def open_store(path: Path, *, verify: bool = False) -> Store:
    """Opens a store; nothing but the manifest is read unless `verify`, which compares every file with its hash.

    Raises ValueError naming the file that is missing, cut, changed or not readable.
    """
    file = path / "manifest.json"
    try:
        content = file.read_bytes()
        manifest = msgspec.json.decode(content, type=StoreManifest)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: the store was not finished; run build_store again") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is no store manifest ({error}); restore it or run build_store again") from error
    if manifest.schema != SCHEMA:
        raise ValueError(f"{file} has schema {manifest.schema}, this code reads {SCHEMA}; build the store again")
    for name, entry in manifest.files.items():
        part = path / name
        if not part.is_file():
            raise ValueError(f"{part} is missing: the store is damaged; restore the file or run build_store again")
        if part.stat().st_size != entry.bytes:
            raise ValueError(
                f"{part} has {part.stat().st_size} bytes, its manifest says {entry.bytes}; restore it or build again"
            )
        if verify and _hash_file(part) != entry.xxh3:
            raise ValueError(
                f"{part} does not have the hash of its manifest: its bytes changed; restore it or build again"
            )
    width = np.dtype(manifest.dtype).itemsize
    for split, entry in manifest.splits.items():
        if manifest.files[f"{split}.bin"].bytes != entry.num_tokens * width:
            raise ValueError(
                f"{file}: {entry.num_tokens} tokens of {width} bytes are not the size of {split}.bin; build again"
            )
    return Store(folder=path, manifest=manifest, digest=xxhash.xxh3_128_hexdigest(content))


class _SplitParts:
    """One split while it is built: documents arrive by uid, so each cell grows in a file of its own until `join`."""

    def __init__(self, folder: Path, dtype: str):
        self.folder = folder
        self.dtype = dtype
        self.spans: dict[str, list[tuple]] = {}  # cell -> (length, num_bytes, document without text), by uid
        self.waiting: dict[str, list[np.ndarray]] = {}
        self.num_waiting: Counter[str] = Counter()  # tokens
        self.cell_keys: dict[str, tuple[str, int]] = {}

    def add(self, document: KeptDocument, tokens: np.ndarray, num_bytes: int) -> None:
        key = self.cell_keys.setdefault(document.cell, (document.domain, document.level))
        if key != (document.domain, document.level):
            raise ValueError(
                f"cell {document.cell!r} holds domain and level {key}, but document {document.doc_uid} in it has "
                f"{(document.domain, document.level)}; a cell is one domain at one level: run select again"
            )
        self.spans.setdefault(document.cell, []).append((len(tokens), num_bytes, document._replace(text="")))
        self.waiting.setdefault(document.cell, []).append(tokens)
        self.num_waiting[document.cell] += len(tokens)
        if self.num_waiting[document.cell] >= FLUSH_TOKENS:
            self._flush(document.cell)

    def join(self, out: Path, split: str, files: dict[str, FileEntry]) -> SplitEntry:
        """Writes the two files of the split, enters them in `files` and removes the parts."""
        cells, start = [], 0
        with (out / f"{split}.bin").open("wb") as file:
            for name in sorted(self.spans):
                self._flush(name)
                part = self._part(name)
                for block in _blocks(part):
                    file.write(block)
                part.unlink()
                cells.append(self._entry(name, start))
                start += cells[-1].num_tokens
        if self.folder.exists():
            self.folder.rmdir()
        pq.write_table(self._table(cells), out / f"{split}.spans.parquet", row_group_size=SPAN_ROWS, compression="zstd")
        for name in (f"{split}.bin", f"{split}.spans.parquet"):
            files[name] = FileEntry(bytes=(out / name).stat().st_size, xxh3=_hash_file(out / name))
        return SplitEntry(
            num_tokens=start,
            num_documents=sum(cell.num_documents for cell in cells),
            num_bytes=sum(cell.num_bytes for cell in cells),
            cells=tuple(cells),
        )

    def _flush(self, cell: str) -> None:
        self.folder.mkdir(exist_ok=True)
        with self._part(cell).open("ab") as file:
            for tokens in self.waiting.pop(cell, []):
                file.write(tokens.tobytes())
        self.num_waiting[cell] = 0

    def _part(self, cell: str) -> Path:
        return self.folder / xxhash.xxh3_64_hexdigest(cell.encode("utf-8"))  # a cell's name need not be a file name

    def _entry(self, name: str, start: int) -> CellEntry:
        sources: Counter[str] = Counter()
        for length, _, document in self.spans[name]:
            sources[document.source] += length
        domain, level = self.cell_keys[name]
        return CellEntry(
            name=name,
            domain=domain,
            level=level,
            start=start,
            num_tokens=sum(length for length, _, _ in self.spans[name]),
            num_documents=len(self.spans[name]),
            num_bytes=sum(num_bytes for _, num_bytes, _ in self.spans[name]),
            sources=dict(sorted(sources.items())),
        )

    def _table(self, cells: list[CellEntry]) -> pa.Table:
        rows = [span for cell in cells for span in self.spans[cell.name]]
        lengths = np.array([length for length, _, _ in rows], np.int64)
        return pa.table(
            {
                "start": np.cumsum(lengths) - lengths,
                "length": lengths,
                "doc_uid": pa.array([document.doc_uid for *_, document in rows], pa.string()),
                "cell": pa.array([document.cell for *_, document in rows], pa.string()),
                "domain": pa.array([document.domain for *_, document in rows], pa.string()),
                "num_bytes": np.array([num_bytes for _, num_bytes, _ in rows], np.int64),
                "source": pa.array([document.source for *_, document in rows], pa.string()),
                "file": pa.array([document.file for *_, document in rows], pa.string()),
                "text_start": np.array([document.start for *_, document in rows], np.int64),
                "text_end": np.array([document.end for *_, document in rows], np.int64),
            }
        )


def _write_table(out: Path, splits: Mapping[str, SplitEntry]) -> None:
    table = {
        "title": "Tokens by cell",
        "text": "A cell is one domain at one quality level; the mixture weighs cells. Tokens count one EOS a document.",
        "columns": ["split", "cell", "domain", "level", "documents", "tokens", "bytes"],
        "rows": [
            [split, cell.name, cell.domain, cell.level, cell.num_documents, cell.num_tokens, cell.num_bytes]
            for split, entry in splits.items()
            for cell in entry.cells
        ],
    }
    (out / "tables").mkdir(exist_ok=True)
    write_atomic(out / "tables" / "cells.json", encode(table))


def _groups(documents: Iterable[KeptDocument], size: int) -> Iterator[list[KeptDocument]]:
    iterator = iter(documents)
    while group := list(itertools.islice(iterator, size)):
        yield group


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            yield block


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_64()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()
