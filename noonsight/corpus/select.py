"""Select: the one place where documents leave, each with a reason.

First the held-out split is drawn, by near-duplicate cluster and before any selection: in each domain, clusters are
taken in the order of a hash of their identity (no seed, no shuffling) until the domain's share of the held-out bytes
is reached. Then documents are dropped: by rule, as a copy of a document that stays, or below the lowest level. What
is left trains, or is held out, in its cell "<domain>-q<level>". Invariant: no cluster has documents in both splits,
and the ledger adds up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from noonsight.corpus import report
from noonsight.corpus.document import hexdigest, read_documents, read_sidecar, write_table
from noonsight.corpus.ledger import Decision, balance, final, table_of
from noonsight.logbook.record import Artifact

KEPT = pa.schema(
    [
        ("doc_uid", pa.string()),
        ("split", pa.string()),  # train | heldout
        ("domain", pa.string()),
        ("level", pa.int64()),
        ("cell", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """How much is held out and what stays. A source that loses more than `max_loss_share` of its bytes is an error."""

    heldout_bytes: int = 240_000
    max_heldout_share: float = 0.1  # of any domain, for small corpora
    min_level: int = 1
    max_loss_share: float = 0.5

    def __post_init__(self) -> None:
        if self.heldout_bytes < 0 or not 0.0 <= self.max_heldout_share < 1.0:
            raise ValueError("SelectConfig: heldout_bytes must be >= 0 and max_heldout_share in [0, 1).")
        if not 0.0 <= self.max_loss_share <= 1.0 or not 0 <= self.min_level <= 4:
            raise ValueError("SelectConfig: max_loss_share must be in [0, 1] and min_level in 0..4.")


def select(config: SelectConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage (inputs documents, duplicates, quality, domains): write `kept.parquet`, `decisions.parquet` and `tables/`.

    Raises ValueError when a source loses too much, or nothing is left to train on.
    """
    rows = _join(inputs)
    heldout = heldout_clusters(rows, config)
    decisions = decide(rows, heldout, config)
    verdicts = final(decisions)
    books = balance(
        {row["doc_uid"]: row["source"] for row in rows}, {row["doc_uid"]: row["num_bytes"] for row in rows}, decisions
    )
    _check_losses(books, config)
    kept = [_kept(row, verdicts[row["doc_uid"]].action) for row in rows if verdicts[row["doc_uid"]].action != "drop"]
    write_table(out / "kept.parquet", pa.Table.from_pylist(kept, schema=KEPT))
    write_table(out / "decisions.parquet", table_of(decisions))
    report.write_tables(inputs, out, rows, verdicts, books)
    return Artifact(facts=_facts(rows, kept, books, decisions, heldout))


def heldout_clusters(rows: list[dict], config: SelectConfig) -> set[str]:
    """Clusters held out. Depends on documents, clusters and domains only, so a new rule or level never moves the split.

    A cluster belongs to the domain that has most of its bytes; one larger than a domain's whole share is never taken.
    """
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        sizes[row["cluster"]][row["domain"]] += row["num_bytes"]
    domains: dict[str, list[str]] = defaultdict(list)
    for cluster, parts in sizes.items():
        domains[min(parts, key=lambda name: (-parts[name], name))].append(cluster)
    total = sum(row["num_bytes"] for row in rows)
    share = min(config.max_heldout_share, config.heldout_bytes / total if total else 0.0)
    chosen: set[str] = set()
    for _, clusters in sorted(domains.items()):
        room = share * sum(sum(sizes[cluster].values()) for cluster in clusters)
        for cluster in sorted(clusters, key=lambda cluster: hexdigest(f"heldout {cluster}")):
            size = sum(sizes[cluster].values())
            if size <= room:
                chosen.add(cluster)
                room -= size
    if not chosen and config.heldout_bytes and len(sizes) > 1:  # a corpus too small for its shares
        whole = {cluster: sum(parts.values()) for cluster, parts in sizes.items()}
        chosen.add(min(whole, key=lambda cluster: (whole[cluster] < 500, whole[cluster], cluster)))
    return chosen


