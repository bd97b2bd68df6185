"""All five stages on real text: the split, the ledger, the levels, the domains, and equal bytes from equal input."""

import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.corpus import ledger, quality, select, shingles
from noonsight.corpus.dedup import DuplicatesConfig, find_duplicates
from noonsight.corpus.document import hexdigest
from noonsight.corpus.domains import DomainsConfig, assign
from noonsight.corpus.quality import QualityConfig, judge
from noonsight.corpus.select import SelectConfig
from tests.corpus import planting

FOLDERS = ("milton", "sqlite-docs", "sqlite-source")


def curate(root: Path) -> Path:
    documents = planting.collect(root / "documents", {name: planting.VOYAGES / name for name in FOLDERS})
    inputs = {"documents": documents}
    inputs["duplicates"] = planting.stage(find_duplicates, DuplicatesConfig(), inputs, root / "duplicates")
    inputs["quality"] = planting.stage(judge, QualityConfig(), inputs, root / "quality")
    inputs["domains"] = planting.stage(assign, DomainsConfig(num_domains=4), inputs, root / "domains")
    planting.stage(select.select, SelectConfig(heldout_bytes=150_000), inputs, root / "select")
    return root


@pytest.fixture(scope="module")
def voyage(tmp_path_factory):
    return curate(tmp_path_factory.mktemp("voyage"))


def table(voyage: Path, stage: str, name: str) -> list[dict]:
    return planting.rows(voyage / stage / f"{name}.parquet")


def test_sidecars_have_the_rows_of_the_documents(voyage):
    uids = [row["doc_uid"] for row in table(voyage, "documents", "documents")]
    assert uids == sorted(set(uids))
    for stage in ("duplicates", "quality", "domains"):
        assert [row["doc_uid"] for row in table(voyage, stage, stage)] == uids


def test_no_heldout_cluster_trains_and_no_heldout_text_has_a_near_copy_in_training(voyage):
    cluster = {row["doc_uid"]: row["cluster"] for row in table(voyage, "duplicates", "duplicates")}
    texts = {row["doc_uid"]: row["text"] for row in table(voyage, "documents", "documents")}
    kept = table(voyage, "select", "kept")
    split = {row["doc_uid"]: row["split"] for row in kept}
    held = [uid for uid in split if split[uid] == "heldout"]
    trained = [uid for uid in split if split[uid] == "train"]
    assert not {cluster[uid] for uid in held} & {cluster[uid] for uid in trained}
    sets = dict(
        zip(split, (shingles.shingles(words, 3) for words in shingles.word_hashes(texts[uid] for uid in split)))
    )
    values, counts = np.unique(np.concatenate(list(sets.values())), return_counts=True)
    common = set(values[counts > 50].tolist())
    sets = {uid: set(members.tolist()) for uid, members in sets.items()}
    for uid in held:
        for other in trained:
            shared = (sets[uid] & sets[other]) - common
            assert len(shared) < 0.2 * min(len(sets[uid]), len(sets[other]))


def test_heldout_bytes_are_spread_over_the_domains(voyage):
    sizes = {row["doc_uid"]: row["num_bytes"] for row in table(voyage, "documents", "documents")}
    held = defaultdict(int)
    total = defaultdict(int)
    for row in table(voyage, "select", "kept"):
        total[row["domain"]] += sizes[row["doc_uid"]]
        held[row["domain"]] += sizes[row["doc_uid"]] * (row["split"] == "heldout")
    assert 100_000 <= sum(held.values()) <= 150_000
    assert all(0.02 <= held[domain] / total[domain] <= 0.1 for domain in total)


def test_kept_and_ledger_add_up(voyage):
    documents = table(voyage, "documents", "documents")
    decisions = table(voyage, "select", "decisions")
    final = [row for row in decisions if row["action"] != "mark"]
    assert sorted(row["doc_uid"] for row in final) == [row["doc_uid"] for row in documents]
    kept = {row["doc_uid"]: row for row in table(voyage, "select", "kept")}
    dropped = {row["doc_uid"]: row for row in final if row["action"] == "drop"}
    assert kept.keys() | dropped.keys() == {row["doc_uid"] for row in documents}
    assert not kept.keys() & dropped.keys()
    copies = [row for row in dropped.values() if row["rule"] == "fuzzy-duplicate"]
    assert copies and all(row["evidence_uid"] in kept for row in copies)
    assert all(row["cell"] == f"{row['domain']}-q{row['level']}" for row in kept.values())


def test_tables_for_the_pages(voyage):
    folder = voyage / "select" / "tables"
    names = {"flow", "reasons", "duplicates-accepted", "duplicates-rejected", "domains", "quality"}
    assert {file.stem for file in folder.iterdir()} == names
    for name in names:
        found = json.loads((folder / f"{name}.json").read_text())
        assert set(found) == {"title", "columns", "rows", "text"}
        assert found["rows"] and all(len(row) == len(found["columns"]) for row in found["rows"])
    accepted = json.loads((folder / "duplicates-accepted.json").read_text())
    assert len(accepted["rows"]) == 5 and all(0 < len(row[4]) <= 200 for row in accepted["rows"])


