"""Folders of text become documents: `scan` when the graph is built, `collect` when it runs.

A source is known by what is in it: file names relative to its folder, their bytes and xxh3. Where the folder lies
comes at run time from `placement.locations[name]`, so moving it changes no identity. Invariant: every byte of every
scanned file is in a document, is white space or a separator between documents, or belongs to a file that is reported
as skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import xxhash

from noonsight.corpus.document import DOCUMENTS, hexdigest, ranges, text_of, uid_of, write_table
from noonsight.logbook.record import Artifact, encode

NOTES = ("licence", "license", "copying", "readme")  # files about a source, by the stem of their names


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source: path relative to the folder, with forward slashes."""

    path: str
    num_bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A folder of text as identity: `revision` digests the files; the folder itself is placement."""

    name: str
    kind: str
    licence: str
    revision: str
    num_files: int
    num_bytes: int
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """`on_bad` says what a binary or undecodable file does: stop the stage, or be skipped, counted and reported."""

    sources: tuple[SourceConfig, ...]
    max_document_bytes: int = 20_000
    on_bad: Literal["stop", "skip"] = "stop"


def scan(path: str | Path, *, name: str, kind: str, licence: str = "not stated") -> SourceConfig:
    """Hash a folder of text files. Hidden files and notes (licence, copying, readme) are left out.

    Raises ValueError when the folder is missing, is no folder or holds no file to read.
    """
    root = Path(path)
    if not root.is_dir():
        raise ValueError(
            f"source {name!r}: {root} is {'a file' if root.exists() else 'missing'}, "
            "and a source is a folder of text files. Give the folder that holds the files."
        )
    files = tuple(_source_file(root, file) for file in _listing(root))
    if not files:
        raise ValueError(
            f"source {name!r}: {root} holds no text file (hidden files and notes like README or LICENCE do not count). "
            "Put plain UTF-8 text files there."
        )
    revision = hexdigest("\n".join(f"{file.path}\t{file.num_bytes}\t{file.xxh3}" for file in files))
    total = sum(file.num_bytes for file in files)
    return SourceConfig(
        name=name, kind=kind, licence=licence, revision=revision, num_files=len(files), num_bytes=total, files=files
    )


def collect(config: CollectConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: write `documents.parquet`, sorted by `doc_uid`, and `tables/skipped.json`.

    Raises ValueError when a folder is not located, a file changed since `scan`, or is not text and `on_bad` is stop.
    """
    from noonsight.logbook.read import placement

    _check(config)
    locations = placement(out).locations
    rows: list[tuple] = []
    skipped: list[tuple[str, str, str, int]] = []
    for source in config.sources:
        root = _located(source, locations)
        for file in source.files:
            raw = _read(source, root, file)
            problem = _problem(raw)
            if problem is None:
                rows.extend(_documents(source, file, raw, config.max_document_bytes))
            elif config.on_bad == "skip":
                skipped.append((source.name, file.path, problem, file.num_bytes))
            else:
                raise ValueError(
                    f"source {source.name!r}: {root / file.path} is {problem}. Remove or convert the file, or say "
                    'curate(..., on_bad="skip") in the experiment file to leave such files out and count them.'
                )
    if not rows:
        raise ValueError(f"no document in {len(config.sources)} sources: all files are empty or skipped. Add text.")
    rows.sort()
    columns = [pa.array(column, type=field.type) for column, field in zip(zip(*rows), DOCUMENTS)]
    write_table(out / "documents.parquet", pa.table(columns, schema=DOCUMENTS))
    _write_skipped(out, skipped)
    return Artifact(facts=_facts(config, rows, skipped))


def _check(config: CollectConfig) -> None:
    names = [source.name for source in config.sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        raise ValueError(
            f"CollectConfig.sources: {'two sources are named ' + ', '.join(twice) if twice else 'no source'}. "
            "Each source needs a name of its own."
        )
    if config.max_document_bytes < 64:
        raise ValueError(f"CollectConfig.max_document_bytes={config.max_document_bytes} is too small. Use at least 64.")


def _listing(root: Path) -> list[Path]:
    found = []
    for file in root.rglob("*"):
        relative = file.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if not hidden and file.stem.lower() not in NOTES and file.is_file():
            found.append(file)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _source_file(root: Path, file: Path) -> SourceFile:
    raw = file.read_bytes()
    return SourceFile(path=file.relative_to(root).as_posix(), num_bytes=len(raw), xxh3=xxhash.xxh3_128_hexdigest(raw))


def _located(source: SourceConfig, locations: Mapping[str, str]) -> Path:
    if source.name not in locations:
        known = ", ".join(sorted(locations)) or "none"
        raise ValueError(
            f"source {source.name!r}: placement.locations does not say where its folder is (known: {known}). "
            f"Add the entry {source.name!r} with the folder that was scanned."
        )
    root = Path(locations[source.name])
    listed = {file.path for file in source.files}
    new = [file for file in _listing(root) if file.relative_to(root).as_posix() not in listed]
    if new:
        raise ValueError(
            f"source {source.name!r}: {new[0]} appeared after the folder was scanned. "
            "Run again, so that it is scanned, or take the file out."
        )
    return root


def _read(source: SourceConfig, root: Path, file: SourceFile) -> bytes:
    path = root / file.path
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"source {source.name!r}: {path} was scanned and cannot be read now ({error.strerror}). "
            "Put it back, or run again so that the folder is scanned as it is."
        ) from error
    if len(raw) != file.num_bytes or xxhash.xxh3_128_hexdigest(raw) != file.xxh3:
        raise ValueError(
            f"source {source.name!r}: {path} changed since the folder was scanned "
            f"({file.num_bytes} bytes then, {len(raw)} now). Run again, so that the folder is scanned as it is."
        )
    return raw


def _problem(raw: bytes) -> str | None:
    """Why these bytes are not text, or None."""
    nul = raw.find(b"\x00")
    if nul >= 0:
        return f"binary (NUL byte at {nul})"
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start}: {error.reason})"
    return None


def _documents(source: SourceConfig, file: SourceFile, raw: bytes, limit: int) -> list[tuple]:
    rows = []
    for start, end in ranges(raw, limit):
        text = text_of(raw[start:end])
        uid = uid_of(source.name, source.revision, file.path, start)
        size = len(text.encode("utf-8"))
        rows.append((uid, source.name, source.kind, file.path, start, end, size, hexdigest(text), text))
    return rows


def _write_skipped(out: Path, skipped: list[tuple[str, str, str, int]]) -> None:
    if skipped:
        (out / "tables").mkdir(exist_ok=True)
        table = {
            "title": "Files that are not text",
            "columns": ["source", "file", "reason", "bytes"],
            "rows": skipped,
            "text": "These files were left out before anything was judged.",
        }
        (out / "tables" / "skipped.json").write_bytes(encode(table))


def _facts(config: CollectConfig, rows: list[tuple], skipped: list[tuple[str, str, str, int]]) -> dict:
    sources = {}
    for source in config.sources:
        mine = [row for row in rows if row[1] == source.name]
        gone = [entry for entry in skipped if entry[0] == source.name]
        sources[source.name] = {
            "kind": source.kind,
            "licence": source.licence,
            "files": source.num_files,
            "bytes": source.num_bytes,
            "documents": len(mine),
            "document_bytes": sum(row[6] for row in mine),
            "skipped_files": len(gone),
            "skipped_bytes": sum(entry[3] for entry in gone),
        }
    total = sum(row[6] for row in rows)
    return {"documents": len(rows), "bytes": total, "skipped_files": len(skipped), "sources": sources}
