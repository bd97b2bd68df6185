"""Bits per byte against hand-computed values, and against everything that made such scores wrong elsewhere."""

from __future__ import annotations

import math
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.evals import checks
from noonsight.evals.score import bits_per_byte
from noonsight.model import transformer
from noonsight.tokens.batches import Batch, HeldoutDocument
from tests.serve.fixtures import random_model, tiny_config

EOS = 0


def make_document(uid, tokens, num_bytes=None, domain="a"):
    return HeldoutDocument(
        doc_uid=uid, domain=domain, tokens=np.asarray(tokens, np.int32), num_bytes=num_bytes or 2 * len(tokens)
    )


def pair_losses(batch: Batch) -> np.ndarray:
    """A bigram model: the loss of a pair is a number of its own; pairs that are not one document's cost a fortune."""
    losses = np.full(batch.tokens.shape, 1e9)
    before, after = batch.tokens[:, :-1], batch.tokens[:, 1:]
    same = (batch.segments[:, :-1] == batch.segments[:, 1:]) | (before == EOS)
    live = (batch.segments[:, :-1] >= 0) & (batch.segments[:, 1:] >= 0)
    losses[:, :-1] = np.where(same & live, np.sin(before * 7.0 + after * 3.0) + 2, 1e9)
    return losses


def by_hand(tokens) -> float:
    return sum(math.sin(a * 7.0 + b * 3.0) + 2 for a, b in zip([EOS, *tokens], tokens))


def random_documents(seed=3, lengths=(1, 5, 31, 32, 33, 64, 100, 7)):
    generator = np.random.default_rng(seed)
    return [
        make_document(f"d{i}", generator.integers(1, 300, length), domain="ab"[i % 2])
        for i, length in enumerate(lengths)
    ]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(2, 17),
    st.integers(1, 4),
)
def test_every_token_is_predicted_once_from_its_own_predecessor(texts, sequence_length, batch_size):
    documents = [make_document(f"d{i}", text) for i, text in enumerate(texts)]
    scores = bits_per_byte(pair_losses, documents, sequence_length=sequence_length, batch_size=batch_size, eos=EOS)
    for record, text in zip(scores.documents, texts):
        assert record.nats == pytest.approx(by_hand(text))
        assert record.num_tokens == len(text)


def test_micro_macro_and_standard_errors_by_hand():
    documents = [
        make_document("x", [1, 2], 4, "a"),
        make_document("y", [3], 5, "a"),
        make_document("z", [4, 5, 6], 6, "b"),
    ]
    scores = bits_per_byte(pair_losses, documents, sequence_length=8, batch_size=2, eos=EOS)
    bits = [by_hand(document.tokens.tolist()) / math.log(2) for document in documents]
    first = (bits[0] + bits[1]) / 9
    assert scores.micro == pytest.approx(sum(bits) / 15)
    assert [domain.bits_per_byte for domain in scores.domains] == pytest.approx([first, bits[2] / 6])
    assert scores.macro == pytest.approx((first + bits[2] / 6) / 2)
    residuals = [bits[0] - first * 4, bits[1] - first * 5]
    assert scores.domains[0].standard_error == pytest.approx(math.sqrt(2 * sum(r * r for r in residuals)) / 9)
    assert scores.domains[1].standard_error is None and scores.macro_standard_error is None
    assert (scores.context, scores.stride, scores.prefix, scores.drop_rate) == (8, 7, "eos", 0.0)


def test_uniform_byte_model_needs_eight_bits():
    check = checks.uniform_bytes(sequence_length=50, batch_size=3)
    assert check.passed and len(checks.UNIFORM_TEXT.encode()) > len(checks.UNIFORM_TEXT)


def test_bytes_are_those_of_the_text_even_when_no_token_is_utf8():
    content = "né€".encode()  # six bytes in three characters; as tokens, five of them are no UTF-8 alone
    document = make_document("bytes", [byte + 1 for byte in content], num_bytes=len(content))
    scores = bits_per_byte(
        lambda batch: np.full(batch.tokens.shape, math.log(2)), [document], sequence_length=4, batch_size=1, eos=EOS
    )
    assert scores.micro == pytest.approx(1.0)


def test_no_score_depends_on_batch_size_or_company():
    config = tiny_config()
    params, extra = random_model(config)
    losses = partial(jax.jit(partial(transformer.token_losses, config=config)), params, extra)
    documents = random_documents()
    one, four = (bits_per_byte(losses, documents, sequence_length=33, batch_size=size, eos=EOS) for size in (1, 4))
    for a, b in zip(one.documents, four.documents):
        assert a.nats == pytest.approx(b.nats, abs=1e-4 * a.num_tokens)
    assert checks.batch_equals_solo(losses, documents, four, batch_size=4, eos=EOS).passed
    assert checks.complete(four, documents).passed
    assert not checks.complete(four, documents[1:]).passed


def test_what_cannot_be_scored_is_refused_by_name():
    run = partial(bits_per_byte, pair_losses, sequence_length=8, batch_size=2, eos=EOS)
    with pytest.raises(ValueError, match="document d7 holds the EOS"):
        run([make_document("d7", [4, EOS])])
    with pytest.raises(ValueError, match="document d8 has 0 tokens"):
        run([make_document("d8", [], 3)])
    with pytest.raises(ValueError, match="document d9 is nan"):
        bits_per_byte(
            lambda batch: np.full(batch.tokens.shape, np.nan),
            [make_document("d9", [1])],
            sequence_length=8,
            batch_size=2,
            eos=EOS,
        )
