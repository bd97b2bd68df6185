"""The optimiser and its state over a mesh: eight virtual devices give what one gives, and each holds its part only.

The program here has no model: its gradient is its batch, so that what is compared is the optimiser alone.
"""

from __future__ import annotations

import math
import re
import signal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Placement
from noonsight.model.families import miniature
from noonsight.model.layout import ALONE, SPECS, Layout, make_mesh
from noonsight.model.params import init_params
from noonsight.model.program import Program
from noonsight.train import checkpoint, muon, pretrain
from noonsight.train.groups import Rule, by_path, like, spec_of
from noonsight.train.optim import make_optimizer
from noonsight.train.step import init_state, make_train_step, state_shardings
from tests.model.setting import QUICK
from tests.train.test_compilation import SETTINGS
from tests.train.test_register import fails, normal, turned
from tests.train.toy import optimizer_config, pretrain_config

MODEL, NUM_STEPS = miniature(16, 2, 32), 3
TRAINING = pretrain_config(
    optimizer=optimizer_config(warmup_fraction=0.0, weight_decay=0.02),
    num_steps=NUM_STEPS,
    checkpoint_every=0,
)


class Lived(NamedTuple):
    """What a run left behind: the arrays of its last state, its measurements, the text of its executable."""

    arrays: dict[str, np.ndarray]
    measured: dict[str, list[float]]
    hlo: str


def over(**sizes: int) -> Layout:
    return Layout(make_mesh(sizes, jax.devices()[: math.prod(sizes.values())]))


EIGHT = over(replica=2, data=2, expert=2)


def make_program() -> Program:
    """All parameters of the hero family; the gradient is the batch."""

    def loss(params, extra, batch):
        products = jax.tree.map(lambda w, g: jnp.sum(w * g), params, batch)  # no vdot: it would gather to reshape
        return sum(jax.tree.leaves(products)), {"metrics": {}, "next": extra["steps"] + 1.0}

    return Program(
        lambda key: (init_params(key, MODEL), {"steps": jnp.zeros((2, 8))}),
        loss,
        lambda extra, aux: {"steps": aux["next"]},
    )


def gradients(step: int):
    shapes = jax.eval_shape(make_program().init, jax.random.key(0))[0]
    random = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: random.standard_normal(leaf.shape).astype(np.float32), shapes)


def optimizer_over(layout: Layout):
    shapes = jax.eval_shape(make_program().init, jax.random.key(0))[0]
    return make_optimizer(TRAINING.optimizer, shapes, num_steps=NUM_STEPS, layout=layout)


def shardings_over(layout: Layout):
    return state_shardings(make_program(), optimizer_over(layout), layout, host=True)


@pytest.fixture(scope="module")
def start():
    """The state before the first step, made where it shall lie."""

    def init():
        return init_state(make_program(), optimizer_over(EIGHT), jax.random.key(0))

    return jax.jit(init, out_shardings=shardings_over(EIGHT), compiler_options=QUICK)()


@pytest.fixture(scope="module", autouse=True)
def leave_jax_and_signals_alone():
    before, handler = {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS}, signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    for name, value in before.items():
        jax.config.update(f"jax_{name}", value)


def keep(out, state, step: int):
    with claim(out, "worker") as owned:
        arrays = checkpoint.to_host(state)
        return checkpoint.write(
            checkpoint.root_of(out), arrays, step=step, kind="permanent", tokens=0, claim=owned, attempt=1
        )


def live(out, start, layout: Layout, moments_on_host: bool) -> Lived:
    """Three steps of a whole run that goes on from the kept state of step 0."""
    out.mkdir()
    keep(out, start, 0)
    texts = []

    def compile_step(*arguments, made=pretrain.compile_step):
        compiled = made(*arguments)
        texts.append(compiled.as_text())
        return compiled

    with claim(out, "worker") as owned, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "compile_step", compile_step)
        pretrain.pretrain(
            TRAINING,
            lambda _: pretrain.Part(make_program(), gradients),
            out,
            owned,
            Placement(moments_on_host=moments_on_host),
            layout=layout,
        )
    measured = {name: line.values for name, line in read.metrics(out).items()}
    arrays = checkpoint.arrays(checkpoint.folder(checkpoint.root_of(out), NUM_STEPS))
    return Lived(arrays, measured, texts[0])


