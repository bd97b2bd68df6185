"""The loop in one process: order of the hooks, one late metric, stopping, skipping, one compilation."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Placement
from noonsight.logbook.vocabulary import METRICS
from noonsight.train import checkpoint
from noonsight.train.journal import BadStep
from noonsight.train.optim import make_optimizer
from noonsight.train.pretrain import Part, pretrain
from noonsight.train.recover import Interrupted
from noonsight.train.step import compile_step, init_state, make_train_step, params_hash, skip_step
from tests.train.toy import Program, make_batch, make_program, optimizer_config, pretrain_config, table


@pytest.fixture(autouse=True)
def leave_jax_and_signals_alone(tmp_path_factory, monkeypatch):
    """One compilation cache for all tests here, and everything as it was afterwards."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    names = [f"jax_{name}" for name in ("compilation_cache_dir", "persistent_cache_min_compile_time_secs")]
    before, handler = {name: getattr(jax.config, name) for name in names}, signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    for name, value in before.items():
        jax.config.update(name, value)


def train(out, *, batch=make_batch, evaluate=None, program=None, parent=None, **changes):
    out.mkdir(exist_ok=True)
    with claim(out, "worker") as owned:
        config = pretrain_config(**changes)
        part = Part(program or make_program(), batch, evaluate)
        return pretrain(config, lambda _: part, out, owned, Placement(), table=table(), parent=parent).facts


def kinds(out):
    return [event.kind for event in read.events(out)]


def make_step(program=None):
    program = program or make_program()
    optimizer = make_optimizer(optimizer_config(), program.init(jax.random.key(0))[0], num_steps=20, table=table())
    return make_train_step(program, optimizer), init_state(program, optimizer, jax.random.key(0))


def test_a_run_learns_and_writes_every_step_once(tmp_path):
    seen = []
    facts = train(
        tmp_path, evaluate=lambda params, extra, step: seen.append(step) or {"eval/loss": 1.0}, evaluate_every=15
    )
    metrics = read.metrics(tmp_path)
    assert metrics["loss"].steps == tuple(range(40)) and metrics["loss"].values[-1] < 0.5 * metrics["loss"].values[0]
    assert metrics["eval/loss"].steps == (15, 30, 40) and seen == [15, 30, 40]
    assert metrics["tokens"].values[-1] == facts["tokens"] == 40 * 16 * 8
    assert metrics["rate/adam"].values[:2] == (0.0, pytest.approx(1e-2 / 4))
    assert [path.name[-2:] for path in checkpoint.folders(checkpoint.root_of(tmp_path))] == ["10", "20", "30", "40"]
    assert checkpoint.newest(checkpoint.root_of(tmp_path)).manifest.kind == "final"
    assert [event.step for event in read.events(tmp_path) if event.kind == "params-hash"] == list(range(5, 41, 5))
    last = read.last_progress(tmp_path)
    assert (last.step, last.of, last.phase) == (40, 40, "done")
    for name in metrics:
        assert METRICS[name].sentence
    groups = {row[0]: row[2] for row in read.tables(tmp_path)["optimizer"]["rows"]}
    assert groups == {"inner": "muonh", "outer": "adamh", "gain": "adam"}
    lights = {row[0]: row[2] for row in read.tables(tmp_path)["health"]["rows"]}
    assert lights["starved-expert"] == "unmeasured" and set(lights.values()) == {"green", "unmeasured"}


def test_run_again_when_done_changes_nothing(tmp_path):
    evaluations = []
    arguments = {"evaluate": lambda *_: evaluations.append(1) or {"eval/loss": 2.0}, "num_steps": 10}
    first, again = train(tmp_path, **arguments), train(tmp_path, **arguments)
    assert first == again and len(evaluations) == 1


