"""F7: a program that offloads and corrupts what it offloads is refused before its first step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Placement
from noonsight.model import ready
from noonsight.model.families import delphi
from noonsight.model.transformer import make_program
from noonsight.tokens.batches import Batch
from noonsight.train import first_step
from noonsight.train.first_step import FirstStepWrong, compiler_options
from noonsight.train.pretrain import Part, pretrain
from noonsight.train.recover import SYMPTOMS
from tests.train.toy import Program, make_batch, pretrain_config, table
from tests.train.toy import make_program as make_toy

MODEL = replace(  # as small as a model with layers can be: three of its gradients are compiled
    delphi(128),
    width=16,
    num_layers=2,
    vocab_size=64,
    sequence_length=16,
    num_heads=1,
    num_kv_heads_local=1,
    num_kv_heads_global=1,
    head_width=16,
    dense_width=16,
    compute_dtype="float32",
    matmul_dtype="float32",
    remat="offload",
)


def rows(step, within=slice(None)):
    generator = np.random.default_rng(step)
    tokens = generator.integers(1, 64, (2, 16)).astype(np.int32)
    return Batch(tokens, np.zeros((2, 16), np.int32), np.ones((2, 16), np.float32))


def corrupting(how):
    """Offload as a scheduler with two collectives in flight may leave it: the way back through a layer is damaged."""

    @jax.custom_vjp
    def passed(x):
        return x

    passed.defvjp(lambda x: (x, None), lambda _, cotangent: (how(cotangent),))
    return lambda step, remat: jax.checkpoint(lambda x, sliced: step(passed(x) if remat == "offload" else x, sliced))


def test_the_offloaded_model_passes_and_a_corrupted_residual_is_refused(monkeypatch):
    reference = make_program(replace(MODEL, remat="block"))
    start, seen = jax.jit(reference.init)(jax.random.key(0)), {}

    def once(program, *arguments, reduced=first_step._reduced):
        return seen.setdefault(id(program), reduced(program, *arguments))

    monkeypatch.setattr(first_step, "_reduced", once)
    told = first_step.check(make_program(MODEL), reference, *start, rows(0), products="float32")
    assert told["off"] <= told["bound"] == 1e-5 and told["loss"] > 0
    monkeypatch.setattr(ready, "_rematerialised", corrupting(lambda x: jnp.roll(x, 1, axis=1)))
    with pytest.raises(FirstStepWrong, match=r"is off by .*Nothing was trained") as refused:
        first_step.check(make_program(MODEL), reference, *start, rows(0), products="float32")
    assert "the loss" not in str(refused.value), "the loss shows nothing of it"


def test_one_collective_in_flight_where_the_carry_is_offloaded():
    told = {"xla_gpu_experimental_parallel_collective_overlap_limit": 1}
    assert compiler_options("gpu", "offload") == compiler_options("cuda", "offload") == told
    assert compiler_options("gpu", "block") == compiler_options("cpu", "offload") == {}


def damaged(program, by):
    """The same loss with another gradient."""

    def loss(params, extra, batch):
        value, aux = program.loss(params, extra, batch)
        wrong = by * jnp.sum(params["inner"])
        return value + wrong - jax.lax.stop_gradient(wrong), aux

    return Program(program.init, loss, program.after_step)


@pytest.mark.parametrize(("by", "sound"), [(0.0, True), (1e-3, False), (float("nan"), False)])
def test_a_run_is_checked_before_it_trains(tmp_path, by, sound):
    part = Part(
        damaged(make_toy(), by) if by else make_toy(), lambda step, within=None: make_batch(step), reference=make_toy()
    )
    with claim(tmp_path, "worker") as owned:
        if sound:
            pretrain(pretrain_config(num_steps=2), lambda _: part, tmp_path, owned, Placement(), table=table())
        else:
            with pytest.raises(FirstStepWrong, match="inner is off by"):
                pretrain(pretrain_config(num_steps=2), lambda _: part, tmp_path, owned, Placement(), table=table())
    told = [event for event in read.events(tmp_path) if event.kind == "first-step"]
    assert len(told) == sound and ("loss" in read.metrics(tmp_path)) == sound
    assert SYMPTOMS[FirstStepWrong.symptom].action == "stop"
