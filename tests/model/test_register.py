"""The failure register of the hero run (Marin, #8435): each failure of the model has a check, and each check is run
twice: our code passes, and the same check fails on a variant that has the failure.

F1 F2 F10 F14 F22 F23   optimiser, sharded norms, restore, non-finite steps: tests/train/test_register.py
F3   loss forward and backward from different logits            test_f3_...
F4   weight gradient of ragged and empty groups                 test_f4_...
F5   rows that nobody writes                                    test_f5_...
F11  counters that overflow                                     test_f11_...
F12  a full bucket spills into its neighbour                    test_f12_...
F15  rotation by halves instead of adjacent channels            test_f15_...
F16  as many experts chosen as there are                        test_f16_...
F17  evaluation forgets the cast or the pending quantiles       test_f17_...
F13 F24                 truncation bias, hoisted receive buffers: with the expert transports (issue 4)
F6 F8 F9 F18 F19 F20 F21 F25 F26   operation of a run: tests/train (recovery, checkpoints), the rehearsal, the fleet
F7   offload that corrupts the residual: tests/train/test_first_step.py
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model import config as config_module
from noonsight.model.count import count_family
from noonsight.model.elementary import rotate, rotation
from noonsight.model.exchange import EXCHANGES, Way
from noonsight.model.loss import weighted_loss
from noonsight.model.transformer import init_extra, make_program, token_losses
from tests.model import reference, tape
from tests.model.nearness import all_close, close, wide
from tests.model.setting import compiled, packed_batch, shaken_extra, shaken_params, step_of, tiny_config

# What is judged: an implementation and its bound in `nearness`; for the loss also the dtype of its arrays.
JUDGED_EXCHANGES = {name: (EXCHANGES[name], "float32") for name in ("sorted", "einsum")}  # others: tests/model/exchange
JUDGED_EXCHANGES["sorted, bfloat16 products"] = (partial(EXCHANGES["sorted"], way=Way(dtype="bfloat16")), "bfloat16")
JUDGED_LOSSES = {
    "bfloat16 arrays": (lambda *arrays: weighted_loss(*arrays, 1e-3, "bfloat16").total, jnp.bfloat16),
    "bfloat16 products": (lambda *arrays: weighted_loss(*arrays, 1e-3, "bfloat16").total, jnp.float32),
}

SIZES = (0, 1, 7, 8, 9, 63, 64, 65)  # rows of each expert: none, one, and around the widths of a tile


def fails(check, variant):
    """The same check refuses the variant that has the failure."""
    with pytest.raises(AssertionError):
        check(variant)


def test_the_register_is_whole():
    table = __doc__.split("\n\n")[1]
    entries = [int(number) for number in re.findall(r"\bF(\d+)", table)]
    assert sorted(entries) == list(range(1, 27))
    tests = {int(number) for number in re.findall(r"test_f(\d+)_\.\.\.", table)}
    assert tests == {int(found[1]) for name in globals() if (found := re.match(r"test_f(\d+)_", name))}


# F3


def check_loss(loss, dtype=jnp.bfloat16):
    """Gradients are those of the logits that the loss was read from, large ones included, over several chunks."""
    rng = np.random.default_rng(0)
    h, head = (jnp.asarray(4 * rng.standard_normal(shape), jnp.bfloat16) for shape in ((300, 16), (16, 700)))
    targets, weights = rng.integers(0, 700, 300), rng.random(300)
    one, two = tape.Traced(wide(h)), tape.Traced(wide(head))
    logits = one @ two
    top = logits.value.max(-1, keepdims=True)
    lse = tape.log(tape.exp(logits - top).sum(-1)) + top[:, 0]
    each = lse - logits[np.arange(300), targets] + 1e-3 * lse**2
    expected = (each * weights).sum() / weights.sum()
    tape.backward(expected)
    arrays = jnp.asarray(targets, jnp.int32), jnp.asarray(weights, jnp.float32)
    total, slopes = compiled(jax.value_and_grad(lambda h, head: loss(h, head, *arrays), argnums=(0, 1)))(
        h.astype(dtype), head.astype(dtype)
    )
    close(total, expected, "float32", "loss", slack=10)
    all_close(slopes, (one, two), "bfloat16")


def loss_of_rounded_logits(h, head, targets, weights):
    """Forward on logits rounded to bfloat16, backward on float32 ones."""

    @jax.custom_vjp
    def log_sum(logits):
        return jax.nn.logsumexp(logits.astype(jnp.bfloat16).astype(jnp.float32), axis=-1)

    log_sum.defvjp(
        lambda logits: (log_sum(logits), (logits, log_sum(logits))),
        lambda saved, ct: (jnp.exp(saved[0] - saved[1][:, None]) * ct[:, None],),
    )
    logits = jnp.dot(h, head, preferred_element_type=jnp.float32)
    lse = log_sum(logits)
    return jnp.sum(weights * (lse - logits[jnp.arange(300), targets] + 1e-3 * lse**2)) / weights.sum()


@pytest.mark.parametrize("name", JUDGED_LOSSES)
def test_f3_loss_and_gradient_read_the_same_logits(name):
    check_loss(*JUDGED_LOSSES[name])


def test_f3_sees_a_loss_of_rounded_logits():
    fails(check_loss, loss_of_rounded_logits)


# F4, F5, F12: one set of arrays for every exchange


@cache
def run_of(exchange):
    """(x, weights, bank, chosen, valid, cotangent) -> y, drops, gradients of the first three."""

    def run(x, weights, bank, chosen, valid, cotangent):
        y, pull, drops = jax.vjp(lambda x, w, b: exchange(x, chosen, w, valid, *b), x, weights, bank, has_aux=True)
        return y, drops, pull(cotangent)

    return compiled(run)


def rows_for(chosen, seed=0):
    """Random rows with these choices [T, 1]; 23 more at random places are not valid."""
    rng = np.random.default_rng(seed)
    valid = rng.permutation(len(chosen) + 23) < len(chosen)
    every = rng.integers(0, len(SIZES), (len(valid), 1))
    every[valid] = rng.permutation(chosen)
    bank = tuple(rng.standard_normal((len(SIZES), *shape)) / 3 for shape in ((12, 10), (12, 10), (10, 12)))
    floats = rng.standard_normal((len(valid), 12)), rng.random((len(valid), 1)), bank
    ints = every.astype(np.int32), valid
    to_jax = partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, jnp.float32))
    return to_jax(floats), tuple(map(jnp.asarray, ints)), to_jax(rng.standard_normal((len(valid), 12)))


def check_exchange(exchange, chosen, precision="float32"):
    """Rows and every gradient are the reference's, each expert's relative to its own size; nothing is dropped."""
    floats, (every, valid), cotangent = rows_for(chosen)
    traced = jax.tree.map(tape.Traced, wide(floats))
    x, weights, bank = traced
    expected = 0.0
    for e in range(len(SIZES)):
        share = weights * ((np.asarray(every) == e) & np.asarray(valid)[:, None])
        expected = expected + share * reference.swiglu(x, *(matrices[e] for matrices in bank))
    tape.backward(expected, wide(cotangent))
    y, drops, slopes = run_of(exchange)(*floats, every, valid, cotangent)
    assert not np.any(drops)
    close(y, expected, precision, "rows")
    for found, wanted in zip(jax.tree.leaves(slopes), jax.tree.leaves(traced)):
        close(found, wanted.gradient, precision, "gradient", lead=found.ndim - 2)


RAGGED = np.repeat(np.arange(len(SIZES)), SIZES)[:, None]


def whole_tiles_only(x, chosen, weights, valid, gate, up, down):
    """Right rows, but the weight gradient leaves out what does not fill a tile of 64."""
    same = (chosen == chosen.T) & valid
    rank, size = jnp.sum(jnp.tril(same, -1), axis=1), jnp.sum(same, axis=1)
    whole = rank < size // 64 * 64
    still = jax.lax.stop_gradient((gate, up, down))
    y, _ = EXCHANGES["einsum"](x, chosen, weights, valid & whole, gate, up, down)
    rest, drops = EXCHANGES["einsum"](x, chosen, weights, valid & ~whole, *still)
    return y + rest, drops


@pytest.mark.parametrize("name", JUDGED_EXCHANGES)
def test_f4_ragged_and_empty_groups(name):
    exchange, precision = JUDGED_EXCHANGES[name]
    check_exchange(exchange, RAGGED, precision)


def test_f4_sees_a_gradient_of_whole_tiles():
    fails(lambda exchange: check_exchange(exchange, RAGGED), whole_tiles_only)


def check_written(exchange):
    """In memory full of NaN, a row that no expert writes is 0, and so is what flows back to it; all else is finite."""
    floats, (every, valid), cotangent = rows_for(RAGGED)
    jax.block_until_ready([jnp.full((len(valid), width), jnp.nan) for width in (1, 10, 12) for _ in range(50)])
    y, _, (dx, d_weights, d_bank) = run_of(exchange)(*floats, every, valid, cotangent)
    silent = ~np.asarray(valid)
    for rows in (y, dx, d_weights):
        assert (np.asarray(rows)[silent] == 0).all()
    for leaf in d_bank:
        assert (np.asarray(leaf)[SIZES.index(0)] == 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, dx, d_weights, d_bank)))


def leaves_rows_unwritten(x, chosen, weights, valid, gate, up, down):
    y, drops = EXCHANGES["einsum"](x, chosen, weights, valid, gate, up, down)
    return jnp.where(valid[:, None], y, jnp.nan), drops


@pytest.mark.parametrize("name", JUDGED_EXCHANGES)
def test_f5_every_row_is_written(name):
    check_written(JUDGED_EXCHANGES[name][0])


def test_f5_sees_an_unwritten_row():
    fails(check_written, leaves_rows_unwritten)


CROWDED = np.where(np.arange(len(RAGGED)) < 200, 2, 3)[:, None]  # nearly all choose one expert, the rest its neighbour


def buckets_without_a_sentinel(x, chosen, weights, valid, gate, up, down):
    """As many slots for each expert as the mean load; what finds no room goes to the next slot there is."""
    room = -(-len(x) // len(gate))
    hot = jax.nn.one_hot(jnp.where(valid, chosen[:, 0], len(gate)), len(gate), dtype=jnp.int32)
    slot = chosen[:, 0] * room + jnp.sum(hot * (jnp.cumsum(hot, axis=0) - 1), axis=1)
    slot = jnp.clip(slot, 0, len(gate) * room - 1)
    rows = jnp.zeros((len(gate) * room, x.shape[1])).at[slot].set(x * valid[:, None]).reshape(len(gate), room, -1)
    hidden = jax.nn.silu(jnp.einsum("ecz,ezf->ecf", rows, gate)) * jnp.einsum("ecz,ezf->ecf", rows, up)
    out = jnp.einsum("ecf,efz->ecz", hidden, down).reshape(-1, x.shape[1])
    return out[slot] * weights * valid[:, None], jnp.int32(0)


@pytest.mark.parametrize("name", JUDGED_EXCHANGES)
def test_f12_a_crowded_expert_harms_no_neighbour(name):
    exchange, precision = JUDGED_EXCHANGES[name]
    check_exchange(exchange, CROWDED, precision)


def test_f12_sees_a_bucket_that_spills():
    fails(lambda exchange: check_exchange(exchange, CROWDED), buckets_without_a_sentinel)


# F11


def check_counters(program):
    """No whole number lives on the device from step to step, and the host's totals of the hero are exact."""
    config = tiny_config()
    params, extra = shaken_params(config), shaken_extra(config)
    _, aux = jax.eval_shape(program.loss, params, extra, packed_batch(config))
    carried = jax.eval_shape(program.after_step, extra, aux)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((carried, aux)))


