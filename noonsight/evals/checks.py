"""Guards on the evaluator itself, run beside an evaluation: does the yardstick measure?

A model that knows nothing needs exactly 8 bits for a byte; a document's score must not depend on the company it is
scored in; and no number counts without its records. Each guard gives a `Check`, for a receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from noonsight.evals.score import bits_per_byte
from noonsight.evals.task import Scores
from noonsight.logbook.record import Check
from noonsight.tokens.batches import Batch, HeldoutDocument

UNIFORM_TEXT = "héllo wörld " * 40  # two characters in eleven are two bytes long


def uniform_bytes(*, sequence_length: int, batch_size: int) -> Check:
    """A uniform model over bytes scores 8 bits per byte on text that is not ASCII. The value is the distance from 8."""
    content = UNIFORM_TEXT.encode("utf-8")
    document = HeldoutDocument(
        doc_uid="uniform",
        domain="check",
        tokens=np.frombuffer(content, np.uint8).astype(np.int32),
        num_bytes=len(content),
    )

    def losses(batch: Batch) -> Any:
        return np.full(batch.tokens.shape, np.log(256.0))

    scores = bits_per_byte(losses, [document], sequence_length=sequence_length, batch_size=batch_size, eos=256)
    return _check("uniform byte model is 8 bits per byte", abs(scores.micro - 8), 1e-9)


def batch_equals_solo(
    token_losses: Callable[[Batch], Any],
    documents: Sequence[HeldoutDocument],
    scores: Scores,
    *,
    batch_size: int,
    eos: int,
    bound: float = 1e-4,
    num_documents: int = 3,
) -> Check:
    """The first documents alone must score as they did together. The value is the largest difference, nats a token."""
    largest = 0.0
    for document, together in list(zip(documents, scores.documents))[:num_documents]:
        alone = bits_per_byte(token_losses, [document], sequence_length=scores.context, batch_size=batch_size, eos=eos)
        largest = max(largest, abs(alone.documents[0].nats - together.nats) / together.num_tokens)
    return _check("score of a document alone and in company", largest, bound)


def complete(scores: Scores, documents: Sequence[HeldoutDocument]) -> Check:
    """Every document must have its record, with all its tokens and bytes. The value is how many have not."""
    given = {document.doc_uid: (len(document.tokens), document.num_bytes) for document in documents}
    found = {record.doc_uid: (record.num_tokens, record.num_bytes) for record in scores.documents}
    wrong = [uid for uid in given.keys() | found.keys() if given.get(uid) != found.get(uid)]
    return _check("documents without a complete record", len(wrong), 0)


def _check(name: str, value: float, bound: float) -> Check:
    return Check(name=name, value=float(value), bound=float(bound), passed=bool(value <= bound))
