"""A receipt passes for a true export and not for a subtly wrong one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from noonsight.logbook.record import encode
from noonsight.serve import engine, hf, parity, reference
from tests.serve.fixtures import random_model, tiny_config, tiny_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    config = tiny_config()
    params, extra = random_model(config)
    folder = tmp_path_factory.mktemp("made")
    hf.export_model(params, extra, config, tiny_tokenizer(folder / "tokenizer"), folder / "export")
    return folder / "export", params, extra, config


def test_jax_model_matches_its_export(made):
    receipt = parity.check_export(*made, engine="jax", seed=0)
    assert receipt.passed, receipt.checks
    assert receipt.subject_digest == hf.check_digest(made[0])
    assert max(check.value for check in receipt.checks if "largest" in check.name) < 1e-5


def test_reference_sees_nothing_change(made):
    receipt = parity.check_export(*made, engine="reference", seed=1)
    assert receipt.passed and all(check.value < 1e-12 for check in receipt.checks)


@pytest.mark.parametrize("fault", ["pending", "window", "theta", "swapped"])
def test_faults_are_seen(made, fault, tmp_path):
    folder, params, extra, config = made
    if fault == "pending":
        extra = {"pending_beta": extra["pending_beta"] * 0}
    elif fault == "window":
        config = replace(config, window=config.window + 1)
    elif fault == "theta":
        config = replace(config, rope_theta=5e5)
    else:
        layers = replace(params.layers, expert_gate=params.layers.expert_up, expert_up=params.layers.expert_gate)
        params = replace(params, layers=layers)
    receipt = parity.check_export(folder, params, extra, config, engine="reference", seed=0)
    assert not receipt.passed
    assert any("largest" in check.name and not check.passed for check in receipt.checks)


def test_near_ties_are_forgiven_and_nothing_else():
    truth = reference.Trace(np.zeros(1), np.zeros(1), np.array([[[[0, 1], [0, 1]]]]), np.array([[[0.5, 1e-9]]]))
    wrong, judged = parity._routing(np.array([[[[1, 0], [2, 0]]]]), truth, 1e-5)
    assert wrong == 0 and judged.tolist() == [[True, False]]
    wrong, judged = parity._routing(np.array([[[[2, 0], [0, 1]]]]), truth, 1e-5)
    assert wrong == 1 and judged.all()


def test_engine_equals_the_uncached_model(made):
    """Greedy tokens of the cached engine, with a prompt on each side of the window's edge, are the reference's."""
    _, params, extra, config = made
    prompts = [[5, 9, 2], list(range(1, 23))]
    options = {"max_tokens": 12, "temperature": 0.0, "eos": None}
    together = engine.generate_batch(params, extra, config, prompts, seeds=[0, 0], **options)
    for prompt, new in zip(prompts, together):
        rows = np.array([prompt + new])
        wanted = reference.forward(params, extra, config, rows)[0, len(prompt) - 1 : -1].argmax(-1)
        assert new == wanted.tolist()


def test_sampling_is_seeded_and_rows_are_independent(made):
    _, params, extra, config = made
    prompts = [[5, 9, 2], [7, 7, 7, 7], [1]]
    options = {"max_tokens": 12, "temperature": 1.0, "top_k": 20, "eos": None}
    first = engine.generate_batch(params, extra, config, prompts, seeds=[1, 2, 3], **options)
    swapped = engine.generate_batch(params, extra, config, prompts[::-1], seeds=[3, 2, 1], **options)
    assert first == swapped[::-1] and len({tuple(row) for row in first}) == 3
    assert engine.generate_batch(params, extra, config, prompts, seeds=[1, 2, 4], **options)[:2] == first[:2]
    ended = engine.generate_batch(params, extra, config, prompts, seeds=[1, 2, 3], **{**options, "eos": first[0][4]})
    assert ended[0] == first[0][: first[0].index(first[0][4])]
    tight = engine.generate_batch(params, extra, config, prompts, seeds=[1, 2, 3], **{**options, "top_k": 1})
    assert tight == engine.generate_batch(
        params, extra, config, prompts, seeds=[0] * 3, **{**options, "temperature": 0.0}
    )


def test_bad_requests_are_refused(made):
    _, params, extra, config = made
    options = {"max_tokens": 4, "temperature": 0.0, "seed": 0, "eos": None}
    for prompt, complaint in (
        ([], "is empty"),
        ([999], "outside the vocabulary"),
        ([1] * 61, "more than the context of 64"),
    ):
        with pytest.raises(ValueError, match=complaint):
            engine.generate(params, extra, config, prompt, **options)
    with pytest.raises(ValueError, match="unknown; choose one of"):
        parity.check_export(*made, engine="abacus", seed=0)


def test_receipt_is_a_record_of_numbers(made):
    receipt = parity.check_export(*made, engine="reference", seed=1)
    assert json.loads(encode(receipt))["checks"][0]["name"] == "config differs"