def test_interrupted_at_five_points_the_stream_of_batches_is_the_same(tmp_path):
    def interrupting(step):
        taken.append(step)
        if step in stops:
            stops.discard(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return make_batch(step)

    taken, stops = [], {3, 11, 12, 25, 39}
    attempts = 0
    while attempts < 9:
        attempts += 1
        try:
            facts = train(tmp_path / "broken", batch=interrupting)
            break
        except Interrupted:
            assert checkpoint.newest(checkpoint.root_of(tmp_path / "broken")).manifest.step == taken[-1], (
                "no step is lost"
            )
    assert attempts == 6
    whole = train(tmp_path / "whole")
    assert facts["params_hash"] == whole["params_hash"]
    one, other = read.metrics(tmp_path / "broken"), read.metrics(tmp_path / "whole")
    assert one["loss"].values == other["loss"].values and one["tokens"].values == other["tokens"].values


def test_sigterm_breaks_off_an_evaluation_and_keeps_the_step(tmp_path):
    def evaluate(params, extra, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"eval/loss": 1.0}

    with pytest.raises(Interrupted):
        train(tmp_path, evaluate=evaluate, evaluate_every=5)
    assert checkpoint.newest(checkpoint.root_of(tmp_path)).manifest.step == 5
    assert checkpoint.newest(checkpoint.root_of(tmp_path)).manifest.kind == "temporary"


def test_a_nan_stops_within_a_step_with_its_batch_kept_and_no_checkpoint_of_it(tmp_path):
    taken = []

    def poisoned(step):
        taken.append(step)
        return make_batch(step, bad_step=20)

    with pytest.raises(BadStep, match=r"Step 20 gave loss nan.*bad_batches/step_00000020.npz"):
        train(tmp_path, batch=poisoned, checkpoint_every=7)
    assert max(taken) <= 21
    assert [int(path.name[5:]) for path in checkpoint.folders(checkpoint.root_of(tmp_path))] == [7, 14]
    kept = np.load(tmp_path / "bad_batches/step_00000020.npz")
    np.testing.assert_array_equal(next(kept[name] for name in kept.files if "x" in name), poisoned(20)["x"])
    event = next(event for event in read.events(tmp_path) if event.kind == "bad-steps")
    assert event.step == 20 and event.data["batch"] == "bad_batches/step_00000020.npz"


def test_a_nan_on_the_step_of_a_checkpoint_is_found_before_the_save(tmp_path):
    with pytest.raises(BadStep):
        train(tmp_path, batch=lambda step: make_batch(step, bad_step=13), checkpoint_every=7)
    assert [int(path.name[5:]) for path in checkpoint.folders(checkpoint.root_of(tmp_path))] == [7]


def test_the_step_after_a_permanent_save_goes_on(tmp_path):
    train(tmp_path, checkpoint_every=1, num_steps=6)
    assert (
        read.metrics(tmp_path)["loss"].steps == tuple(range(6))
        and len(checkpoint.folders(checkpoint.root_of(tmp_path))) == 6
    )


def test_damaged_newest_falls_back_and_ends_the_same(tmp_path):
    whole = train(tmp_path)
    newest = checkpoint.newest(checkpoint.root_of(tmp_path)).path
    next(newest.glob("part_*")).write_bytes(b"")
    again = train(tmp_path)
    assert again["params_hash"] == whole["params_hash"] and "checkpoint-rejected" in kinds(tmp_path)


def test_a_skipped_step_takes_its_number_and_changes_nothing_else():
    _, state = make_step()
    after = skip_step(state)
    assert int(after.step) == 1 and after.params is state.params and after.opt is state.opt


def test_the_step_is_traced_once_and_its_executable_takes_nothing_else():
    traced = []
    program = make_program()
    counted = Program(program.init, lambda *args: traced.append(1) or program.loss(*args), program.after_step)
    train_step, state = make_step(counted)
    compiled = compile_step(train_step, state, make_batch(0))
    before = len(traced)
    for step in range(20):
        state, _ = compiled(state, make_batch(step))
    assert len(traced) == before
    with pytest.raises(TypeError):
        compiled(state, {name: array[:3] for name, array in make_batch(0).items()})


def test_a_program_that_changes_its_state_is_refused():
    program = make_program()
    odd = Program(program.init, program.loss, lambda extra, aux: {"seen": jnp.zeros((2,))})
    with pytest.raises(TypeError, match=r"extra\.seen"):
        compile_step(*make_step(odd), make_batch(0))


def test_group_norms_add_up_to_the_norm_over_all_leaves():
    train_step, state = make_step()
    total = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(state.params)))
    _, measured = train_step(state, make_batch(0))
    assert float(measured["norm/param"]) == pytest.approx(total, rel=1e-6)
    groups = [float(measured[f"norm/grad/{group}"]) for group in ("adam", "adamh", "muonh")]
    assert float(measured["norm/grad"]) == pytest.approx(np.linalg.norm(groups), rel=1e-6)


def test_the_hash_sees_one_bit_the_name_and_the_shape():
    base = {"a": np.zeros((2, 2), np.float32)}
    bit = {"a": np.frombuffer(b"\1" + bytes(15), np.float32).reshape(2, 2)}
    hashes = {params_hash(tree) for tree in (base, bit, {"b": base["a"]}, {"a": base["a"].reshape(4)})}
    assert len(hashes) == 4 and params_hash(base) == params_hash({"a": jnp.zeros((2, 2))})


def test_drawing_random_numbers_elsewhere_changes_nothing(tmp_path):
    def noisy(step):
        np.random.seed(step)
        np.random.random(3)
        return make_batch(step)

    assert (
        train(tmp_path / "a", num_steps=6)["params_hash"]
        == train(tmp_path / "b", num_steps=6, batch=noisy)["params_hash"]
    )


def test_a_run_in_parts_is_the_run_in_one(tmp_path):
    whole = train(tmp_path / "whole", num_steps=30, checkpoint_every=10)
    train(tmp_path / "first", num_steps=20, checkpoint_every=10, horizon=30)
    second = train(tmp_path / "second", parent=tmp_path / "first", num_steps=30, first_step=20, checkpoint_every=10)
    assert second["params_hash"] == whole["params_hash"] and "forked" in kinds(tmp_path / "second")
    assert read.metrics(tmp_path / "second")["loss"].steps == tuple(range(20, 30))
    assert 3 * second["tokens"] == whole["tokens"]
    branch = train(tmp_path / "branch", parent=tmp_path / "whole", num_steps=30, first_step=10, seed=1)
    assert branch["params_hash"] == whole["params_hash"], "only the data and a fresh state know the seed"
    with pytest.raises(ValueError, match="step_00000015, from which this run shall go on, cannot be trusted"):
        train(tmp_path / "none", parent=tmp_path / "first", num_steps=30, first_step=15)


def test_a_part_that_lies_outside_the_run_is_refused():
    with pytest.raises(ValueError, match="first_step = 40; it must be a step before the last, 40"):
        pretrain_config(first_step=40)
    with pytest.raises(ValueError, match="horizon = 39; it must be None, or at least num_steps, 40"):
        pretrain_config(horizon=39)
