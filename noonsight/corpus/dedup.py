"""Duplicates: exact by normalised text, fuzzy by a proposal that an exact containment check decides.

Fuzzy duplicates are stars: documents are visited from the longest to the shortest, and one is marked only if a *named
retained* document contains enough of its distinct word shingles. Nothing is closed transitively, so a chain of
similar documents never collapses (Marin, issues #6851 and #6854, lost whole sources that way). Containment of A in B
is |A n B| / |A|. Shingles that many documents share are a template: a document with a body of its own must share that
too.

A second, wider relation only groups documents for the held-out split and never removes anything: see `near_groups`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from noonsight.corpus.document import hexdigest, read_documents, write_table
from noonsight.corpus.shingles import Banding, Sketches, num_shared, shingles, sketch, word_hashes
from noonsight.logbook.record import Artifact

DUPLICATES = pa.schema(
    [
        ("doc_uid", pa.string()),
        ("cluster", pa.string()),  # smallest uid of its near-duplicate group: the unit of the held-out split
        ("covered_by", pa.string()),  # the retained document that makes this one superfluous
        ("reason", pa.string()),  # exact | fuzzy
        ("containment", pa.float64()),
    ]
)
PAIRS = pa.schema(
    [
        ("doc_uid", pa.string()),  # the shorter one, which would go
        ("other_uid", pa.string()),  # the retained one
        ("containment", pa.float64()),
        ("jaccard", pa.float64()),
        ("own_containment", pa.float64()),  # of the shingles that are no template; null if there are too few
        ("shared_bands", pa.int64()),
        ("verdict", pa.string()),  # accepted | rejected
        ("reason", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Thresholds. `words` in `banding` is the shingle length of the proposal, `words` here that of the check."""

    banding: Banding = field(default_factory=Banding)
    words: int = 3
    containment: float = 0.75
    min_shingles: int = 20  # a shorter document is compared exactly only
    template_documents: int = 3  # a shingle in at least so many documents is a template
    own_share: float = 0.15  # from this share on, what is no template counts as a body of its own ...
    own_containment: float = 0.5  # ... and so much of it must be covered as well
    max_candidates: int = 64  # compared per document; the rest is counted as not compared
    group_containment: float = 0.2  # for the held-out split
    group_documents: int = 50  # shingles in more documents are not evidence of a copy there

    def __post_init__(self) -> None:
        for name in ("containment", "own_share", "own_containment", "group_containment"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(
                    f"DuplicatesConfig.{name}={getattr(self, name)} is not a share. Use a number in (0, 1]."
                )
        for name in ("words", "min_shingles", "template_documents", "max_candidates", "group_documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"DuplicatesConfig.{name}={getattr(self, name)} must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One comparison: document `member` against the retained document `cover` (row numbers)."""

    member: int
    cover: int
    containment: float
    jaccard: float
    own: float | None
    shared_bands: int
    accepted: bool
    reason: str


def find_duplicates(config: DuplicatesConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: `duplicates.parquet` (one row per document) and `pairs.parquet` (every comparison, accepted or not)."""
    documents = read_documents(inputs["documents"], ["source", "file", "start", "text"])
    uids = documents["doc_uid"].to_pylist()
    order = list(zip(*(documents[name].to_pylist() for name in ("source", "file", "start"))))
    texts = documents["text"].to_pylist()
    exact = exact_covers(texts, order)
    words = word_hashes(texts)
    del texts
    singles = [row for row in range(len(uids)) if row not in exact]
    sets: list[np.ndarray] = [shingles(words[row], config.words) for row in singles]
    proposal = (
        sets if config.banding.words == config.words else [shingles(words[r], config.banding.words) for r in singles]
    )
    del words
    pairs, not_compared = fuzzy_pairs(sets, sketch(proposal, config.banding), [order[row] for row in singles], config)
    accepted = {pair.member: pair for pair in pairs if pair.accepted}
    groups, capped = near_groups(sets, [(pair.member, pair.cover) for pair in accepted.values()], config)

    cover = {singles[pair.member]: (singles[pair.cover], "fuzzy", pair.containment) for pair in accepted.values()}
    group_of = {singles[row]: singles[group] for row, group in enumerate(groups)}
    for row, first in exact.items():
        target = cover[first][0] if first in cover else first  # the named document must be one that stays
        cover[row] = (target, "exact" if target == first else "fuzzy", 1.0 if target == first else cover[first][2])
        group_of[row] = group_of[first]
    _write(out, uids, cover, group_of, pairs, singles)
    return Artifact(facts=_facts(config, uids, cover, group_of, pairs, not_compared, capped))


def exact_covers(texts: Sequence[str], order: Sequence[tuple]) -> dict[int, int]:
    """Row of each exact duplicate -> row of the first document, by `order`, with its text but for case and spaces."""
    first: dict[str, int] = {}
    covers = {}
    for row in sorted(range(len(texts)), key=order.__getitem__):
        key = hexdigest(" ".join(texts[row].casefold().split()))
        if key in first:
            covers[row] = first[key]
        else:
            first[key] = row
    return covers


def fuzzy_pairs(
    sets: Sequence[np.ndarray], sketches: Sketches, order: Sequence[tuple], config: DuplicatesConfig
) -> tuple[list[Pair], int]:
    """All comparisons, longest document first, and how many proposed ones the cap left out."""
    template = _frequent(sets, config.template_documents)
    own = [members[~np.isin(members, template, assume_unique=True)] for members in sets]
    retained: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(sketches.banding.num_bands)]
    pairs: list[Pair] = []
    not_compared = 0
    for row in sorted(range(len(sets)), key=lambda row: (-len(sets[row]), order[row])):
        if len(sets[row]) < config.min_shingles:
            continue
        keys = sketches.bands[row].tolist()
        bands: dict[int, int] = defaultdict(int)
        for table, key in zip(retained, keys):
            for other in table.get(key, ()):
                bands[other] += 1
        candidates = sorted(bands, key=lambda other: (-bands[other], order[other]))
        covered = False
        for position, other in enumerate(candidates):
            if position == config.max_candidates:
                not_compared += len(candidates) - position
                break
            pairs.append(_compare(row, other, sets, own, bands[other], config))
            covered = pairs[-1].accepted
            if covered:
                break
        if not covered:
            for table, key in zip(retained, keys):
                table[key].append(row)
    return pairs, not_compared


def near_groups(
    sets: Sequence[np.ndarray], joined: Sequence[tuple[int, int]], config: DuplicatesConfig
) -> tuple[np.ndarray, int]:
    """Connected groups of documents that share `group_containment` of the smaller one's shingles; removes nothing.

    Returns the smallest row number of each document's group, and how many shingles were in too many documents to count.
    Exact: every pair that shares a counted shingle is looked at.
    """
    from scipy.sparse import coo_matrix, csr_matrix
    from scipy.sparse.csgraph import connected_components

    num = len(sets)
    sizes = np.array([len(members) for members in sets], dtype=np.int64)
    rows = np.repeat(np.arange(num), sizes)
    values, columns, counts = np.unique(
        np.concatenate([*sets, np.empty(0, np.uint64)]), return_inverse=True, return_counts=True
    )
    kept = (counts[columns] <= config.group_documents) & (counts[columns] > 1)
    shape = (num, max(1, len(values)))
    incidence = csr_matrix((np.ones(kept.sum(), np.int32), (rows[kept], columns[kept])), shape=shape)
    overlap = (incidence @ incidence.T).tocoo()
    smaller = np.minimum(sizes[overlap.row], sizes[overlap.col])
    near = (overlap.data >= config.group_containment * smaller) & (overlap.row != overlap.col)
    left = np.concatenate([overlap.row[near], np.array([pair[0] for pair in joined], dtype=np.int64)])
    right = np.concatenate([overlap.col[near], np.array([pair[1] for pair in joined], dtype=np.int64)])
    graph = coo_matrix((np.ones(len(left), np.int8), (left, right)), shape=(num, num))
    _, labels = connected_components(graph, directed=False)
    first = np.full(labels.max(initial=0) + 1, num, dtype=np.int64)
    np.minimum.at(first, labels, np.arange(num))
    return first[labels], int(np.count_nonzero(counts > config.group_documents))


def _compare(
    row: int, other: int, sets: Sequence[np.ndarray], own: Sequence[np.ndarray], bands: int, config: DuplicatesConfig
) -> Pair:
    """Exact containment of `row` in `other`, and of what is its own."""
    size = len(sets[row])
    shared = num_shared(sets[row], sets[other])
    containment = shared / size
    has_body = len(own[row]) >= config.own_share * size
    body = num_shared(own[row], sets[other]) / len(own[row]) if has_body else None
    if containment < config.containment:
        accepted, reason = False, "containment below the threshold"
    elif body is not None and body < config.own_containment:
        accepted, reason = False, "same template, a body of its own"
    else:
        accepted, reason = True, "contained in a retained document"
    return Pair(
        member=row,
        cover=other,
        containment=round(containment, 6),
        jaccard=round(shared / (size + len(sets[other]) - shared), 6),
        own=None if body is None else round(body, 6),
        shared_bands=bands,
        accepted=accepted,
        reason=reason,
    )


def _frequent(sets: Sequence[np.ndarray], num_documents: int) -> np.ndarray:
    """Shingles that occur in at least `num_documents` documents, sorted."""
    values, counts = np.unique(np.concatenate([*sets, np.empty(0, np.uint64)]), return_counts=True)
    return values[counts >= num_documents]


def _write(out: Path, uids: list[str], cover: dict, group_of: dict, pairs: list[Pair], singles: list[int]) -> None:
    smallest: dict[int, str] = {}
    for row, group in group_of.items():
        smallest[group] = min(uids[row], smallest.get(group, uids[row]))
    nothing = (None, None, None)
    rows = []
    for row, uid in enumerate(uids):
        other, reason, containment = cover.get(row, nothing)
        rows.append((uid, smallest[group_of[row]], None if other is None else uids[other], reason, containment))
    write_table(out / "duplicates.parquet", _table(rows, DUPLICATES))
    lines = [
        (
            uids[singles[pair.member]],
            uids[singles[pair.cover]],
            pair.containment,
            pair.jaccard,
            pair.own,
            pair.shared_bands,
            "accepted" if pair.accepted else "rejected",
            pair.reason,
        )
        for pair in pairs
    ]
    write_table(out / "pairs.parquet", _table(sorted(lines), PAIRS))


def _table(rows: list[tuple], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows)) or [[] for _ in schema]
    return pa.table([pa.array(column, type=kind.type) for column, kind in zip(columns, schema)], schema=schema)


def _facts(
    config: DuplicatesConfig,
    uids: list[str],
    cover: dict,
    group_of: dict,
    pairs: list[Pair],
    not_compared: int,
    capped: int,
) -> dict:
    reasons = [entry[1] for entry in cover.values()]
    sizes = np.unique(list(group_of.values()), return_counts=True)[1]
    return {
        "documents": len(uids),
        "exact": reasons.count("exact"),
        "fuzzy": reasons.count("fuzzy"),
        "pairs_compared": len(pairs),
        "pairs_accepted": sum(pair.accepted for pair in pairs),
        "pairs_not_compared": not_compared,
        "s_curve": {f"{j / 10:.1f}": round(config.banding.chance(j / 10), 4) for j in range(1, 11)},
        "groups": len(sizes),
        "groups_of_several": int(np.count_nonzero(sizes > 1)),
        "largest_group": int(sizes.max(initial=0)),
        "shingles_in_too_many_documents": capped,
    }
