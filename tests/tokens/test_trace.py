"""Both ways: every token of a run leads to its bytes, and every document to its steps."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from noonsight.tokens.batches import open_batches
from noonsight.tokens.mixture import MixtureConfig, Phase
from noonsight.tokens.trace import Visit, trace, where
from tests.tokens.voyage import run_mixture, run_store, run_tokenizer, sentence, write_corpus

RUN = dict(seed=5, sequence_length=32, batch_size=4, num_steps=200)


@pytest.fixture(scope="module")
def voyage(tmp_path_factory):
    root = tmp_path_factory.mktemp("voyage")
    rng = np.random.default_rng(0)
    texts = [sentence(rng, int(n)) + "né " for n in rng.integers(1, 120, size=60)] + ["", "é👩‍🚀"]
    cells = [["seaq0", "landq2", "seaq4"][i % 3] for i in range(len(texts))]
    write_corpus(root, texts, cells, ["heldout" if i % 10 == 9 else "train" for i in range(len(texts))])
    store = run_store(root, run_tokenizer(root))
    phases = (Phase(), Phase(name="cooldown", start_fraction=0.6, quality_tilt=0.3))
    return root, store, run_mixture(root, store, MixtureConfig(phases=phases, block_rows=16))


def test_a_position_leads_to_the_bytes_of_its_token(voyage):
    root, store, mixture = voyage
    batches = open_batches(store, mixture, **RUN)
    tokenizer = batches.store.tokenizer()
    rows = pq.read_table(root / "documents/documents.parquet").to_pylist()
    documents = {row["doc_uid"]: row for row in rows}
    rng = np.random.default_rng(1)
    for _ in range(150):
        step, row, col = (int(rng.integers(n)) for n in (200, 4, 32))
        found = trace(store, mixture, **RUN, step=step, row=row, col=col)
        document = documents[found.doc_uid]
        assert found.token == batches.batch(step).tokens[row, col]
        assert (found.source, found.file) == (document["source"], document["file"])
        piece = document["text"].encode()[found.text_start : found.text_end]
        assert piece == tokenizer.token_bytes(found.token)
        assert found.exact and (found.start, found.end) == (7 + found.text_start, 7 + found.text_end)
        before = document["text"].encode()[: found.text_end].decode(errors="ignore")
        assert found.token == tokenizer.eos or found.piece in before or found.piece.startswith("<0x")


def test_a_document_leads_to_exactly_the_rows_that_held_it(voyage):
    _, store, mixture = voyage
    batches = open_batches(store, mixture, **RUN)
    spans = batches.store.spans("train").read().to_pylist()
    starts = np.array([span["start"] for span in spans])
    held = {span["doc_uid"]: set() for span in spans}
    for step in range(200):
        for row, start in enumerate(batches.places(step).start):
            first = np.searchsorted(starts, start, side="right") - 1
            last = np.searchsorted(starts, start + 31, side="right")
            for span in spans[first:last]:
                held[span["doc_uid"]].add((step, row))
    for uid, expected in held.items():
        visits = where(store, mixture, **RUN, uid=uid)
        assert visits == [Visit(step=step, row=row) for step, row in sorted(expected)]
    assert max(map(len, held.values())) > 2


def test_heldout_never_trained_and_unknown_is_refused(voyage):
    root, store, mixture = voyage
    kept = pq.read_table(root / "select/kept.parquet").to_pylist()
    secret = next(row["doc_uid"] for row in kept if row["split"] == "heldout")
    assert where(store, mixture, **RUN, uid=secret) == []
    with pytest.raises(ValueError, match="document nobody is not in the store"):
        where(store, mixture, **RUN, uid="nobody")


def test_text_that_is_not_the_bytes_of_its_file_is_not_claimed_to_be(tmp_path):
    rng = np.random.default_rng(0)
    write_corpus(tmp_path, [sentence(rng, 60) for _ in range(30)])
    file = tmp_path / "documents/documents.parquet"
    table = pq.read_table(file)
    wider = [[end + 20 for end in table.column("end").to_pylist()]]  # e.g. markup that was taken out
    pq.write_table(table.set_column(table.column_names.index("end"), "end", wider), file)
    store = run_store(tmp_path, run_tokenizer(tmp_path))
    found = trace(store, run_mixture(tmp_path, store), **RUN, step=3, row=1, col=9)
    assert not found.exact and found.start == 7 and found.end - found.start > found.text_end


def test_a_place_outside_the_run_is_refused(voyage):
    _, store, mixture = voyage
    with pytest.raises(ValueError, match="row 4, column 0 is outside a batch of 4 x 32"):
        trace(store, mixture, **RUN, step=0, row=4, col=0)
    with pytest.raises(ValueError, match="step 200 is outside the run"):
        trace(store, mixture, **RUN, step=200, row=0, col=0)