@pytest.fixture(scope="module")
def one(start, tmp_path_factory):
    return live(tmp_path_factory.mktemp("lived") / "one", start, ALONE, moments_on_host=False)


@pytest.fixture(scope="module")
def eight(start, tmp_path_factory):
    return live(tmp_path_factory.mktemp("lived") / "eight", start, EIGHT, moments_on_host=True)


def test_a_state_is_made_where_it_lies(start):
    for path, leaf in by_path(start.params).items():
        assert leaf.sharding.is_equivalent_to(NamedSharding(EIGHT.mesh, spec_of(path)), leaf.ndim), path
        assert leaf.sharding.memory_kind != "pinned_host", path
    expected = by_path(shardings_over(EIGHT).opt)
    moments = {path: leaf for path, leaf in by_path(start.opt).items() if leaf.ndim}
    assert {leaf.sharding.memory_kind for leaf in moments.values()} == {"pinned_host"}
    assert all(leaf.sharding == expected[path] for path, leaf in by_path(start.opt).items())
    bank = moments["inner_states.muonh.inner_state.0.trace.layers.expert_up"]
    assert bank.addressable_shards[0].data.shape == (2, 4, 4, 8), "experts over `expert`, their inputs over `data`"


def test_three_steps_on_eight_devices_are_those_of_one(start, one, eight):
    assert one.arrays.keys() == eight.arrays.keys() and int(eight.arrays["step"]) == NUM_STEPS
    before = {path: np.asarray(leaf) for path, leaf in by_path(start).items()}
    for path, expected in one.arrays.items():
        wrong = np.abs(eight.arrays[path] - expected).max() / max(np.abs(expected).max(), 1e-30)
        assert wrong <= 1e-5, (path, wrong)
        assert path.startswith("params.") <= bool((expected != before[path]).any()), f"{path} never moved"
    norms = [name for name in one.measured if name.startswith(("norm/", "ratio/", "rate/"))]
    assert {"norm/grad/muonh", "norm/param/adamh", "norm/update/adam"} <= set(norms)
    for name in norms:
        np.testing.assert_allclose(eight.measured[name], one.measured[name], rtol=1e-5, err_msg=name)


def collectives(hlo: str, kind: str) -> list[int]:
    """The number of elements of each result of one kind of collective."""
    results = re.findall(rf"= (.*?) {kind}(?:-start)?\(", hlo)
    shapes = [shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result)]
    return [math.prod(int(size) for size in shape.split(",") if size) for shape in shapes]


def test_no_device_ever_holds_a_stack_that_is_split(eight):
    shapes = {path: leaf.shape for path, leaf in by_path(gradients(0)).items()}
    split = [path for path in shapes if any(spec_of(path))]
    small = [path for path in shapes if path not in split and len(shapes[path]) == 3 and "gate." in path]
    assert small and len(split) > 10
    padded = max(4 * math.prod(shapes[path][1:]) for path in small)  # two layers among four devices
    assert padded < min(math.prod(shapes[path]) for path in split)
    assert max(collectives(eight.hlo, "all-gather")) <= padded
    assert sum(collectives(eight.hlo, "all-to-all")) > 0
    assert "replica_groups={{0,1,2,3,4,5,6,7}}" not in "".join(
        line for line in eight.hlo.splitlines() if "all-to-all" in line or "all-gather" in line
    ), "never over the racks"


