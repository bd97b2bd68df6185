"""A keyed permutation of 0..n-1 without a table: shuffling 39 million rows costs nothing until one is asked for.

A balanced Feistel network (Luby and Rackoff 1988) permutes 0..4^h-1; a result outside 0..n-1 is sent through again
until it falls inside (cycle walking; Black and Rogaway 2002). Since 4^h <= 4n, four passes on average are enough.

Invariant: for every key, `permute` is a bijection of 0..n-1 and `unpermute` its inverse.
"""

from __future__ import annotations

import numpy as np
import xxhash

NUM_ROUNDS = 6
_ROUND_KEYS = [np.uint64((0x9E3779B97F4A7C15 * (i + 1)) % 2**64) for i in range(NUM_ROUNDS)]


def make_key(*parts: object) -> int:
    """A 64-bit key from words and numbers; the same on every machine."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode("utf-8"))


def mix(values: np.ndarray) -> np.ndarray:
    """Scrambles u64[N]: SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Images of `index` under the permutation of 0..size-1 that `key` names; all u64[N], elementwise."""
    return _walk(index, size, key, forward=True)


def unpermute(image: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The inverse of `permute`; all u64[N]."""
    return _walk(image, size, key, forward=False)


def _walk(index: np.ndarray, size: np.ndarray, key: np.ndarray, *, forward: bool) -> np.ndarray:
    index, size, key = (np.array(a, np.uint64) for a in np.broadcast_arrays(index, size, key))
    assert (index < size).all()
    half = np.maximum(1, (_bit_length(size - np.uint64(1)) + np.uint64(1)) // np.uint64(2))
    outside = np.ones(index.shape, bool)
    while outside.any():
        index[outside] = _feistel(index[outside], half[outside], key[outside], forward)
        outside = index >= size
    return index


def _feistel(index: np.ndarray, half: np.ndarray, key: np.ndarray, forward: bool) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = index >> half, index & mask
    for round_key in _ROUND_KEYS if forward else reversed(_ROUND_KEYS):
        if forward:
            left, right = right, left ^ (mix(right ^ (key + round_key)) & mask)
        else:
            left, right = right ^ (mix(left ^ (key + round_key)) & mask), left
    return (left << half) | right


def _bit_length(values: np.ndarray) -> np.ndarray:
    """Number of bits of each u64; exact where a float logarithm would not be."""
    bits = np.zeros(values.shape, np.uint64)
    for shift in (32, 16, 8, 4, 2, 1):
        large = (values >> np.uint64(shift)) > 0
        bits[large] += np.uint64(shift)
        values = np.where(large, values >> np.uint64(shift), values)
    return bits + (values > 0)
