"""Documents as sets of word shingles, and MinHash sketches of these sets.

A shingle is a run of n words, lower case, without punctuation; it is kept as a 64-bit hash. MinHash (Broder 1997):
for a random hash, two sets have the same minimum with probability J, their Jaccard index. With b bands of r rows a
pair is proposed with probability 1 - (1 - J^r)^b, the S-curve. Sketches only propose; exact sets decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

# A word, or one character of a script that is written without spaces.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, kw_only=True)
class Banding:
    """MinHash parameters: `num_bands` x `num_rows` hashes of word shingles."""

    num_bands: int = 48
    num_rows: int = 3
    words: int = 3

    def chance(self, jaccard: float) -> float:
        """Probability that a pair with this Jaccard index shares a band."""
        return 1.0 - (1.0 - jaccard**self.num_rows) ** self.num_bands


@dataclass(frozen=True, kw_only=True)
class Sketches:
    """MinHash band keys u64[document, band], with the parameters that made them."""

    banding: Banding
    bands: np.ndarray


def word_hashes(texts: Iterable[str]) -> list[np.ndarray]:
    """u64[words] for each text: its words in order, hashed."""
    known: dict[str, int] = {}
    result = []
    for text in texts:
        words = _WORD.findall(text.lower())
        for word in words:
            if word not in known:
                known[word] = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
        result.append(np.fromiter((known[word] for word in words), dtype=np.uint64, count=len(words)))
    return result


def shingles(words: np.ndarray, size: int) -> np.ndarray:
    """Sorted distinct hashes of all runs of `size` words; a text with fewer words is one shingle, no words none."""
    if not len(words):
        return words
    size = min(size, len(words))
    mixed = np.zeros(len(words) - size + 1, dtype=np.uint64)
    for offset in range(size):  # order matters: multiply between the words
        mixed = _mix(mixed * _ODD[0] + words[offset : offset + len(mixed)])
    return np.unique(mixed)


def sketch(sets: Sequence[np.ndarray], banding: Banding) -> Sketches:
    """Band keys of each set. Equal sets give equal keys; the empty set gives keys that no other set has."""
    count = banding.num_bands * banding.num_rows
    numbers = np.arange(1, 2 * count + 1, dtype=np.uint64) * _ODD[0]
    factors, offsets = _mix(numbers[:count]) | np.uint64(1), _mix(numbers[count:])
    bands = np.empty((len(sets), banding.num_bands), dtype=np.uint64)
    for row, members in enumerate(sets):
        if not len(members):
            bands[row] = _mix(np.uint64(row) + np.arange(banding.num_bands, dtype=np.uint64) * _ODD[1])
            continue
        minima = _minima(members, factors, offsets).reshape(banding.num_bands, banding.num_rows)
        keys = np.arange(banding.num_bands, dtype=np.uint64)  # the same minima in another band are no match
        for part in range(banding.num_rows):
            keys = _mix(keys * _ODD[0] + minima[:, part])
        bands[row] = keys
    return Sketches(banding=banding, bands=bands)


def concatenate(left: Sketches, right: Sketches) -> Sketches:
    """Sketches of both collections; ValueError when their parameters differ (their keys would never meet, silently)."""
    if left.banding != right.banding:
        raise ValueError(
            f"cannot join sketches made with {left.banding} and {right.banding}. Sketch both with one Banding."
        )
    return Sketches(banding=left.banding, bands=np.concatenate([left.bands, right.bands]))


def num_shared(left: np.ndarray, right: np.ndarray) -> int:
    """Size of the intersection of two sorted sets."""
    if len(left) > len(right):
        left, right = right, left
    if not len(left):
        return 0
    places = np.minimum(np.searchsorted(right, left), len(right) - 1)
    return int(np.count_nonzero(right[places] == left))


def _minima(members: np.ndarray, factors: np.ndarray, offsets: np.ndarray, block: int = 4096) -> np.ndarray:
    """u64[hashes]: the minimum of each hash over the set, in blocks so that memory stays flat for long documents."""
    minima = np.full(len(factors), np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(members), block):
        hashed = members[start : start + block, None] * factors + offsets
        np.minimum(minima, (hashed >> np.uint64(17)).min(axis=0), out=minima)
    return minima


def _mix(value: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64: every input bit moves every output bit."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * _ODD[1]
        value = (value ^ (value >> np.uint64(27))) * _ODD[2]
        return value ^ (value >> np.uint64(31))
