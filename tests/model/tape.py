"""Reverse-mode differentiation in float64 NumPy: just what the reference needs, one rule per operation.

The functions take plain arrays (real or complex) as well, so the same equations can be differentiated a second way:
the complex step, Im f(x + ih d) / h, has no rounding error and judges this tape (test_reference.py).
"""

from __future__ import annotations

from itertools import count

import numpy as np

_births = count()


class Traced:
    """An array that remembers from which arrays it came; `parents` are (array, cotangent -> the parent's cotangent)."""

    __array_ufunc__ = None  # so that ndarray + Traced comes to our __radd__

    def __init__(self, value, parents=()):
        self.value, self.parents, self.born = np.asarray(value, np.float64), parents, next(_births)
        self.shape, self.gradient = self.value.shape, np.zeros(self.value.shape)

    def __add__(self, other):
        return _traced(value(self) + value(other), (self, lambda ct: ct), (other, lambda ct: ct))

    def __mul__(self, other):
        return _traced(
            value(self) * value(other), (self, lambda ct: ct * value(other)), (other, lambda ct: ct * value(self))
        )

    def __pow__(self, power):
        return _traced(self.value**power, (self, lambda ct: ct * power * self.value ** (power - 1)))

    def __getitem__(self, index):
        def back(ct):
            whole = np.zeros(self.shape)
            np.add.at(whole, index, ct)
            return whole

        return _traced(self.value[index], (self, back))

    def __matmul__(self, other):
        letters = "abcdef"[: len(self.shape) - 1]
        return einsum(f"{letters}x,xy->{letters}y", self, other)

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + other * -1.0

    def __rsub__(self, other):
        return self * -1.0 + other

    def __truediv__(self, other):
        return self * other**-1.0

    def __rtruediv__(self, other):
        return self**-1.0 * other

    __radd__, __rmul__ = __add__, __mul__

    def reshape(self, *shape):
        return _traced(self.value.reshape(*shape), (self, lambda ct: ct.reshape(self.shape)))

    def sum(self, axis=None, keepdims=False):
        def back(ct):
            return np.broadcast_to(ct if keepdims or axis is None else np.expand_dims(ct, axis), self.shape)

        return _traced(self.value.sum(axis, keepdims=keepdims), (self, back))


def value(x):
    """The plain array."""
    return x.value if isinstance(x, Traced) else x


def exp(x):
    result = np.exp(value(x))
    return _traced(result, (x, lambda ct: ct * result))


def log(x):
    return _traced(np.log(value(x)), (x, lambda ct: ct / value(x)))


def concatenate(parts, axis):
    ends = np.cumsum([0, *(part.shape[axis] for part in parts)])
    cut = [
        (part, lambda ct, start=start, end=end: np.take(ct, np.arange(start, end), axis))
        for part, start, end in zip(parts, ends, ends[1:])
    ]
    return _traced(np.concatenate([value(part) for part in parts], axis), *cut)


def einsum(rule, one, other):
    """Of two arrays; every index of one stands in the other or in the result, so that the rule can be turned."""
    left, right = rule.split("->")[0].split(",")
    result = rule.split("->")[1]
    return _traced(
        np.einsum(rule, value(one), value(other), optimize=True),
        (one, lambda ct: np.einsum(f"{result},{right}->{left}", ct, value(other), optimize=True)),
        (other, lambda ct: np.einsum(f"{left},{result}->{right}", value(one), ct, optimize=True)),
    )


def backward(result, cotangent=1.0):
    """Fill `.gradient` of everything that `result` came from."""
    reached, waiting = {}, [result]
    while waiting:
        node = waiting.pop()
        if node.born not in reached:
            reached[node.born] = node
            waiting.extend(parent for parent, _ in node.parents)
    result.gradient = np.broadcast_to(np.asarray(cotangent, np.float64), result.shape)
    for born in sorted(reached, reverse=True):
        node = reached[born]
        for parent, back in node.parents:
            parent.gradient = parent.gradient + _unbroadcast(back(node.gradient), parent.shape)


def _traced(result, *parents):
    kept = [(parent, back) for parent, back in parents if isinstance(parent, Traced)]
    return Traced(result, kept) if kept else result


def _unbroadcast(cotangent, shape):
    cotangent = cotangent.sum(axis=tuple(range(cotangent.ndim - len(shape))))
    wide = tuple(axis for axis, size in enumerate(shape) if size == 1 and cotangent.shape[axis] > 1)
    return cotangent.sum(axis=wide, keepdims=True)
