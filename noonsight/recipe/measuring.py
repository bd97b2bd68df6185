"""Bits per byte of a finished run on held-out text: a training run, a token store and an evaluation, joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noonsight.logbook.claim import claim
from noonsight.logbook.record import Artifact, encode
from noonsight.logbook.write import Writer, write_atomic

if TYPE_CHECKING:
    from noonsight.evals.score import Scores
    from noonsight.model.config import ModelConfig
    from noonsight.model.layout import Layout


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How the measuring is done; none of it changes a score beyond rounding."""

    batch_size: int = 16


def run(config: MeasureConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: score the `run`'s final state on the held-out documents of `store`.

    Facts: `bits_per_byte` (micro), `macro`, `by_domain`, `num_documents`, `num_bytes`, context and stride. Files: `documents.json`, one record
    per document, and `tables/by_domain.json`.
    """
    from noonsight.recipe.pretraining import load_run
    from noonsight.tokens.store import open_store

    with claim(out, "stage") as owned:
        writer = Writer(out, owned)
        writer.progress(0, 2, unit="parts", phase="start", text="loading the final checkpoint")
        trained, params, extra = load_run(inputs["run"])
        writer.progress(1, 2, unit="parts", phase="evaluate", text="reading held-out documents")
        scores = make_measure(trained.model, inputs["store"], batch_size=config.batch_size)(params, extra)
        (out / "tables").mkdir(exist_ok=True)
        write_atomic(out / "documents.json", encode(scores.documents))
        write_atomic(out / "tables" / "by_domain.json", encode(_table(scores)))
    facts = {
        "bits_per_byte": scores.micro,
        "standard_error": scores.micro_standard_error,
        "macro": scores.macro,
        "by_domain": {each.domain: each.bits_per_byte for each in scores.domains},
        "num_documents": len(scores.documents),
        "num_bytes": sum(each.num_bytes for each in scores.domains),
        "context_tokens": scores.context,
        "stride_tokens": scores.stride,
        "drop_rate": scores.drop_rate,
        "heldout_digest": open_store(inputs["store"]).manifest.files["heldout.bin"].xxh3,
    }
    return Artifact(facts=facts)


def make_measure(
    model: ModelConfig, store: Path, *, batch_size: int = 16, layout: Layout | None = None
) -> Callable[..., Scores]:
    """`measure(params, extra, every=1) -> Scores` on each `every`-th held-out document; compiles once. On the mesh of a
    `layout` a batch has as many rows more as its devices want.
    """
    import jax

    from noonsight.evals.score import bits_per_byte
    from noonsight.model.layout import ALONE, ROWS
    from noonsight.model.transformer import token_losses
    from noonsight.tokens.batches import heldout
    from noonsight.tokens.store import open_store
    from noonsight.train.ranks import whole

    documents = heldout(store)
    eos = open_store(store).manifest.eos
    place = layout or ALONE
    losses = jax.jit(lambda params, extra, batch: token_losses(params, extra, batch, model, place))
    num_rows = batch_size + -batch_size % place.size(*ROWS)

    def measure(params: Any, extra: Any, *, every: int = 1) -> Scores:
        return bits_per_byte(
            lambda batch: jax.tree.map(whole, losses(params, extra, batch)),
            documents[::every],
            sequence_length=model.sequence_length,
            batch_size=num_rows,
            eos=eos,
        )

    return measure


def _table(scores: Scores) -> dict[str, Any]:
    rows = [
        [each.domain, each.bits_per_byte, each.standard_error, each.num_documents, each.num_bytes]
        for each in scores.domains
    ]
    text = f"Documents scored alone behind one {scores.prefix.upper()}, {scores.context} tokens of context, no token dropped; errors are over documents."
    columns = ["domain", "bits per byte", "standard error", "documents", "bytes"]
    return {"title": "Bits per byte by domain", "columns": columns, "rows": rows, "text": text}
