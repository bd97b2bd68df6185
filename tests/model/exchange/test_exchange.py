"""Every transport over virtual devices: equal to the dense oracle where there is room, and where there is none equal to
an independent simulation of who is dropped, with the gradients of what is left.
"""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model.exchange import EXCHANGES, transfer
from noonsight.model.exchange.pooled import WAVES, scaled
from noonsight.model.exchange.way import Way
from tests.model.exchange.running import EXPERTS, WITH_EXPERT, Arrays, arrays, errors, expected, run, simulated
from tests.model.exchange.simulator import RULES
from tests.model.nearness import BOUNDS
from tests.model.test_register import fails

SHARDS, TOKENS = 4, 24
TIGHT = 0.7
ROOMY = arrays(SHARDS, TOKENS)


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    """Receive buffers hold NaN where nothing arrives (F5)."""
    before, transfer.FILL = transfer.FILL, float("nan")
    yield
    transfer.FILL = before


@pytest.mark.parametrize("dtype", BOUNDS)
def test_with_room_every_transport_equals_the_dense_oracle(dtype):
    names = [name for name in EXCHANGES if name != "einsum"] + [WITH_EXPERT]
    wanted = expected(ROOMY, np.ones_like(ROOMY.weights), dtype)
    for name, found in run(names, ROOMY, SHARDS, None, dtype).items():
        assert not np.any(found[1]), f"{name} dropped"
        worst = errors(found, wanted, dtype)
        assert max(worst.values()) <= BOUNDS[dtype][0], (name, worst)


def check_tight(given):
    for name, found in run(RULES, given, SHARDS, TIGHT).items():
        outcome = simulated(name, given, SHARDS, TIGHT)
        drops = np.asarray(found[1])
        np.testing.assert_array_equal(drops[:, 0], outcome.sender, err_msg=f"{name}, senders")
        np.testing.assert_array_equal(drops[:, 1], outcome.receiver, err_msg=f"{name}, receivers")
        assert drops.sum() > 0
        worst = errors(found, expected(given, outcome.kept), "float32")
        assert max(worst.values()) <= BOUNDS["float32"][0], (name, worst)


@pytest.mark.parametrize("seed", range(6))
def test_without_room_exactly_the_simulated_assignments_are_dropped(seed):
    check_tight(arrays(SHARDS, TOKENS, seed, lean=seed / 2))


def test_weights_that_act_where_the_expert_is_have_the_same_gradients():
    """Those of dropped rows included: 0."""
    given = arrays(SHARDS, TOKENS, lean=1.0)
    for name, found in run(("ragged", "waterfill"), given, SHARDS, TIGHT, weigh="expert").items():
        worst = errors(found, expected(given, simulated(name, given, SHARDS, TIGHT).kept), "float32")
        assert max(worst.values()) <= BOUNDS["float32"][0], (name, worst)


def test_one_expert_wanted_by_all_harms_no_other():
    """F12: all that can go wrong at once, the first expert full many times over."""
    given = arrays(SHARDS, TOKENS)
    given.chosen[:] = [0, 1, 7]
    check_tight(given)


def test_devices_without_a_valid_token():
    given = arrays(SHARDS, TOKENS, lean=3.0)
    given.valid[: 2 * TOKENS] = False
    check_tight(given)


# A permutation of the senders


def alike():
    """Every sender wants the same, so that nothing but its place tells it from the others."""
    one = arrays(1, TOKENS, lean=4.0)
    rows = (np.concatenate([leaf] * SHARDS) for leaf in (one.x, one.chosen, one.weights))
    return Arrays(*rows, np.ones(SHARDS * TOKENS, bool), one.banks, np.concatenate([one.cotangent] * SHARDS))


def check_fair(keep):
    """Turn by turn, senders that want the same lose the same of each expert, but for one row in each wave (F13: Marin,
    #8347).
    """
    given = alike()
    kept = keep(given).reshape(SHARDS, -1)
    assert kept.sum() < kept.size
    for expert in range(EXPERTS):
        of_senders = np.sum(kept & (given.chosen.reshape(SHARDS, -1) == expert), axis=1)
        assert of_senders.max() - of_senders.min() <= WAVES, (expert, of_senders)


def kept_by_pooled(given):
    """Which assignments count for anything: those whose weight has a gradient."""
    _, _, (_, d_weights, _) = run(RULES, given, SHARDS, TIGHT)["pooled"]
    return np.asarray(d_weights) != 0


def test_f13_pooled_waves_refuse_every_sender_alike():
    check_fair(kept_by_pooled)
    fails(check_fair, lambda given: simulated("ring", given, SHARDS, TIGHT).kept)  # in the order of the senders


def test_a_permutation_of_the_senders_changes_only_which_tokens_drop():
    given, order = arrays(SHARDS, TOKENS, lean=2.0), np.roll(np.arange(SHARDS), 1)
    rows = (order[:, None] * TOKENS + np.arange(TOKENS)).reshape(-1)
    turned = Arrays(*(leaf[rows] for leaf in given[:4]), given.banks, given.cotangent[rows])
    first, second = (run(RULES, each, SHARDS, TIGHT) for each in (given, turned))
    for name in RULES:
        before, after = (np.asarray(each[name][1]) for each in (first, second))
        np.testing.assert_array_equal(before[order, 0], after[:, 0], err_msg=name)
        np.testing.assert_array_equal(before[:, 1], after[:, 1], err_msg=name)
    check_tight(turned)


# The arithmetic


def test_a_capacity_of_a_count_known_late_is_exact_where_int32_is_short():
    for factor in (1.15, 1.0, 0.7):
        for number in (0, 1, 19, 20, 21, 524_288, 2**30):
            exact = -(-Fraction(str(factor)) * number // 192)
            assert int(scaled(factor, jnp.int32(number), 192)) == exact


def test_a_header_cannot_number_256_experts():
    banks = tuple(jnp.zeros((256, *shape)) for shape in ((4, 4), (4, 4), (4, 4)))
    chosen, one = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1))
    with pytest.raises(ValueError, match=r"from 1 to 255, and there are 256.*more devices, or use exchange 'ragged'"):
        EXCHANGES["pooled"](jnp.ones((2, 4)), chosen, one, jnp.ones(2, bool), *banks, Way())