def test_the_same_input_gives_the_same_bytes_in_another_process(voyage, tmp_path):
    """Another hash seed and another number of threads."""
    code = "import sys, pathlib; from tests.corpus.test_voyage import curate; curate(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, env=environment, cwd=Path(__file__).parents[2]
    )
    files = sorted(file.relative_to(voyage) for file in voyage.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    for file in files:
        if file.name != "placement.json":
            assert (voyage / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_source_code_and_verse_have_domains_of_their_own(voyage):
    source = {row["doc_uid"]: row["source"] for row in table(voyage, "documents", "documents")}
    counts = defaultdict(lambda: defaultdict(int))
    for row in table(voyage, "domains", "domains"):
        counts[row["name"]][source[row["doc_uid"]]] += 1
    assert 2 <= len(counts) <= 4
    purity = sum(max(parts.values()) for parts in counts.values()) / len(source)
    assert purity > 0.85


def test_scores_follow_the_share_that_is_intact(voyage):
    """Damage that the model never saw in training (other seeds): the mean score falls as the damage grows."""
    texts = planting.real_texts("jargon", 40) + planting.real_texts("sqlite-source", 20)
    shares = (0.0, 0.3, 0.6, 0.9)
    damaged = [quality.damage(text, share, f"test {row}") for share in shares for row, text in enumerate(texts)]
    uids = [hexdigest(str(row)) for row in range(len(damaged))]
    sound = [row < len(texts) for row in range(len(damaged))]
    code = [row % len(texts) >= 40 for row in range(len(damaged))]
    score, fit = quality.scores(uids, damaged, sound, code, QualityConfig())
    means = score.reshape(len(shares), -1).mean(axis=1)
    assert fit["trained"] and list(means) == sorted(means, reverse=True)
    assert means[0] > 0.8 and means[3] < 0.4


def test_damage_hits_the_share_it_says():
    text = "\n".join(f"line number {row} has seven words" for row in range(100))
    for seed in range(10):
        changed = quality.damage(text, 0.3, str(seed)).split("\n")
        assert 25 <= sum(old != new for old, new in zip(text.split("\n"), changed)) <= 30


def test_a_handful_of_documents_goes_through(tmp_path):
    """Own text may be three small files: nothing to learn from, no domains, still a split and a ledger."""
    texts = [planting.words(random.Random(seed), 300) + "\nthe end of it" for seed in range(4)]
    inputs = {"documents": planting.collect(tmp_path / "d", {"own": planting.write_corpus(tmp_path / "t", texts)})}
    inputs["duplicates"] = planting.stage(find_duplicates, DuplicatesConfig(), inputs, tmp_path / "u")
    inputs["quality"] = planting.stage(judge, QualityConfig(), inputs, tmp_path / "q")
    inputs["domains"] = planting.stage(assign, DomainsConfig(), inputs, tmp_path / "o")
    out = planting.stage(select.select, SelectConfig(), inputs, tmp_path / "s")
    splits = [row["split"] for row in planting.rows(out / "kept.parquet")]
    assert sorted(splits) == ["heldout", "train", "train", "train"]


def document(uid, **changes):
    row = dict(doc_uid=uid, source="s", kind="k", file="f", start=0, num_bytes=1000, cluster=uid, covered_by=None)
    row.update(reason=None, containment=None, score=1.0, level=4, drop_rule=None, evidence="", domain="all")
    return {**row, **changes}


rows_strategy = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 4), st.booleans(), st.integers(1, 5000), st.sampled_from("abc")),
    min_size=2,
    max_size=40,
)


@given(rows_strategy)
@settings(max_examples=100, deadline=None)
def test_split_and_books_for_any_judgements(found):
    """Conservation per source; no cluster in both splits; no copy goes unless the document that covers it stays."""
    first: dict[int, str] = {}
    rows = []
    for place, (group, level, bad, size, domain) in enumerate(found):
        uid = f"{place:032x}"
        cover = first.setdefault(group, uid)
        copy = {"covered_by": cover, "reason": "fuzzy", "containment": 0.9} if cover != uid else {}
        rule = "too-few-words" if bad else None
        row = document(uid, cluster=cover, level=level, drop_rule=rule, num_bytes=size, domain=domain, **copy)
        rows.append({**row, "source": domain})
    config = SelectConfig(heldout_bytes=5000)
    heldout = select.heldout_clusters(rows, config)
    decisions = select.decide(rows, heldout, config)
    books = ledger.balance(
        {r["doc_uid"]: r["source"] for r in rows}, {r["doc_uid"]: r["num_bytes"] for r in rows}, decisions
    )
    assert sum(book["in"]["documents"] for book in books.values()) == len(rows)
    final = ledger.final(decisions)
    for row in rows:
        decision = final[row["doc_uid"]]
        if decision.action != "drop":
            assert (decision.action == "heldout") == (row["cluster"] in heldout)
        if decision.rule == "fuzzy-duplicate":
            assert final[decision.evidence_uid].action != "drop"


def test_a_new_rule_does_not_move_the_split():
    rows = [document(f"{place:032x}") for place in range(50)]
    worse = [{**row, "level": 0, "drop_rule": "x"} if place % 2 else row for place, row in enumerate(rows)]
    assert select.heldout_clusters(rows, SelectConfig()) == select.heldout_clusters(worse, SelectConfig())


def test_a_source_that_loses_too_much_is_named_with_its_reasons():
    rows = [document(f"{place:032x}", drop_rule="no-sentences" if place < 6 else None) for place in range(10)]
    decisions = select.decide(rows, set(), SelectConfig())
    books = ledger.balance({r["doc_uid"]: "s" for r in rows}, {r["doc_uid"]: 1000 for r in rows}, decisions)
    with pytest.raises(ValueError, match=r"source 's' would lose 60% .*no-sentences 60%.*max_loss_share"):
        select._check_losses(books, SelectConfig())
    select._check_losses(books, SelectConfig(max_loss_share=0.6))


def test_a_lost_document_is_noticed():
    decisions = select.decide([document("a")], set(), SelectConfig())
    with pytest.raises(AssertionError, match="without a final decision"):
        ledger.balance({"a": "s", "b": "s"}, {"a": 1, "b": 1}, decisions)
