"""The judge is judged: the tape's gradient of the reference loss equals the complex step's, which has no rounding."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from noonsight.model.families import delphi
from tests.model import reference, tape
from tests.model.setting import dense_config, shaken_extra, shaken_params, tiny_config

SMALL = {"sequence_length": 12, "window": 4, "global_window": 7}
BATCH = SimpleNamespace(
    tokens=np.random.default_rng(0).integers(0, 61, (2, 12)),
    segments=np.repeat([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3], 1, axis=0),
    weights=np.random.default_rng(1).random((2, 12)),
)


@pytest.mark.parametrize(
    "config",
    [tiny_config(**SMALL, z_loss_weight=0.1), dense_config(delphi(512), **SMALL, tie_embeddings=True)],
    ids=["hero", "dense"],
)
def test_the_tape_is_the_complex_step(config):
    """One direction per leaf, so no leaf's error can hide behind another's."""
    leaves, treedef = jax.tree.flatten(shaken_params(config))
    leaves = [np.asarray(leaf, np.float64) for leaf in leaves]
    pending = {name: np.asarray(x, np.float64) for name, x in shaken_extra(config).items()}.get("pending_beta")

    def loss(arrays):
        logits, _ = reference.forward(
            jax.tree.unflatten(treedef, arrays), pending, BATCH.tokens, BATCH.segments, config
        )
        return reference.loss(logits, BATCH.tokens, BATCH.weights, config.z_loss_weight)

    traced = [tape.Traced(leaf) for leaf in leaves]
    tape.backward(loss(traced))
    rng, step = np.random.default_rng(2), 1e-30
    for i, leaf in enumerate(leaves):
        direction = rng.standard_normal(leaf.shape)
        slope = loss([*leaves[:i], leaf + 1j * step * direction, *leaves[i + 1 :]]).imag / step
        size = np.sqrt((traced[i].gradient ** 2).sum())
        assert abs((traced[i].gradient * direction).sum() - slope) <= 1e-11 * max(size, 1e-12)