def decide(rows: list[dict], heldout: set[str], config: SelectConfig) -> list[Decision]:
    """All judgements on all documents. A copy goes only if the document that covers it stays."""
    alone = {row["doc_uid"]: _own_fault(row, config) for row in rows}
    decisions = []
    for row in rows:
        uid, cover = row["doc_uid"], row["covered_by"]
        if cover:
            text = f"{row['containment']:g} of its shingles are in the covering document"
            note = Decision(
                doc_uid=uid, stage="duplicates", rule=row["reason"], action="mark", evidence_uid=cover, evidence=text
            )
            decisions.append(note)
        if row["drop_rule"]:
            note = Decision(
                doc_uid=uid, stage="quality", rule=row["drop_rule"], action="mark", evidence=row["evidence"]
            )
            decisions.append(note)
        if alone[uid]:
            rule, evidence = alone[uid]
            last = Decision(doc_uid=uid, stage="select", rule=rule, action="drop", evidence=evidence)
        elif cover and not alone[cover]:
            rule = f"{row['reason']}-duplicate"
            last = Decision(doc_uid=uid, stage="select", rule=rule, action="drop", evidence_uid=cover)
        else:
            held = row["cluster"] in heldout
            rule = "heldout-cluster" if held else ("cover-not-kept" if cover else "passed")
            last = Decision(
                doc_uid=uid,
                stage="select",
                rule=rule,
                action="heldout" if held else "keep",
                evidence_uid=cover or "",
                evidence=f"cluster {row['cluster']}" if held else "",
            )
        decisions.append(last)
    return decisions


def _own_fault(row: dict, config: SelectConfig) -> tuple[str, str] | None:
    """Why a document goes for what it is itself: (rule, evidence), or None."""
    if row["drop_rule"]:
        return row["drop_rule"], row["evidence"]
    if row["level"] < config.min_level:
        return "low-quality", f"level {row['level']}, score {row['score']:g} (lowest level kept {config.min_level})"
    return None


def _join(inputs: Mapping[str, Path]) -> list[dict]:
    """One dict per document with all that was said about it, sorted by uid."""
    documents = read_documents(inputs["documents"], ["source", "kind", "file", "start", "num_bytes"])
    rows = documents.to_pylist()
    uids = documents["doc_uid"].to_pylist()
    duplicates = read_sidecar(inputs["duplicates"] / "duplicates.parquet", uids).to_pylist()
    quality = read_sidecar(inputs["quality"] / "quality.parquet", uids).to_pylist()
    domains = read_sidecar(inputs["domains"] / "domains.parquet", uids).to_pylist()
    for row, copies, judged, about in zip(rows, duplicates, quality, domains):
        row.update(copies)
        row.update(judged)
        row["domain"] = about["name"]
    return rows


def _kept(row: dict, action: str) -> dict:
    return {
        "doc_uid": row["doc_uid"],
        "split": "heldout" if action == "heldout" else "train",
        "domain": row["domain"],
        "level": row["level"],
        "cell": f"{row['domain']}-q{row['level']}",
    }


def _check_losses(books: Mapping[str, Mapping[str, Mapping[str, int]]], config: SelectConfig) -> None:
    for source, book in books.items():
        losses = {
            name.removeprefix("dropped:"): entry["bytes"] for name, entry in book.items() if name.startswith("dropped:")
        }
        share = sum(losses.values()) / max(1, book["in"]["bytes"])
        if share > config.max_loss_share:
            top = sorted(losses.items(), key=lambda item: (-item[1], item[0]))[:3]
            reasons = ", ".join(f"{rule} {size / book['in']['bytes']:.0%}" for rule, size in top)
            raise ValueError(
                f"source {source!r} would lose {share:.0%} of its bytes (limit {config.max_loss_share:.0%}): "
                f"{reasons}. Look at the source; then loosen the rule that is wrong about it, "
                "or give curate(..., selection=SelectConfig(max_loss_share=...)) a higher limit."
            )
    if not any("kept" in book for book in books.values()):
        raise ValueError("no document is left to train on. Add text, or loosen the rules that dropped it.")


def _facts(rows: list[dict], kept: list[dict], books: dict, decisions: list[Decision], heldout: set[str]) -> dict:
    sizes = {row["doc_uid"]: row["num_bytes"] for row in rows}
    cells: dict[str, int] = defaultdict(int)
    split: dict[str, dict[str, int]] = {name: {"documents": 0, "bytes": 0} for name in ("train", "heldout")}
    for row in kept:
        split[row["split"]]["documents"] += 1
        split[row["split"]]["bytes"] += sizes[row["doc_uid"]]
        if row["split"] == "train":
            cells[row["cell"]] += sizes[row["doc_uid"]]
    return {
        "documents": len(rows),
        "bytes": sum(sizes.values()),
        **split,
        "heldout_clusters": len(heldout),
        "cells": dict(sorted(cells.items())),
        "cover_not_kept": sum(decision.rule == "cover-not-kept" for decision in decisions),
        "sources": books,
    }
