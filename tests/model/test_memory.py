"""What is kept for the backward pass, and what is never made: arrays of size S x S or T x V."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model import attention
from noonsight.model.families import delphi
from noonsight.model.loss import token_cross_entropy, weighted_loss
from noonsight.model.transformer import make_program
from tests.model.setting import dense_config, packed_batch, shaken_extra, shaken_params, step_of, tiny_config

CONFIG = dense_config(delphi(512), num_layers=4)
ARRAYS = shaken_params(CONFIG), {}, packed_batch(CONFIG)


def compile_with(remat):
    return step_of(replace(CONFIG, remat=remat)).lower(*ARRAYS).compile()


@pytest.fixture(scope="module")
def whole():
    """Memory and result of the step that keeps everything."""
    step = compile_with("none")
    return step.memory_analysis().temp_size_in_bytes, step(*ARRAYS)


@pytest.mark.parametrize("remat", ["block", "offload"])
def test_remat_changes_memory_and_nothing_else(whole, remat):
    """Same loss, metrics and gradients, less than half the memory."""
    step = compile_with(remat)
    assert step.memory_analysis().temp_size_in_bytes < whole[0] / 2
    for one, two in zip(jax.tree.leaves(step(*ARRAYS)), jax.tree.leaves(whole[1]), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_offload_keeps_each_layers_input_in_host_memory_and_nothing_else():
    """The host's memory is the device's on a CPU, so the same program is lowered for a device where they differ."""
    config = replace(CONFIG, remat="offload")
    traced = step_of(config).trace(*ARRAYS)
    rows = (*ARRAYS[2].tokens.shape, config.width)
    stacked = (config.num_layers, *rows)
    found = list(arrays_of(traced.jaxpr.jaxpr))
    assert {aval.shape for aval in found if aval.memory_space == jax.memory.Space.Host} == {rows, stacked}
    assert not [aval for aval in found if aval.shape == stacked and aval.memory_space != jax.memory.Space.Host]
    assert '_xla_buffer_placement = "pinned_host"' in traced.lower(lowering_platforms=("cuda",)).as_text()


def arrays_of(jaxpr):
    """Every array that a program makes, in inner programs too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for parameter in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from arrays_of(inner)


def largest(function, x):
    """Entries of the largest array that the function and its gradient make."""
    made = jax.make_jaxpr(jax.value_and_grad(lambda x: jnp.sum(function(x))))(x)
    return max(aval.size for aval in arrays_of(made.jaxpr))


def test_attention_never_makes_all_scores():
    q, k, v = (jnp.ones((1, 1024, heads, 8)) for heads in (2, 1, 1))
    lower = attention.lower_bounds(jnp.zeros((1, 1024), jnp.int32), 1024)
    assert largest(lambda q: attention.attend(q, k, v, lower), q) <= 1024 * 1024 / 16
    assert (
        largest(lambda q: jax.nn.softmax(jnp.einsum("bqnh,bsmh->bnqs", q, k)), q) >= 1024 * 1024
    )  # the measure sees it


def test_cross_entropy_never_makes_all_logits():
    h, head = jnp.ones((2048, 4)), jnp.ones((4, 3000))
    targets, weights = jnp.zeros(2048, jnp.int32), jnp.ones(2048)
    every = 2048 * 3000
    assert largest(lambda h: weighted_loss(h, head, targets, weights, 1e-4).total, h) <= every / 4
    forward = jax.make_jaxpr(token_cross_entropy)(h, head, targets)  # evaluation; it has no gradient of its own
    assert max(aval.size for aval in arrays_of(forward.jaxpr)) <= every / 4
    assert largest(lambda h: jax.nn.logsumexp(h @ head, axis=-1), h) >= every


def test_the_whole_step_makes_neither():
    config = tiny_config(sequence_length=2048, window=512, vocab_size=4096, remat="none")
    batch = packed_batch(config, rows=1)
    loss = make_program(config).loss
    arrays = shaken_params(config), shaken_extra(config)
    made = jax.make_jaxpr(jax.grad(lambda params, extra: loss(params, extra, batch)[0]))(*arrays)
    assert max(aval.size for aval in arrays_of(made.jaxpr)) < 2048 * 2048 / 2
