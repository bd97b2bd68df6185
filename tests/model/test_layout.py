"""A mesh computes what one device computes, asks for what it needs and no more, and refuses what it cannot hold.

The whole product of meshes, accumulation and rematerialisation is measured in proofs/layout_matrix.py; here each of
its values stands at least once, beside the others (replicated, FSDP and expert arrays are in each).
"""

from __future__ import annotations

import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from noonsight.model import attention
from noonsight.model.exchange import EXCHANGES, Drops
from noonsight.model.layout import ALONE, TOKENS
from noonsight.model.moe import histogram_beta, moe, topk_beta
from noonsight.model.transformer import dropless, make_program, token_losses
from tests.model.nearness import BOUNDS, SLACK, close, precision_of
from tests.model.reference import layer_of
from tests.model.setting import PRECISIONS, compiled, shaken_params
from tests.model.spread import alone, arrays_of, documents, errors, over, small_config, spread
from tests.model.test_register import fails

ROWS = 8
CONFIG = small_config()
PARAMS, EXTRA = arrays_of(CONFIG)
BATCH = documents(CONFIG, ROWS)
# name: (mesh, model, batches that are accumulated)
CASES = {
    "dp": ({"replica": 2, "data": 2, "expert": 2}, small_config(remat="block"), 1),
    "context": ({"expert": 2, "context": 4}, small_config(remat="offload", balance="topk"), 2),
    "bfloat16": ({"data": 2, "expert": 2, "context": 2}, small_config(remat="block", **PRECISIONS["bfloat16"]), 1),
}


def found_in(case):
    sizes, config, accumulation = CASES[case]
    return spread(config, over(**sizes), ROWS, accumulation)


def expected_in(case):
    """Of one device; what is recomputed and how the load is balanced change neither loss nor gradients."""
    config = CASES[case][1]
    return alone(replace(config, remat="none", balance="histogram" if config.is_moe else "none"), ROWS)


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_computes_what_one_device_does(case):
    _, config, accumulation = CASES[case]
    found, expected = found_in(case), expected_in(case)
    worst = errors(found, expected, config, accumulation)
    precision = precision_of(config)
    bound = SLACK[precision] * BOUNDS[precision][0]
    assert {name: error for name, error in worst.items() if not error <= bound} == {}
    if config.balance == "histogram" and accumulation == 1 and precision == "float32":
        pending, true = (np.asarray(one[0][1]["next"]["pending_beta"]) for one in (found, expected))
        assert np.abs(pending - true).max() < 1e-3  # a margin on the edge of a bin may fall to its other side


def test_gradients_lie_where_their_parameters_do():
    gradient = found_in("dp")[1].layers
    of_device = {
        name: getattr(gradient, name).addressable_shards[0].data.shape for name in ("wq", "expert_up", "router")
    }
    assert of_device == {"wq": (3, 8, 32), "expert_up": (3, 4, 8, 16), "router": (3, 32, 8)}


def test_evaluation_over_a_mesh_sees_the_losses_of_training():
    """Pending bias and cast included (F17)."""
    layout = over(data=2, expert=2, context=2)
    losses = compiled(lambda params, extra, batch: token_losses(params, extra, batch, CONFIG, layout))(
        PARAMS, EXTRA, BATCH
    )
    mean = jnp.sum(losses * BATCH.weights) / BATCH.weights.sum()
    close(mean, alone(CONFIG, ROWS)[0][1]["metrics"]["cross_entropy"], "float32")
    assert (losses[:, -1] == 0).all() and (losses[:-1, :-1] > 0).all()


# F1: the norm of an array that is split (Marin, #8073)


def check_norm(norm):
    gradient, true = found_in("dp")[1], alone(CONFIG, ROWS)[1]
    size = np.sqrt(sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in jax.tree.leaves(true)))
    assert abs(float(norm(gradient)) / size - 1) < 1e-5


def squares(tree):
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))


