"""The ledger: one line for every judgement on a document, and the law that nothing is lost.

A line names the stage, the rule, what it did to the document and its evidence; a duplicate names the document that
covers it. The last judgement of each document is `select`'s own: keep, heldout or drop. Invariant, per source and for
documents and bytes alike: in = kept + heldout + dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

DECISIONS = pa.schema(
    [
        ("doc_uid", pa.string()),
        ("stage", pa.string()),
        ("rule", pa.string()),
        ("action", pa.string()),
        ("evidence_uid", pa.string()),
        ("evidence", pa.string()),
    ]
)
Action = Literal["mark", "keep", "heldout", "drop"]


@dataclass(frozen=True, kw_only=True, order=True)
class Decision:
    """One judgement. `mark` only notes something; `keep`, `heldout` and `drop` are final, one of them per document."""

    doc_uid: str
    stage: str
    rule: str
    action: Action
    evidence_uid: str = ""
    evidence: str = ""


def table_of(decisions: Sequence[Decision]) -> pa.Table:
    """The ledger as a table, sorted by document, then stage and rule."""
    rows = [
        (d.doc_uid, d.stage, d.rule, d.action, d.evidence_uid or None, d.evidence or None) for d in sorted(decisions)
    ]
    columns = list(zip(*rows)) or [[] for _ in DECISIONS]
    return pa.table([pa.array(column, type=kind.type) for column, kind in zip(columns, DECISIONS)], schema=DECISIONS)


def final(decisions: Sequence[Decision]) -> dict[str, Decision]:
    """The final judgement of each document. A document with two of them is an error of ours."""
    found: dict[str, Decision] = {}
    for decision in decisions:
        if decision.action != "mark":
            assert decision.doc_uid not in found, f"two final decisions on {decision.doc_uid}"
            found[decision.doc_uid] = decision
    return found


def balance(
    sources: Mapping[str, str], sizes: Mapping[str, int], decisions: Sequence[Decision]
) -> dict[str, dict[str, dict[str, int]]]:
    """{source: {"in" | "kept" | "heldout" | "dropped:<rule>": {"documents", "bytes"}}}, asserted to add up.

    `sources` and `sizes` give the source and the bytes of every document that came in.
    """
    verdicts = final(decisions)
    assert verdicts.keys() == sources.keys(), "a document came in without a final decision, or the reverse"
    books: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(lambda: {"documents": 0, "bytes": 0}))
    names = {"keep": "kept", "heldout": "heldout"}
    for uid, source in sources.items():
        decision = verdicts[uid]
        for entry in ("in", names.get(decision.action, f"dropped:{decision.rule}")):
            books[source][entry]["documents"] += 1
            books[source][entry]["bytes"] += sizes[uid]
    for source, book in books.items():
        for unit in ("documents", "bytes"):
            out = sum(entry[unit] for name, entry in book.items() if name != "in")
            assert book["in"][unit] == out, f"{source}: {book['in'][unit]} {unit} in, {out} out"
    return {source: {name: dict(book[name]) for name in sorted(book)} for source, book in sorted(books.items())}
