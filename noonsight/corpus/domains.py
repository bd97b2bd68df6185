"""Domains: what documents are about, found without labels.

TF-IDF over words, reduced by a truncated SVD to a few dozen directions, then spherical k-means (Dhillon and Modha
2001): unit vectors, centroids of unit length, assignment by cosine. A domain is named by the words that are heavier
in it than elsewhere. Everything is seeded by the config and rounded before it is written. Invariant: same documents,
same domains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from noonsight.corpus.document import read_documents, write_table
from noonsight.logbook.record import Artifact

DOMAINS = pa.schema([("doc_uid", pa.string()), ("domain", pa.int64()), ("name", pa.string())])


@dataclass(frozen=True, kw_only=True)
class DomainsConfig:
    """`num_domains` is a ceiling: a corpus with fewer documents, or without words, gets fewer."""

    num_domains: int = 7
    num_terms: int = 20_000
    num_directions: int = 48
    num_restarts: int = 6
    num_rounds: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_domains", "num_terms", "num_directions", "num_restarts", "num_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"DomainsConfig.{name}={getattr(self, name)} must be at least 1.")


def assign(config: DomainsConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: write `domains.parquet`, one row per document, sorted by `doc_uid`; domain 0 is the largest."""
    from threadpoolctl import threadpool_limits

    documents = read_documents(inputs["documents"], ["num_bytes", "text"])
    sizes = np.array(documents["num_bytes"].to_pylist())
    with threadpool_limits(1):  # sums in one order, whatever the machine
        weights, terms = _weights(documents["text"].to_pylist(), config)
        labels, cosine = _clusters(weights, config)
    names = _names(weights, terms, labels)
    by_size = sorted(range(len(names)), key=lambda label: (-int(sizes[labels == label].sum()), names[label]))
    rank = {label: place for place, label in enumerate(by_size)}
    table = pa.table(
        {
            "doc_uid": documents["doc_uid"],
            "domain": pa.array([rank[label] for label in labels.tolist()], pa.int64()),
            "name": pa.array([names[label] for label in labels.tolist()], pa.string()),
        },
        schema=DOMAINS,
    )
    write_table(out / "domains.parquet", table)
    found = [
        {
            "domain": rank[label],
            "name": names[label],
            "documents": int((labels == label).sum()),
            "bytes": int(sizes[labels == label].sum()),
        }
        for label in by_size
    ]
    return Artifact(facts={"documents": len(sizes), "domains": found, "mean_cosine": cosine})


def _weights(texts: list[str], config: DomainsConfig):
    """Sparse TF-IDF f64[documents, terms] and the terms; no column at all for a corpus without words."""
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import TfidfVectorizer

    few = len(texts) < 20  # then document frequencies say nothing
    vectorizer = TfidfVectorizer(
        max_features=config.num_terms,
        min_df=1 if few else 3,
        max_df=1.0 if few else 0.5,
        sublinear_tf=True,
        stop_words="english",
        token_pattern=r"(?u)\b[^\W\d_]{3,}\b",
    )
    try:
        return vectorizer.fit_transform(texts), vectorizer.get_feature_names_out()
    except ValueError as error:  # scikit-learn's way to say that no word is left
        if "vocabulary" not in str(error) and "no terms remain" not in str(error).lower():
            raise
        return csr_matrix((len(texts), 0)), np.array([], dtype=object)


def _clusters(weights, config: DomainsConfig) -> tuple[np.ndarray, float]:
    """Labels i64[documents], numbered without gaps, and the mean cosine to the own centroid."""
    from sklearn.decomposition import TruncatedSVD

    num, terms = weights.shape
    directions = min(config.num_directions, terms - 1, num - 1)
    if directions < 2 or config.num_domains == 1:
        return np.zeros(num, np.int64), 1.0
    points = TruncatedSVD(directions, random_state=config.seed, n_iter=4).fit_transform(weights)
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    rng = np.random.default_rng(config.seed)
    tries = [
        _spherical_k_means(points, min(config.num_domains, num), config.num_rounds, rng)
        for _ in range(config.num_restarts)
    ]
    labels, cosine = max(tries, key=lambda found: round(found[1], 9))
    return np.unique(labels, return_inverse=True)[1], round(cosine, 4)


def _spherical_k_means(points: np.ndarray, k: int, rounds: int, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """One run from k-means++ starts. Returns labels and the mean cosine; an emptied cluster stays empty."""
    centroids = points[rng.integers(len(points))][None]
    while len(centroids) < k:
        distance = np.maximum(0.0, 1.0 - (points @ centroids.T).max(axis=1))
        if distance.sum() < 1e-9:
            break
        centroids = np.concatenate([centroids, points[rng.choice(len(points), p=distance / distance.sum())][None]])
    labels = np.full(len(points), -1)
    for _ in range(rounds):
        nearest = (points @ centroids.T).argmax(axis=1)
        if np.array_equal(nearest, labels):
            break
        labels = nearest
        for label in range(len(centroids)):
            total = points[labels == label].sum(axis=0)
            if np.linalg.norm(total) > 0:
                centroids[label] = total / np.linalg.norm(total)
    return labels, float((points * centroids[labels]).sum(axis=1).mean())


def _names(weights, terms: np.ndarray, labels: np.ndarray, words: int = 3) -> list[str]:
    """A name for each label: the words with the largest mean weight inside minus mean weight over all."""
    everywhere = np.asarray(weights.mean(axis=0)).ravel()
    names: list[str] = []
    for label in range(labels.max(initial=0) + 1):
        lift = np.round(np.asarray(weights[labels == label].mean(axis=0)).ravel() - everywhere, 9)
        top = [str(terms[place]) for place in np.argsort(-lift, kind="stable")[:words] if lift[place] > 0]
        name = "-".join(top) or "all"
        names.append(name if name not in names else f"{name}-{label}")
    return names