def norm_of_every_part(tree):
    """Adds what is replicated once for each device."""
    layout = over(**CASES["dp"][0])
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
    parts = jax.shard_map(
        lambda tree: layout.total(squares(tree)),
        mesh=layout.mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jnp.sqrt(parts(tree))


def test_f1_the_norm_of_a_split_array_is_that_of_the_whole():
    check_norm(lambda tree: jnp.sqrt(squares(tree)))
    fails(check_norm, norm_of_every_part)


# What travels


def equations(jaxpr):
    """Every equation of a program, inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_parameters_travel_in_the_compute_dtype_and_no_cast_copy_of_the_tree_is_made():
    config = small_config(remat="block", **PRECISIONS["bfloat16"])
    loss = make_program(config, over(data=2, expert=2)).loss
    made = jax.make_jaxpr(jax.grad(lambda params: loss(params, EXTRA, BATCH)[0]))(PARAMS)
    every = list(equations(made.jaxpr))

    def results(*names):
        found = [
            variable.aval for equation in every if equation.primitive.name in names for variable in equation.outvars
        ]
        return [aval for aval in found if jnp.issubdtype(aval.dtype, jnp.floating)]

    gathered, scattered = results("all_gather"), results("reduce_scatter")
    assert (32, 32) in {aval.shape for aval in gathered} and (8, 32) in {aval.shape for aval in scattered}
    assert all(aval.dtype == jnp.bfloat16 for aval in gathered + scattered)
    assert all(aval.dtype == jnp.float32 for aval in made.out_avals)
    stacked = {(3, 8, 32), (3, 4, 8, 16), (3, 32, 32), (3, 8, 16, 16)}  # wq and expert_gate, their parts and the whole
    assert not [
        aval for aval in results("convert_element_type") if aval.shape in stacked and aval.dtype == jnp.bfloat16
    ]


def test_one_device_has_no_collective():
    made = jax.make_jaxpr(make_program(CONFIG).loss)(PARAMS, EXTRA, BATCH)
    names = {equation.primitive.name for equation in equations(made.jaxpr)}
    assert not names & {"psum", "all_gather", "ppermute", "pmin", "pmax", "shard_map"}


# Attention of a part of the sequence

LENGTH, PART = 320, 40  # neither is a multiple of the block


@pytest.fixture(scope="module")
def line():
    """Queries, keys, values, and their lower bounds: documents of some 60 tokens, windows of 70."""
    rng = np.random.default_rng(0)
    segments = jnp.asarray(np.cumsum(rng.random((2, LENGTH)) < 1 / 60, axis=1), jnp.int32)
    arrays = tuple(jnp.asarray(rng.standard_normal((2, LENGTH, n, 8)), jnp.float32) for n in (4, 2, 2))
    return *arrays, attention.lower_bounds(segments, 70)


@compiled
def attend_part(q, k, v, lower, start):
    def part(q, k, v):
        mine, bounds = (jax.lax.dynamic_slice_in_dim(x, start, PART, axis=1) for x in (q, lower))
        out = attention.attend(mine, k, v, bounds, "float32", start)
        return jnp.sum(jnp.sin(out)), out

    (_, out), slopes = jax.value_and_grad(part, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, slopes


def test_parts_of_the_queries_are_attention_of_the_whole(line):
    q, k, v, lower = line

    def whole(q, k, v):
        out = attention.attend(q, k, v, lower)
        return jnp.sum(jnp.sin(out)), out

    (_, expected), expected_slopes = compiled(jax.value_and_grad(whole, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    parts = [attend_part(*line, jnp.int32(start)) for start in range(0, LENGTH, PART)]
    close(jnp.concatenate([out for out, _ in parts], axis=1), expected, "float32")
    for found, wanted in zip(jax.tree.map(lambda *each: sum(each), *(slopes for _, slopes in parts)), expected_slopes):
        close(found, wanted, "float32")


def test_blocks_that_no_query_of_the_part_sees_are_not_read(line):
    q, k, v, lower = line
    start = 160
    first, last = int(lower[:, start : start + PART].min()), start + PART - 1
    outside = np.arange(LENGTH) // attention.BLOCK
    outside = (outside < first // attention.BLOCK) | (outside > last // attention.BLOCK)
    assert outside[: attention.BLOCK].all() and outside[-1]
    poisoned = [jnp.where(jnp.asarray(outside)[None, :, None, None], jnp.nan, x) for x in (k, v)]
    out, (dq, dk, dv) = attend_part(q, *poisoned, lower, jnp.int32(start))
    np.testing.assert_array_equal(out, attend_part(*line, jnp.int32(start))[0])
    assert all(np.isfinite(slope).all() for slope in (dq, dk, dv))


# Quantiles and drops of all devices


@pytest.mark.parametrize(
    "estimate",
    [lambda margins, valid, rank, layout: histogram_beta(margins, valid, rank, 10_000, layout), topk_beta],
    ids=["histogram", "topk"],
)
def test_quantiles_are_those_of_the_global_batch(estimate):
    """To the bit, with a device that has no valid token."""
    rng = np.random.default_rng(0)
    margins = jnp.asarray(rng.standard_normal((64, 5)) * rng.uniform(0.2, 3, (64, 1)), jnp.float32)
    valid = jnp.asarray((rng.random(64) < 0.7) & (np.arange(64) >= 8))
    rank, layout, split = valid.sum() * 0.4, over(replica=2, data=2, context=2), PartitionSpec(TOKENS)
    local = jax.shard_map(
        lambda margins, valid: estimate(margins, valid, rank, layout),
        mesh=layout.mesh,
        in_specs=(split, split),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    alone = jax.jit(lambda margins, valid: estimate(margins, valid, rank, ALONE))
    np.testing.assert_array_equal(jax.jit(local)(margins, valid), alone(margins, valid))


def test_f11_drops_of_all_devices_do_not_overflow(monkeypatch):
    most = jnp.int32(2**31 - 1)
    monkeypatch.setitem(EXCHANGES, "sorted", lambda x, *_: (jnp.zeros_like(x), Drops(most, most)))
    layout, layer = over(data=2), layer_of(shaken_params(CONFIG).layers, 0)
    rows = jnp.ones((2, 4, CONFIG.width))

    def rates(rows):
        _, found = moe(rows, jnp.ones(rows.shape[:2], bool), layer, CONFIG, layout)
        return jnp.stack([found.sender_drop_rate, found.receiver_drop_rate]), layout.total(most)

    split = PartitionSpec("data")
    over_two = jax.shard_map(rates, mesh=layout.mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False)
    found, narrow = jax.jit(over_two)(rows)
    np.testing.assert_allclose(found, 2.0**32 / (8 * CONFIG.num_experts_per_token), rtol=1e-6)
    assert narrow < 0  # what an int32 would have said


def test_f8_evaluation_never_runs_a_limited_exchange():
    limited = copy.copy(CONFIG)
    for name, value in (("exchange", "ragged"), ("capacity_factor", 1.15)):
        object.__setattr__(limited, name, value)
    assert dropless(limited) == replace(CONFIG, exchange="sorted", capacity_factor=None)
    assert dropless(replace(CONFIG, exchange="einsum")).exchange == "einsum"  # it drops nothing


# Refusals

REFUSED = {
    "tensor parallel": ({"model": 2}, {}, (8, 48), "axis model has size 2.*tensor parallelism"),
    "width": (
        {"data": 3},
        {},
        (9, 48),
        r"dim 1 of layers\.wq\[3, 32, 32\] is 32, which data = 3 does not.*the width a mul",
    ),
    "experts": (
        {"expert": 8},
        {"num_experts": 12},
        (8, 48),
        r"dim 1 of layers\.expert_up\[3, 12, 16, 16\].*of experts",
    ),
    "expert width": ({"data": 4}, {"expert_width": 6}, (8, 48), r"dim 2 of layers\.expert_down\[3, 8, 6, 16\]"),
    "rows": ({"replica": 2, "data": 4}, {}, (12, 48), r"dim 0 of batch\[12, 48\].*replica x data = 8.*rows"),
    "sequence": ({"context": 5}, {}, (8, 48), r"dim 1 of batch\[8, 48\] is 48, which context = 5.*sequence length"),
    "reach": ({"context": 8}, {}, (8, 16), "context 8 leaves 2 of the 16 tokens.*reach 3 back"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mesh_cannot_hold_is_refused_with_what_to_change(case):
    sizes, changes, batch, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        over(**sizes).check(small_config(**changes), batch)


def test_a_program_refuses_before_it_is_compiled():
    with pytest.raises(ValueError, match="the mesh data 3 does not fit"):
        make_program(CONFIG, over(data=3))
    loss = make_program(CONFIG, over(data=8)).loss
    with pytest.raises(ValueError, match="number of rows of a batch a multiple of 8"):
        jax.eval_shape(loss, PARAMS, EXTRA, documents(CONFIG, 4))
    ALONE.check(CONFIG, (3, 7))