def test_f11_no_counter_can_overflow():
    program = make_program(tiny_config())
    check_counters(program)

    def counts_tokens(extra, aux):
        return program.after_step(extra, aux) | {"tokens": jnp.int32(0) + 46_137_344}

    fails(check_counters, program._replace(after_step=counts_tokens))


def check_total(multiply):
    assert (
        multiply(390_251, count_family("hero")["batch_tokens"]) == count_family("hero")["tokens"] == 18_005_144_633_344
    )


def test_f11_the_total_of_the_hero_is_exact():
    check_total(lambda steps, tokens: steps * tokens)
    with np.errstate(over="ignore"):
        fails(check_total, lambda steps, tokens: int(np.int32(steps) * np.int32(tokens)))


# F15


def by_halves(x, angles):
    """The other convention: channel p turns with channel p + h."""
    pairs = angles.shape[-1]
    cos, sin = angles[..., None, 0, :], angles[..., None, 1, :]
    low, high, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def check_rotation(turn):
    """Golden: position 1 turns the pair (1, 0) by one radian, the pair (0, 1) of the slowest frequency by
    theta^(-1/2). And an engine that turns by halves agrees once channels 0, 2, ... 1, 3, ... come in this order.
    """
    angles = rotation(jnp.array([1]), 4, 10_000.0)
    turned = np.asarray(turn(jnp.array([[[1.0, 0.0, 0.0, 1.0, 5.0, 6.0]]]), angles))[0, 0]
    assert np.allclose(turned, [0.540302, 0.841471, -0.0099998, 0.99995, 5.0, 6.0], rtol=1e-5)
    x = np.random.default_rng(0).standard_normal((3, 2, 12)).astype(np.float32)
    angles, order = rotation(jnp.array([0, 5, 4095]), 8, 10_000.0), np.array([0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11])
    assert np.allclose(turn(x, angles)[..., order], by_halves(x[..., order], angles), atol=1e-6)


