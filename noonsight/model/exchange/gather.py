"""Data movement of exchanges whose gradients are gathers as well: no row is ever added by index.

A row that does not exist has an index past the end; it reads as 0 and nothing is written there. Scatter-adds are slow on
every platform and add in another order each time on some (Marin, #8435: gather dispatch and written-out gradients took
the exchange from 19 to 24 % of the peak).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def take(rows: Float[Array, "r Z"], index: Int[Array, "*i"]) -> Float[Array, "*i Z"]:
    """rows[index], and 0 where the index is past the end. Its own gradient would add by index: use one of those below."""
    return rows.at[index].get(mode="fill", fill_value=0)


def inverted(target: Int[Array, " i"], size: int) -> Int[Array, " n"]:
    """source[target[i]] = i for a target below `size`, len(target) where none points: i -> n turned into n -> i."""
    number = jnp.arange(len(target), dtype=jnp.int32)
    return jnp.full(size, len(target), jnp.int32).at[target].set(number, mode="drop", unique_indices=True)


@jax.custom_vjp
def permuted(rows: Float[Array, "r Z"], source: Int[Array, " i"], target: Int[Array, " r"]) -> Float[Array, "i Z"]:
    """Row i is rows[source[i]]; `target` is the way back: source[target[j]] = j where j is taken, past the end where not."""
    return take(rows, source)


permuted.defvjp(
    lambda rows, source, target: (take(rows, source), target),
    lambda target, cotangent: (take(cotangent, target), None, None),
)


@jax.custom_vjp
def dispatched(x: Float[Array, "T Z"], token: Int[Array, " i"], place: Int[Array, "T A"]) -> Float[Array, "i Z"]:
    """Row i is x[token[i]]; `place` says where each assignment of a token stands in i."""
    return take(x, token)


def _dispatched_backward(place: Array, cotangent: Array) -> tuple[Array, None, None]:
    return summed(cotangent, place), None, None


dispatched.defvjp(lambda x, token, place: (take(x, token), place), _dispatched_backward)


@jax.custom_vjp
def combined(
    rows: Float[Array, "r Z"], weights: Float[Array, "T A"], assignment: Int[Array, " r"], place: Int[Array, "T A"]
) -> Float[Array, "T Z"]:
    """Sums over a of weights[t, a] * rows[place[t, a]], float32. `assignment` (t * A + a) is what each row belongs to, T * A
    where nothing does.
    """
    return jnp.sum(take(rows, place).astype(jnp.float32) * weights.astype(jnp.float32)[..., None], axis=1)


def _combined_forward(rows, weights, assignment, place):
    return combined(rows, weights, assignment, place), (rows, weights, assignment, place)


def _combined_backward(saved, cotangent):
    rows, weights, assignment, place = saved
    scale = jnp.append(weights.reshape(-1), 0)[jnp.minimum(assignment, weights.size)]
    d_rows = take(cotangent, assignment // weights.shape[1]) * scale.astype(cotangent.dtype)[:, None]
    d_weights = jnp.sum(take(rows, place).astype(jnp.float32) * cotangent[:, None, :], axis=-1)
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype), None, None


combined.defvjp(_combined_forward, _combined_backward)


@jax.custom_vjp
def summed_back(
    rows: Float[Array, "r Z"], assignment: Int[Array, " r"], place: Int[Array, "T A"]
) -> Float[Array, "T Z"]:
    """`summed`, with the assignment of each row for the way back."""
    return summed(rows, place)


def _summed_backward(saved, cotangent):
    assignment, per_token = saved
    return take(cotangent, assignment // per_token), None, None


def _summed_forward(rows, assignment, place):
    return summed(rows, place), (assignment, place.shape[1])


summed_back.defvjp(_summed_forward, _summed_backward)


def summed(rows: Float[Array, "r Z"], place: Int[Array, "T A"]) -> Float[Array, "T Z"]:
    """The sum of the rows of each token's assignments, added in float32, in the dtype of `rows`."""
    return jnp.sum(take(rows, place).astype(jnp.float32), axis=1).astype(rows.dtype)
