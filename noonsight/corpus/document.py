"""What a document is: a byte range of a file, its text, and an identity that does not depend on the text.

The text of a document is decoded once from `raw[start:end]` and never rewritten later: every judgement is a sidecar
table with the same rows in the same order. A form feed ends a document inside a file; a stretch without form feeds
that is longer than a limit is cut at empty lines. Invariant: `text_of(raw[start:end])` gives the stored text again,
at any time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

DOCUMENTS = pa.schema(
    [
        ("doc_uid", pa.string()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("file", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("num_bytes", pa.int64()),  # of the text in UTF-8
        ("text_hash", pa.string()),
        ("text", pa.large_string()),
    ]
)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n\x0b\x0c"
_EMPTY_LINE = re.compile(rb"\n[ \t\r]*\n")


def uid_of(source: str, revision: str, file: str, start: int) -> str:
    """Identity of a document: 32 hex digits of xxh3-128 over its address, never over its text."""
    return hexdigest("\x00".join((source, revision, file, str(start))))


def hexdigest(text: str) -> str:
    """xxh3-128 of a text in hex. Encoded here: versions of the hash library disagree about `str` (datatrove 0.10.1)."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8"))


def text_of(raw: bytes) -> str:
    """Text of a byte range: UTF-8, a byte order mark at the start dropped, line ends made LF.

    Raises UnicodeDecodeError for bytes that are not UTF-8 (lone surrogates included).
    """
    return raw.removeprefix(_BYTE_ORDER_MARK).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def ranges(raw: bytes, max_document_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges of the documents in a file: non-empty, in order, without white space at their ends.

    Documents end at form feeds. A longer stretch than `max_document_bytes` is cut after the last empty line that fits,
    else after the last line, else between two characters.
    """
    found: list[tuple[int, int]] = []
    position = len(_BYTE_ORDER_MARK) if raw.startswith(_BYTE_ORDER_MARK) else 0
    while position < len(raw):
        stop = raw.find(b"\f", position)
        stop = len(raw) if stop < 0 else stop
        while position < stop:
            end = _cut(raw, position, stop, max_document_bytes)
            trimmed = _trim(raw, position, end)
            if trimmed is not None:
                found.append(trimmed)
            position = end
        position = stop + 1
    return found


def write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet file whose bytes depend on nothing but the table."""
    pq.write_table(table.replace_schema_metadata(None), path, compression="zstd", use_dictionary=True)


def read_documents(folder: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read `documents.parquet` of a finished stage, sorted by `doc_uid` and unique, or ValueError."""
    path = folder / "documents.parquet"
    wanted = None if columns is None else list(dict.fromkeys(["doc_uid", *columns]))
    table = pq.read_table(path, columns=wanted)
    uids = table["doc_uid"].to_pylist()
    if any(left >= right for left, right in pairwise(uids)):
        raise ValueError(
            f"{path}: rows are not sorted by doc_uid, or a uid occurs twice. The file was not written by "
            "corpus.sources.collect, or was changed since. Run the documents stage again."
        )
    return table


def read_sidecar(path: Path, uids: Sequence[str]) -> pa.Table:
    """Read a sidecar and check that it has the rows of the documents, in their order, or ValueError."""
    table = pq.read_table(path)
    if table["doc_uid"].to_pylist() != list(uids):
        raise ValueError(
            f"{path}: {table.num_rows} rows that are not the {len(uids)} documents in the same order. "
            "The sidecar was made from other documents. Run its stage again."
        )
    return table


def _cut(raw: bytes, start: int, stop: int, limit: int) -> int:
    """End of the piece that begins at `start`: the best cut at most `limit` bytes further."""
    if stop - start <= limit:
        return stop
    window = raw[start : start + limit]
    end = 0
    for match in _EMPTY_LINE.finditer(window):
        if window[: match.start()].strip(_SPACE):  # a cut after leading empty lines would make an empty piece
            end = match.end()
    if not end:
        end = window.rfind(b"\n") + 1
    if not end or not window[:end].strip(_SPACE):
        end = limit
        while end > 1 and raw[start + end] & 0xC0 == 0x80:  # do not cut inside a character
            end -= 1
    return start + end


def _trim(raw: bytes, start: int, end: int) -> tuple[int, int] | None:
    """Leave out empty lines before and white space after; indentation of the first line stays."""
    piece = raw[start:end]
    body = piece.rstrip(_SPACE)
    if not body:
        return None
    lead = len(body) - len(body.lstrip(_SPACE))
    first = max(body.rfind(b"\n", 0, lead), body.rfind(b"\r", 0, lead)) + 1
    return start + first, start + len(body)
