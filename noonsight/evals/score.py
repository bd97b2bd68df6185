"""Bits per byte: what a model needs to write down a text, over the bytes the text has.

    BPB = sum of token losses in nats / ln 2 / sum of UTF-8 bytes

Each document is scored alone behind one EOS: the first token from the EOS, the others from what precedes them. A
document longer than a row is cut into windows that overlap by one token, so that every token is predicted exactly once;
the first token predicted in a later window sees one token of context, the last one `sequence_length - 1`. Windows are
packed into rows of fixed shape, kept apart by segments, so that one compiled function scores everything; no score
depends on its neighbours or on the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noonsight.evals.task import DocumentScore, DomainScore, Scores
from noonsight.tokens.batches import Batch, HeldoutDocument


class _Window(NamedTuple):
    """Tokens of one document; the first is context only: EOS in the window that opens the document."""

    document: int
    opens: bool
    tokens: NDArray[np.int32]


def bits_per_byte(
    token_losses: Callable[[Batch], Any],
    documents: Sequence[HeldoutDocument],
    *,
    sequence_length: int,
    batch_size: int,
    eos: int,
) -> Scores:
    """Score `documents`. `token_losses(batch) -> f32[B, S]`: nats of predicting tokens[t + 1] at t, dropless.

    Each batch has `batch_size` rows of `sequence_length`. `tokens` of a document are those of its text, without EOS.
    Raises ValueError, naming the document, when one is empty or holds an EOS, or a loss is not finite.
    """
    if not documents or sequence_length < 2 or batch_size < 1:
        raise ValueError(
            f"bits_per_byte: {len(documents)} documents, sequence_length {sequence_length}, batch_size {batch_size}; "
            "at least one document, two positions and one row are needed."
        )
    for document in documents:
        _check_document(document, eos)
    nats = np.zeros(len(documents))
    counts = np.zeros(len(documents), np.int64)
    for rows in _rows(_windows(documents, sequence_length, eos), sequence_length, batch_size):
        batch, owner = _fill(rows, sequence_length, batch_size)
        losses = np.asarray(token_losses(batch), np.float64)
        scored = owner >= 0
        bad = scored & ~np.isfinite(losses)
        if bad.any():
            name = documents[owner[bad][0]].doc_uid
            raise ValueError(
                f"bits_per_byte: the loss of a token of document {name} is {losses[bad][0]}; the model is broken."
            )
        np.add.at(nats, owner[scored], losses[scored])
        np.add.at(counts, owner[scored], 1)
    assert all(count == len(document.tokens) for count, document in zip(counts, documents)), "each token once"
    return _scores(documents, nats, sequence_length)


def _windows(documents: Sequence[HeldoutDocument], sequence_length: int, eos: int) -> Iterator[_Window]:
    for index, document in enumerate(documents):
        tokens = np.concatenate([[eos], np.asarray(document.tokens)]).astype(np.int32)
        for start in range(0, len(tokens) - 1, sequence_length - 1):
            yield _Window(index, start == 0, tokens[start : start + sequence_length])


def _rows(windows: Iterator[_Window], sequence_length: int, batch_size: int) -> Iterator[list[list[_Window]]]:
    """Batches of rows of windows, filled in order."""
    rows: list[list[_Window]] = [[]]
    used = 0
    for window in windows:
        if used + len(window.tokens) > sequence_length:
            if len(rows) == batch_size:
                yield rows
                rows = []
            rows.append([])
            used = 0
        rows[-1].append(window)
        used += len(window.tokens)
    yield rows


def _fill(rows: list[list[_Window]], sequence_length: int, batch_size: int) -> tuple[Batch, NDArray[np.int64]]:
    """The batch, and for each position the document whose token it predicts (-1: none).

    A leading EOS is a segment of its own, as in training, where a document does not see the EOS before it.
    """
    shape = (batch_size, sequence_length)
    batch = Batch(np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.float32))
    owner = np.full(shape, -1, np.int64)
    for r, row in enumerate(rows):
        start, segment = 0, 0
        for window in row:
            end = start + len(window.tokens)
            batch.tokens[r, start:end] = window.tokens
            batch.segments[r, start:end] = segment + window.opens
            batch.segments[r, start] = segment
            batch.weights[r, start : end - 1] = 1
            owner[r, start : end - 1] = window.document
            start, segment = end, segment + 2
    return batch, owner


def _scores(documents: Sequence[HeldoutDocument], nats: NDArray, sequence_length: int) -> Scores:
    bits = nats / math.log(2)
    num_bytes = np.array([document.num_bytes for document in documents])
    domains = []
    for name in sorted({str(document.domain) for document in documents}):
        inside = np.array([str(document.domain) == name for document in documents])
        value, error = _ratio(bits[inside], num_bytes[inside])
        domains.append(
            DomainScore(
                domain=name,
                num_documents=int(inside.sum()),
                num_tokens=sum(len(document.tokens) for document, kept in zip(documents, inside) if kept),
                num_bytes=int(num_bytes[inside].sum()),
                bits_per_byte=value,
                standard_error=error,
            )
        )
    micro, micro_error = _ratio(bits, num_bytes)
    errors = [domain.standard_error for domain in domains]
    return Scores(
        micro=micro,
        micro_standard_error=micro_error,
        macro=float(np.mean([domain.bits_per_byte for domain in domains])),
        macro_standard_error=None if None in errors else float(np.sqrt(np.sum(np.square(errors))) / len(errors)),
        domains=tuple(domains),
        documents=tuple(
            DocumentScore(
                doc_uid=document.doc_uid,
                domain=str(document.domain),
                num_tokens=len(document.tokens),
                num_bytes=document.num_bytes,
                nats=float(document_nats),
                bits_per_byte=float(document_bits / document.num_bytes),
            )
            for document, document_nats, document_bits in zip(documents, nats, bits)
        ),
        context=sequence_length,
        stride=sequence_length - 1,
    )


def _ratio(bits: NDArray, num_bytes: NDArray) -> tuple[float, float | None]:
    """Total bits over total bytes, and its standard error over documents (linearised ratio; Cochran 1977, 6.3)."""
    value = bits.sum() / num_bytes.sum()
    count = len(bits)
    if count < 2:
        return float(value), None
    spread = np.square(bits - value * num_bytes).sum() * count / (count - 1)
    return float(value), float(np.sqrt(spread) / num_bytes.sum())


def _check_document(document: HeldoutDocument, eos: int) -> None:
    if not len(document.tokens) or document.num_bytes < 1:
        raise ValueError(
            f"bits_per_byte: document {document.doc_uid} has {len(document.tokens)} tokens and {document.num_bytes} "
            "bytes; an empty document has no score, leave it out."
        )
    if (np.asarray(document.tokens) == eos).any():
        raise ValueError(
            f"bits_per_byte: document {document.doc_uid} holds the EOS id {eos}; give the tokens of its text alone, "
            "the prefix is added here and the end is not scored."
        )