def test_moments_come_one_leaf_at_a_time(start):
    """In the traced step every fetch waits for all that was computed with the moments fetched before it."""
    step = make_train_step(make_program(), optimizer_over(EIGHT), shardings_over(EIGHT))
    traced = jax.make_jaxpr(step)(start, gradients(0)).jaxpr.eqns[0].params["jaxpr"].jaxpr
    needs: dict[object, set[int]] = {}
    fetched: list[tuple[object, set[int]]] = []  # the barrier that let a leaf come, and the fetches it waits for
    barrier: dict[object, int] = {}
    for number, equation in enumerate(traced.eqns):
        inputs = [variable for variable in equation.invars if not hasattr(variable, "val")]
        above = set().union(*(needs.get(variable, set()) for variable in inputs))
        if equation.primitive.name == "optimization_barrier":
            barrier |= dict.fromkeys(equation.outvars, number)
        if equation.primitive.name == "device_put" and equation.params["devices"] == (jax.memory.Space.Device,):
            fetched.append((barrier[inputs[0]], set(above)))
            above = above | {len(fetched) - 1}
        needs |= dict.fromkeys(equation.outvars, above)
    moments = [leaf for leaf in jax.tree.leaves(start.opt) if leaf.ndim]
    assert len(fetched) == len(moments)
    for number, (gate, waited) in enumerate(fetched):
        others = {other for other in range(number) if fetched[other][0] != gate}
        assert others <= waited, f"fetch {number} does not wait for {others - waited}"


def test_a_state_kept_by_four_devices_is_the_same_on_two_and_on_one(start, tmp_path):
    four = jax.device_put(start, shardings_over(over(data=2, expert=2)))
    path = keep(tmp_path, four, 7)
    bits = {path: np.asarray(leaf) for path, leaf in by_path(start).items()}
    for layout in (over(expert=2), ALONE):
        shardings = shardings_over(layout)
        shapes = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), start, shardings
        )
        again = checkpoint.restore(path, shapes)
        for name, leaf in by_path(again).items():
            assert leaf.sharding == by_path(shardings)[name], name
            np.testing.assert_array_equal(np.asarray(leaf), bits[name], err_msg=name)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(again.opt) if leaf.ndim} == {"pinned_host"}


def test_a_mesh_that_does_not_divide_is_refused_before_anything_is_read():
    with pytest.raises(
        ValueError, match=r"the mesh data 3 does not divide \d+ parameters: layers\.wq \(2, 16, 16\): 16 over 3"
    ):
        shardings_over(over(data=3))


def test_a_parameter_without_a_place_is_named():
    assert spec_of("layers.wq") == SPECS["wq"]
    with pytest.raises(ValueError, match=r"'layers.wx' has no place on a mesh"):
        spec_of("layers.wx")


def test_norms_per_matrix_are_those_of_whole_matrices(monkeypatch):
    params = {"head": normal(1, 16, 32), "layers": {"expert_up": normal(2, 2, 8, 8, 8)}}
    grads = {"head": normal(3, 16, 32), "layers": {"expert_up": normal(4, 2, 8, 8, 8)}}
    grads["layers"]["expert_up"] *= jnp.arange(1.0, 9.0)[None, :, None, None]
    table = {"head": Rule(group="adamh"), "layers.expert_up": Rule(group="adamh", experts=True)}
    config = optimizer_config(warmup_fraction=0.0, expert_hyperball="per_matrix", epsilon=1.0)

    def placed(tree):
        return jax.device_put(
            tree, like(tree, {path: NamedSharding(EIGHT.mesh, spec_of(path)) for path in by_path(tree)})
        )

    def updates():
        optimizer = make_optimizer(config, params, num_steps=10, table=table, layout=EIGHT)
        one_step = jax.jit(lambda grads, params: optimizer.update(grads, optimizer.init(params), params, step=0)[0])
        return by_path(one_step(placed(grads), placed(params)))

    def check(got, axes):
        for path, direction in by_path(grads).items():
            direction = np.asarray(direction, np.float64)
            expected = turned(by_path(params)[path], direction / (np.abs(direction) + 1.0), 5e-2, axes[path])
            np.testing.assert_allclose(got[path], expected, rtol=1e-4, atol=1e-6, err_msg=path)

    each = {"head": (-2, -1), "layers.expert_up": (-2, -1)}
    got = updates()
    check(got, each)
    assert fails(check, got, {**each, "layers.expert_up": (-3, -2, -1)})

    whole = muon.norm
    everywhere = PartitionSpec()
    copies = jax.shard_map(lambda: jax.lax.psum(1.0, "replica"), mesh=EIGHT.mesh, in_specs=(), out_specs=everywhere)
    monkeypatch.setattr(muon, "norm", lambda x, axes: whole(x, axes) * jnp.sqrt(copies()))  # once per rack: #8073
    assert fails(check, updates(), each)
