"""The nucleotide recipe: its process is what it says, its filter is exact, its text reaches the store base by base."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from noonsight.plan.worker import load_experiment_module
from noonsight.tokens.batches import heldout
from noonsight.tokens.store import StoreConfig, build_store
from noonsight.tokens.tokenizer import write_alphabet

recipe = load_experiment_module(Path(__file__).parents[2] / "experiments" / "nucleotide.py")
SMALL = recipe.ProcessConfig(num_documents=40, heldout_every=8, shortest=20, longest=30)


def test_the_filter_is_the_sum_over_all_hidden_paths():
    config = replace(SMALL, num_motifs=2, motif_bases=2, motif_rate=0.4)
    process, bases = recipe.Process(config), np.array([0, 3, 1, 1])
    past = np.r_[recipe.UNREAD, recipe.UNREAD, bases]

    def joint(path):
        p, before = 1.0, 0
        for t, state in enumerate(path):
            emitted = process.emits[state - 1] if state else process.chain[past[t], past[t + 1]]
            p, before = p * process.moves[before, state] * emitted[bases[t]], state
        return p

    total = sum(joint(path) for path in itertools.product(range(5), repeat=len(bases)))
    predicted = process.predict(bases)
    assert np.prod(predicted[np.arange(4), bases]) == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(predicted.sum(axis=1), 1.0)


def test_no_other_prediction_is_better_than_the_process_itself():
    config = recipe.ProcessConfig()
    bases, states = recipe.Process(config).draw(np.random.default_rng(5), 60, 200)
    others = [recipe.Process(changed) for changed in (replace(config, motif_rate=0.001), replace(config, seed=1))]

    def bits(process):
        return np.mean([-np.log2(process.predict(row)[np.arange(200), row]).mean() for row in bases])

    truth = bits(recipe.Process(config))
    assert 0.9 < truth < 1.2
    assert all(bits(other) > truth + 0.02 for other in others)
    planted = (states > 0).mean()
    expected = config.motif_rate * config.motif_bases / (1 + config.motif_rate * (config.motif_bases - 1))
    assert planted == pytest.approx(expected, abs=0.03)


def test_documents_reach_the_store_base_by_base(tmp_path):
    folders = {name: tmp_path / name for name in ("documents", "tokenizer", "store")}
    for folder in folders.values():
        folder.mkdir()
    facts = recipe.generate(SMALL, {}, folders["documents"]).facts
    corpus = recipe.experiment().stages
    alphabet = next(stage for stage in corpus if stage.name == "tokenizer").config
    write_alphabet(alphabet, {}, folders["tokenizer"])
    inputs = {"documents": folders["documents"], "select": folders["documents"], "tokenizer": folders["tokenizer"]}
    build_store(StoreConfig(), inputs, folders["store"])
    kept = heldout(folders["store"])
    texts = dict(
        zip(
            *pq.read_table(folders["documents"] / "documents.parquet", columns=["doc_uid", "text"]).to_pydict().values()
        )
    )
    assert len(kept) == facts["heldout"] == 5
    for document in kept:
        assert "".join("ACGTN"[token - 8] for token in document.tokens) == texts[document.doc_uid]


def test_the_counted_chain_counts(tmp_path):
    recipe.generate(SMALL, {}, tmp_path)
    texts = pq.read_table(tmp_path / "documents.parquet")["text"].to_pylist()
    training = [text for i, text in enumerate(texts) if i % SMALL.heldout_every]
    text, at = training[0], 9
    past, base = text[at - 5 : at], text[at]
    seen = [each[i] for each in training for i in range(5, len(each)) if each[i - 5 : i] == past]
    bases = np.array([recipe.NUCLEOTIDES.index(letter) for letter in text])
    p = recipe._counted_chain(tmp_path)(bases)[at, bases[at]]
    assert p == pytest.approx((seen.count(base) + 0.1) / (len(seen) + 0.5))


def test_the_graph_is_one_line_from_process_to_score():
    experiment = recipe.experiment()
    assert [stage.name for stage in experiment.ordered()] == [
        "documents",
        "tokenizer",
        "store",
        "mixture",
        "run",
        "score",
    ]
    assert experiment.stages[-1].config == recipe.ProcessConfig(seed=0)
