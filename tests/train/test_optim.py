"""The optimiser against the specification: groups, Newton-Schulz, hyperball, Adam, weight decay, sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from noonsight.model.layout import SPECS, make_mesh
from noonsight.train import muon
from noonsight.train.groups import HERO_TABLE, Rule, by_path, describe, group_of, like, rules_of
from noonsight.train.muon import hyperball, newton_schulz
from noonsight.train.optim import make_optimizer
from tests.train.toy import optimizer_config


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def singular_values(matrix):
    return np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)


def with_singular_values(values, rows, columns):
    left = np.linalg.qr(np.random.default_rng(1).standard_normal((rows, rows)))[0]
    right = np.linalg.qr(np.random.default_rng(2).standard_normal((columns, columns)))[0]
    middle = np.zeros((rows, columns))
    np.fill_diagonal(middle, values)
    return jnp.asarray(left @ middle @ right.T, jnp.float32)


def compose(triples, x):
    for a, b, c in triples:
        x = a * x + b * x**3 + c * x**5
    return x


def test_the_triples_in_order_map_singular_values_near_one_and_reversed_do_not():
    x = np.linspace(0.01, 1, 20001)
    image = compose(muon.NEWTON_SCHULZ_TRIPLES, x)
    assert (image.min(), image.max()) == pytest.approx((0.978, 1.032), abs=1e-3)
    small = compose(muon.NEWTON_SCHULZ_TRIPLES, np.linspace(0.005, 1, 20001))
    assert (small.min(), small.max()) == pytest.approx((0.978, 1.112), abs=1e-3)
    reverse = compose(muon.NEWTON_SCHULZ_TRIPLES[::-1], x)
    assert (reverse.min(), reverse.max()) == pytest.approx((0.027, 1.273), abs=1e-3)


def test_newton_schulz_applies_the_triples_in_that_order():
    values = np.geomspace(1, 0.02, 8)
    given = values / np.linalg.norm(values)  # what it starts from: each matrix is divided by its own norm
    matrix = with_singular_values(3.0 * values, 8, 12)
    got = singular_values(newton_schulz(matrix, "float32"))
    np.testing.assert_allclose(np.sort(got), np.sort(compose(muon.NEWTON_SCHULZ_TRIPLES, given)), rtol=2e-4)
    assert np.abs(np.sort(got) - np.sort(compose(muon.NEWTON_SCHULZ_TRIPLES[::-1], given))).max() > 0.2


def test_newton_schulz_in_bfloat16_is_still_nearly_orthogonal():
    got = singular_values(newton_schulz(normal(0, 24, 16), "bfloat16"))
    assert got.min() > 0.9 and got.max() < 1.12


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 5, 4)])
def test_newton_schulz_treats_every_matrix_of_a_stack_alone(shape):
    stacked = normal(0, *shape) * jnp.arange(1, shape[0] + 1).reshape(-1, *[1] * (len(shape) - 1))
    together = np.asarray(newton_schulz(stacked, "float32")).reshape(-1, *shape[-2:])
    alone = jax.jit(lambda matrix: newton_schulz(matrix, "float32"))
    for matrix, got in zip(stacked.reshape(-1, *shape[-2:]), together):
        np.testing.assert_allclose(got, alone(matrix), atol=1e-5)


def test_newton_schulz_of_zero_is_zero():
    assert not np.asarray(newton_schulz(jnp.zeros((3, 4)))).any()


def test_hyperball_turns_by_the_rate_and_keeps_the_norm():
    weight, direction = normal(0, 6, 5), normal(1, 6, 5)
    after = np.asarray(weight + hyperball(weight, direction, 0.1, axes=(-2, -1)), np.float64)
    w, u = np.asarray(weight, np.float64), np.asarray(direction, np.float64)
    moved = w - 0.1 * u * np.linalg.norm(w) / np.linalg.norm(u)
    np.testing.assert_allclose(after, moved * np.linalg.norm(w) / np.linalg.norm(moved), rtol=1e-5)


def test_pooled_norm_spans_the_experts_of_a_layer_and_per_matrix_does_not():
    weight, direction = normal(0, 2, 3, 4, 5), normal(1, 2, 3, 4, 5)
    direction = direction * jnp.array([1.0, 2.0, 5.0])[None, :, None, None]
    pooled = weight + hyperball(weight, direction, 0.3, axes=(-3, -2, -1))
    single = weight + hyperball(weight, direction, 0.3, axes=(-2, -1))

    def norms(x, axes):
        return np.sqrt(np.sum(np.square(np.asarray(x, np.float64)), axis=axes))

    np.testing.assert_allclose(norms(pooled, (1, 2, 3)), norms(weight, (1, 2, 3)), rtol=1e-6)
    assert np.abs(norms(pooled, (2, 3)) / norms(weight, (2, 3)) - 1).max() > 0.01
    np.testing.assert_allclose(norms(single, (2, 3)), norms(weight, (2, 3)), rtol=1e-6)
    assert np.abs(np.asarray(pooled - single)).max() > 0.01


def test_a_zero_direction_moves_nothing_at_all():
    weight = normal(0, 2, 4, 4)
    direction = normal(1, 2, 4, 4).at[1].set(0.0)
    update = np.asarray(hyperball(weight, direction, 0.1, axes=(-2, -1)))
    assert update[0].any() and not update[1].any()


def hero_like(seed=0):
    shapes = {"embed": (12, 8), "embed_norm": (8,), "embed_gate": {"down": (8, 2), "up": (2, 8)}, "head": (8, 12)}
    layers = {"wq": (2, 8, 8), "head_gate": (2, 8, 2), "sconv_k": (2, 4, 8), "router": (2, 8, 4), "router_bias": (2, 4)}
    layers |= {"expert_up": (2, 4, 4, 6), "shared_up": (2, 2, 8, 4), "moe_norm": (2, 8)}
    keys = iter(range(seed, seed + 99))
    is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: normal(next(keys), *shape), {**shapes, "layers": layers}, is_leaf=is_shape)


def test_groups_are_by_exact_path():
    groups = make_optimizer(optimizer_config(), hero_like(), num_steps=10).groups
    expected = {
        "embed": "adam",
        "embed_norm": "adam",
        "embed_gate.down": "muonh",
        "head": "adamh",
        "layers.head_gate": "adam",
    }
    expected |= {"layers.wq": "muonh", "layers.router": "adam", "layers.router_bias": "adam", "layers.sconv_k": "adam"}
    assert expected.items() <= groups.items()
    assert list(groups) == list(by_path(hero_like()))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"embed_nrm": jnp.ones((3,))}, "did you mean 'embed_norm'"),
        ({"head": jnp.ones((3,))}, "turns matrices"),
        ({"embed": jnp.ones((3, 3), jnp.bfloat16)}, "float32 masters"),
    ],
)
def test_a_leaf_that_does_not_fit_the_table_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(optimizer_config(), params, num_steps=10)


@pytest.mark.parametrize(
    ("path", "shape", "rule", "message"),
    [
        ("attn_norm", (2, 8), Rule(group="muonh"), "of every layer, but this leaf is a vector"),
        ("attn_norm", (2, 8), Rule(group="adamh"), "this leaf is a vector"),
        ("wq", (2, 8, 8), Rule(group="muonh", experts=True), "has no dim of experts"),
    ],
)
def test_a_rule_that_turns_matrices_meets_no_stack_of_vectors(path, shape, rule, message):
    leaves = {"layers": {path: jnp.ones(shape)}}
    assert rules_of(leaves)  # as the hero treats it
    with pytest.raises(ValueError, match=message):
        rules_of(leaves, {**HERO_TABLE, f"layers.{path}": rule})


def test_an_unknown_kind_has_no_groups():
    assert [group_of(Rule(group="muonh"), kind) for kind in ("muonh", "adamw", "muon")] == ["muonh", "adamw", "muon"]
    with pytest.raises(ValueError, match="no optimiser of kind 'sgd'; use muonh"):
        group_of(Rule(group="muonh"), "sgd")


def run_steps(optimizer, params, num_steps, grad=lambda params, step: hero_like(1000 + step)):
    @jax.jit
    def one(params, state, grads, step):
        updates, state = optimizer.update(grads, state, params, step=step)
        return jax.tree.map(jnp.add, params, updates), state

    state = optimizer.init(params)
    for step in range(num_steps):
        params, state = one(params, state, grad(params, step), jnp.int32(step))
    return params, state


def test_one_step_equals_the_equations_in_float64():
    params, grads = hero_like(), hero_like(500)
    config = optimizer_config(warmup_fraction=0.0, epsilon=1e-3, weight_decay=0.02)
    optimizer = make_optimizer(config, params, num_steps=10)
    update = jax.jit(optimizer.update)
    _, state = update(grads, optimizer.init(params), params, step=jnp.int32(0))
    updates, _ = update(grads, state, params, step=jnp.int32(1))
    share = 1 - 0.95 * 1 / 10
    decay = 0.02 * (1 - 1 / 10)

    def adam(path, count):
        g = np.asarray(by_path(grads)[path], np.float64)
        mu = sum(0.9**k * 0.1 * g for k in range(count)) / (1 - 0.9**count)
        nu = sum(0.95**k * 0.05 * g * g for k in range(count)) / (1 - 0.95**count)
        return mu / (np.sqrt(nu) + 1e-3)

    weight = {path: np.asarray(leaf, np.float64) for path, leaf in by_path(params).items()}
    got = by_path(updates)
    np.testing.assert_allclose(got["embed"], -config.adam_lr * share * adam("embed", 2), rtol=2e-4)
    expected = -config.adam_lr * share * (adam("layers.router", 2) + decay * weight["layers.router"])
    np.testing.assert_allclose(got["layers.router"], expected, rtol=2e-4)
    direction = adam("head", 2)
    radius = np.linalg.norm(weight["head"])
    moved = weight["head"] - config.matrix_lr * share * direction * radius / np.linalg.norm(direction)
    np.testing.assert_allclose(
        got["head"], moved * radius / np.linalg.norm(moved) - weight["head"], rtol=1e-3, atol=1e-6
    )
    g = np.asarray(by_path(grads)["layers.wq"], np.float64)
    momentum = 0.95 * g + g
    direction = np.asarray(newton_schulz(jnp.asarray(g + 0.95 * momentum, jnp.float32), "float32"), np.float64)
    for layer in range(2):
        w, u = weight["layers.wq"][layer], direction[layer]
        moved = w - config.matrix_lr * share * u * np.linalg.norm(w) / np.linalg.norm(u)
        expected = moved * np.linalg.norm(w) / np.linalg.norm(moved) - w
        np.testing.assert_allclose(got["layers.wq"][layer], expected, rtol=1e-3, atol=1e-6)


def test_router_bias_has_no_gradient_and_stays():
    params = hero_like()

    def grad(params, step):
        grads = hero_like(1000 + step)
        grads["layers"]["router_bias"] = jnp.zeros((2, 4))
        return grads

    after, _ = run_steps(make_optimizer(optimizer_config(epsilon=1e-15), params, num_steps=5), params, 5, grad)
    np.testing.assert_array_equal(after["layers"]["router_bias"], params["layers"]["router_bias"])


def test_adamw_equals_optax():
    import optax

    params = hero_like()
    config = optimizer_config(kind="adamw", adam_lr=0.01, weight_decay=0.1, warmup_fraction=0.0, min_lr_fraction=1.0)
    optimizer = make_optimizer(config, params, num_steps=5)
    mask = {path: group == "adamw" for path, group in optimizer.groups.items()}
    theirs = optax.adamw(0.01, b1=0.9, b2=0.95, eps=config.epsilon, weight_decay=0.1, mask=like(params, mask))
    state, expected, update = theirs.init(params), params, jax.jit(theirs.update)
    for step in range(5):
        updates, state = update(hero_like(1000 + step), state, expected)
        expected = optax.apply_updates(expected, updates)
    after, _ = run_steps(optimizer, params, 5)
    for path, leaf in by_path(after).items():
        np.testing.assert_allclose(leaf, by_path(expected)[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_eight_devices_laid_out_give_the_update_of_one():
    params, grads = hero_like(), hero_like(500)
    optimizer = make_optimizer(optimizer_config(warmup_fraction=0.0), params, num_steps=10)
    state = optimizer.init(params)
    update = jax.jit(lambda g, s, p: optimizer.update(g, s, p, step=jnp.int32(3))[0])
    mesh = make_mesh({"data": 2, "expert": 4}, jax.devices()[:8])

    def placed(tree):
        return jax.device_put(
            tree, like(tree, {path: NamedSharding(mesh, SPECS[path.removeprefix("layers.")]) for path in by_path(tree)})
        )

    one, many = update(grads, state, params), update(placed(grads), state, placed(params))
    assert len(by_path(many)["layers.expert_up"].sharding.device_set) == 8
    for path, leaf in by_path(one).items():
        np.testing.assert_allclose(by_path(many)[path], leaf, rtol=1e-4, atol=1e-6, err_msg=path)


def test_plain_muon_equals_optax_where_both_mean_the_same():
    """At the first step Jordan's Nesterov sum and optax's bias-corrected average point the same way; later steps with
    the momentum alone.
    """
    import optax

    params = {"tall": normal(1, 2, 12, 6), "wide": normal(2, 2, 5, 9), "rest": normal(3, 7, 4)}
    table = {"tall": Rule(group="muonh"), "wide": Rule(group="muonh"), "rest": Rule(group="adam")}
    config = optimizer_config(kind="muon", matrix_lr=0.1, weight_decay=0.3, warmup_fraction=0.0, min_lr_fraction=1.0)
    optimizer = make_optimizer(config, params, num_steps=5, table=table)
    assert optimizer.groups == {"tall": "muon", "wide": "muon", "rest": "adam"}
    stacked = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    theirs = optax.contrib.muon(
        0.1,
        ns_coeffs=muon.NEWTON_SCHULZ_TRIPLES,
        beta=config.momentum,
        weight_decay=0.3,
        weight_decay_mask={"tall": True, "wide": True, "rest": False},
        adam_learning_rate=config.adam_lr,
        adam_b2=config.beta2,
        muon_weight_dimension_numbers={"tall": stacked, "wide": stacked, "rest": None},
    )
    grads = {path: normal(10, *leaf.shape) for path, leaf in params.items()}
    got = optimizer.update(grads, optimizer.init(params), params, step=jnp.int32(0))[0]
    expected = theirs.update(grads, theirs.init(params), params)[0]
    for path in ("tall", "wide"):  # optax gives the rest to Adam with Nesterov, Jordan and we to Adam
        np.testing.assert_allclose(got[path], expected[path], rtol=1e-4, atol=1e-5, err_msg=path)

    summed = optax.trace(config.momentum)
    averaged = optax.contrib.scale_by_muon(
        muon.NEWTON_SCHULZ_TRIPLES, beta=config.momentum, nesterov=False, weight_dimension_numbers={"wide": stacked}
    )
    one, two = summed.init({"wide": params["wide"]}), averaged.init({"wide": params["wide"]})
    for step in range(4):
        grads = {"wide": normal(step, 2, 5, 9)}
        momentum, one = summed.update(grads, one)
        direction, two = averaged.update(grads, two)
        np.testing.assert_allclose(newton_schulz(momentum["wide"], "float32"), direction["wide"], atol=2e-5)


def test_the_groups_of_a_run_as_a_table():
    told = describe(optimizer_config(weight_decay=0.02), jax.eval_shape(hero_like))
    rows = {row[0]: row[1:] for row in told["rows"]}
    assert rows["layers.expert_up"] == ["2x4x4x6", "muonh", "kept over 4 experts", "no", 5e-2]
    assert rows["head"] == ["8x12", "adamh", "kept per matrix", "no", 5e-2]
    assert rows["layers.router"] == ["2x8x4", "adam", "free", "yes", 1e-2]
    assert list(rows) == list(by_path(hero_like())) and all(len(row) == len(told["columns"]) for row in told["rows"])
    adamw = {row[0]: row[1:] for row in describe(optimizer_config(kind="adamw", weight_decay=0.1), hero_like())["rows"]}
    assert adamw["layers.wq"][1:] == ["adamw", "free", "yes", 1e-2]
    assert adamw["embed"][1:] == ["adam", "free", "no", 1e-2]


def test_own_table():
    optimizer = make_optimizer(
        optimizer_config(), {"x": jnp.ones((2, 2))}, num_steps=3, table={"x": Rule(group="adamh")}
    )
    assert optimizer.groups == {"x": "adamh"}
