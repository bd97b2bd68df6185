"""What an evaluation records: one line per document, one per domain, and the numbers over all of them.

A score without its per-document records, its context, stride and prefix, and its drop rate is not a result (Marin,
issue #7505): two numbers can then differ by what was fed, not by the model. All are ordinary records of the logbook.
"""

from __future__ import annotations

from typing import Literal

from noonsight.logbook.record import Record


class DocumentScore(Record, kw_only=True):
    """One document: `nats` is the sum over its `num_tokens` tokens, `num_bytes` those of its UTF-8 text."""

    doc_uid: str
    domain: str
    num_tokens: int
    num_bytes: int
    nats: float
    bits_per_byte: float


class DomainScore(Record, kw_only=True):
    """All documents of a domain: total bits over total bytes. The standard error is over documents; None for one."""

    domain: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    bits_per_byte: float
    standard_error: float | None


class Scores(Record, kw_only=True):
    """Bits per byte of a set of documents, with the conditions under which they were measured."""

    schema: int = 1
    micro: float  # total bits over total bytes
    micro_standard_error: float | None
    macro: float  # mean over domains
    macro_standard_error: float | None
    domains: tuple[DomainScore, ...]  # sorted by name
    documents: tuple[DocumentScore, ...]  # in the order given
    context: int  # tokens a row holds, the prefix included
    stride: int  # tokens between two windows: context - 1, one token of overlap
    prefix: Literal["eos"] = "eos"  # what stands before a document's first token; never scored
    eos_scored: bool = False  # the end of a document is no byte of its text
    drop_rate: float = 0.0  # of expert assignments; evaluation never drops
