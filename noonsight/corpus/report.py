"""Small tables for the pages, written by `select` beside its results: what came in, what left and why, samples.

Each is a JSON file `{"title", "columns", "rows", "text"}` (contract 5). Samples are the first in order of uid, which
is a hash, so they are neither picked nor random.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from noonsight.corpus.document import read_documents
from noonsight.corpus.ledger import Decision
from noonsight.logbook.record import encode

SAMPLE_CHARACTERS = 200
Table = tuple[str, str, list[str], list[list]]  # title, text, columns, rows


def write_tables(
    inputs: Mapping[str, Path],
    out: Path,
    rows: list[dict],
    verdicts: Mapping[str, Decision],
    books: Mapping[str, Mapping[str, Mapping[str, int]]],
) -> None:
    """Write `tables/*.json` in `out`: flow, reasons, duplicates-accepted, duplicates-rejected, domains, quality."""
    pairs = pq.read_table(inputs["duplicates"] / "pairs.parquet")
    accepted, rejected = (_pairs(pairs, verdict) for verdict in ("accepted", "rejected"))
    samples = _domain_samples(rows, verdicts)
    wanted = {uid for pair in accepted + rejected for uid in (pair["doc_uid"], pair["other_uid"])}
    wanted.update(uid for uids in samples.values() for uid in uids)
    texts = _beginnings(inputs["documents"], wanted)
    where = {row["doc_uid"]: f"{row['source']}/{row['file']}:{row['start']}" for row in rows}
    tables = {
        "flow": _flow(books),
        "reasons": _reasons(books),
        "duplicates-accepted": _pair_table("Removed as duplicates", accepted, texts, where),
        "duplicates-rejected": _pair_table("Compared and kept", rejected, texts, where),
        "domains": _domains(rows, verdicts, samples, texts),
        "quality": _quality(rows),
    }
    (out / "tables").mkdir(exist_ok=True)
    for name, (title, text, columns, lines) in tables.items():
        table = {"title": title, "columns": columns, "rows": lines, "text": text}
        (out / "tables" / f"{name}.json").write_bytes(encode(table))


def _flow(books: Mapping) -> Table:
    columns = [
        "source",
        "documents in",
        "bytes in",
        "documents kept",
        "bytes kept",
        "bytes heldout",
        "bytes dropped",
        "lost",
    ]
    lines = []
    for source, book in books.items():
        came, kept = book["in"], book.get("kept", {"documents": 0, "bytes": 0})
        held = book.get("heldout", {"bytes": 0})["bytes"]
        dropped = came["bytes"] - kept["bytes"] - held
        share = f"{dropped / max(1, came['bytes']):.1%}"
        lines.append([source, came["documents"], came["bytes"], kept["documents"], kept["bytes"], held, dropped, share])
    return "From sources to kept documents", "In = kept + heldout + dropped, for each source.", columns, lines


def _reasons(books: Mapping) -> Table:
    lines = [
        [name.removeprefix("dropped:"), source, entry["documents"], entry["bytes"]]
        for source, book in books.items()
        for name, entry in book.items()
        if name.startswith("dropped:")
    ]
    lines.sort(key=lambda line: (-line[3], line[0], line[1]))
    return "Why documents left", "Largest losses first.", ["rule", "source", "documents", "bytes"], lines[:12]


def _pairs(pairs, verdict: str, count: int = 5) -> list[dict]:
    """The pairs nearest to the threshold, each document once: where a wrong verdict would be seen first."""
    chosen = pairs.filter(pc.equal(pairs["verdict"], verdict)).to_pylist()
    sign = 1 if verdict == "accepted" else -1
    chosen.sort(key=lambda pair: (sign * pair["containment"], pair["doc_uid"], pair["other_uid"]))
    found: dict[str, dict] = {}
    for pair in chosen:
        found.setdefault(pair["doc_uid"], pair)
    return list(found.values())[:count]


def _pair_table(title: str, pairs: list[dict], texts: Mapping[str, str], where: Mapping[str, str]) -> Table:
    columns = ["containment", "jaccard", "reason", "document", "text", "retained document", "its text"]
    lines = [
        [
            round(pair["containment"], 3),
            round(pair["jaccard"], 3),
            pair["reason"],
            where[pair["doc_uid"]],
            texts[pair["doc_uid"]],
            where[pair["other_uid"]],
            texts[pair["other_uid"]],
        ]
        for pair in pairs
    ]
    return title, "The pairs nearest to the threshold, the first characters of both.", columns, lines


def _domain_samples(rows: list[dict], verdicts: Mapping[str, Decision], count: int = 3) -> dict[str, list[str]]:
    samples: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if verdicts[row["doc_uid"]].action == "keep" and len(samples[row["domain"]]) < count:
            samples[row["domain"]].append(row["doc_uid"])
    return samples


def _domains(rows: list[dict], verdicts: Mapping, samples: Mapping[str, list[str]], texts: Mapping[str, str]) -> Table:
    sizes: Counter[str] = Counter()
    for row in rows:
        if verdicts[row["doc_uid"]].action == "keep":
            sizes[row["domain"]] += row["num_bytes"]
    lines = [
        [domain, size, " / ".join(texts[uid] for uid in samples[domain])]
        for domain, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    ]
    return (
        "Domains",
        "Named by their most characteristic words; three samples each.",
        ["domain", "bytes kept", "samples"],
        lines,
    )


def _quality(rows: list[dict]) -> Table:
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for row in rows:
        counts[row["kind"]][row["level"]] += 1
    lines = [[kind, *(levels[level] for level in range(5))] for kind, levels in sorted(counts.items())]
    columns = ["kind", *(f"level {level}" for level in range(5))]
    return "Quality levels", "Documents by kind and level; 4 is intact, 0 mostly damaged.", columns, lines


def _beginnings(documents: Path, wanted: set[str]) -> dict[str, str]:
    table = read_documents(documents, ["text"])
    found = {}
    for uid, text in zip(table["doc_uid"].to_pylist(), table["text"]):
        if uid in wanted:
            found[uid] = " ".join(text.as_py()[: 2 * SAMPLE_CHARACTERS].split())[:SAMPLE_CHARACTERS]
    return found
