"""Exchanges over virtual devices, beside the dense oracle on one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from noonsight.model.exchange import EXCHANGES, Way
from tests.model.exchange.simulator import RULES
from tests.model.nearness import relative_error
from tests.model.setting import compiled

EXPERTS, PER_TOKEN, LATENT, INNER = 16, 3, 16, 24
SPLIT = PartitionSpec("expert")
WITH_EXPERT = "ragged, weighed by the expert"  # the other way to the gradient of the weights


class Arrays(NamedTuple):
    """What a group of devices is given, one device's rows after the other's."""

    x: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray
    valid: np.ndarray
    banks: tuple[np.ndarray, np.ndarray, np.ndarray]
    cotangent: np.ndarray


def arrays(shards, tokens, seed=0, lean=1.0):
    """Choices lean to the later experts; a tenth of the tokens are no tokens, and the last device has half as many."""
    rng, rows = np.random.default_rng(seed), shards * tokens
    liking = rng.standard_normal((rows, EXPERTS)) + lean * np.linspace(0, 1, EXPERTS)
    valid = rng.random((shards, tokens)) < 0.9
    valid[-1, ::2] &= shards == 1
    shapes = ((EXPERTS, LATENT, INNER), (EXPERTS, LATENT, INNER), (EXPERTS, INNER, LATENT))
    return Arrays(
        rng.standard_normal((rows, LATENT)),
        np.argsort(-liking, axis=1)[:, :PER_TOKEN].astype(np.int32),
        rng.uniform(0.2, 1.0, (rows, PER_TOKEN)),
        valid.reshape(-1),
        tuple(rng.standard_normal(shape) / 4 for shape in shapes),
        rng.standard_normal((rows, LATENT)),
    )


@cache
def program(names, shards, factor, dtype, remat, weigh):
    """Arrays -> {name: (y, (sender, receiver) of each device, gradients of x, weights, banks)}, one compilation."""
    mesh = Mesh(np.array(jax.devices()[:shards]), ("expert",))
    axis = "expert" if shards > 1 else None
    capacity = None if factor is None else float(factor)
    way = Way(axis=axis, shards=shards, capacity_factor=capacity, dtype=dtype, weigh=weigh)

    def over(label):
        name, _, weigh = label.partition(", weighed by the ")

        def local(x, weights, banks, chosen, valid):
            y, drops = EXCHANGES[name](x, chosen, weights, valid, *banks, replace(way, weigh=weigh) if weigh else way)
            return y, jnp.stack(drops)[None]

        kept = local if remat == "none" else jax.checkpoint(local)
        specs = (SPLIT, SPLIT, (SPLIT,) * 3, SPLIT, SPLIT)
        return jax.shard_map(kept, mesh=mesh, in_specs=specs, out_specs=(SPLIT, SPLIT), check_vma=False)

    def run(given):
        found, ints = {}, (given.chosen, given.valid)
        for name in names:
            y, pull, drops = jax.vjp(
                lambda *floats, name=name: over(name)(*floats, *ints),
                given.x,
                given.weights,
                given.banks,
                has_aux=True,
            )
            found[name] = y, drops, pull(given.cotangent)
        return found

    return compiled(run)


def run(names, given, shards, factor, dtype="float32", remat="none", weigh="token"):
    """Results of the exchanges by name."""
    return program(tuple(names), shards, factor, dtype, remat, weigh)(_cast(given, dtype))


@cache
def _oracle(dtype):
    def run(given, kept):
        def dense(x, weights, banks):
            return EXCHANGES["einsum"](x, given.chosen, weights * kept, given.valid, *banks, Way(dtype=dtype))[0]

        y, pull = jax.vjp(dense, given.x, given.weights, given.banks)
        return y, pull(given.cotangent)

    return compiled(run)


def expected(given, kept, dtype="float32"):
    """(y, gradients) of one device that has everything, when only the assignments kept[rows, A] are answered."""
    return _oracle(dtype)(_cast(given, dtype), jnp.asarray(kept.reshape(given.weights.shape), dtype))


def simulated(name, given, shards, factor):
    """The simulation of an exchange, with the same arrays."""
    shape = (shards, len(given.x) // shards)
    chosen = given.chosen.reshape(*shape, PER_TOKEN)
    return RULES[name](chosen, given.valid.reshape(shape), EXPERTS // shards, Fraction(str(factor)))


def errors(found, wanted, dtype):
    """Relative errors of y and of the gradients of x, weights and the three banks."""
    (y, _, slopes), (true_y, true_slopes) = found, wanted
    names = ("y", "x", "weights", "gate", "up", "down")
    pairs = zip(names, jax.tree.leaves((y, slopes)), jax.tree.leaves((true_y, true_slopes)), strict=True)
    return {name: relative_error(one, other, dtype) for name, one, other in pairs}


def _cast(given, dtype):
    def cast(leaf):
        return jnp.asarray(leaf, dtype if leaf.dtype == np.float64 else leaf.dtype)

    return Arrays(*jax.tree.map(cast, tuple(given)))