def test_f15_rotation_turns_adjacent_channels():
    check_rotation(compiled(rotate))
    fails(check_rotation, by_halves)


# F16


def check_refused(change):
    refused = False
    try:
        change(num_experts_per_token=8)
    except ValueError as error:
        refused = "must be smaller" in str(error)
    assert refused


def test_f16_all_experts_cannot_be_chosen(monkeypatch):
    change = partial(replace, tiny_config())
    check_refused(change)
    monkeypatch.setattr(config_module, "_check_experts", lambda config: None)
    fails(check_refused, change)


# F17


def check_evaluation(losses):
    """The losses of evaluation average to the training loss of the same state, in bfloat16 and with pending
    quantiles.
    """
    config = tiny_config(compute_dtype="bfloat16", matmul_dtype="bfloat16")
    params, extra, batch = shaken_params(config), shaken_extra(config), packed_batch(config)
    trained = step_of(config)(params, extra, batch)[0][1]["metrics"]["cross_entropy"]
    found = compiled(lambda params, extra: losses(params, extra, batch, config))(params, extra)
    assert abs(jnp.sum(found * batch.weights) / batch.weights.sum() - trained) < 1e-5


def test_f17_evaluation_computes_with_what_training_does():
    check_evaluation(token_losses)
    fails(
        check_evaluation, lambda params, extra, batch, config: token_losses(params, init_extra(config), batch, config)
    )
    uncast = {"compute_dtype": "float32", "matmul_dtype": "float32"}
    fails(
        check_evaluation,
        lambda params, extra, batch, config: token_losses(params, extra, batch, replace(config, **uncast)),
    )
