"""Duplicates: planted ones are found, different ones stay, nothing collapses (cases 1, 2, 22, 34, 35; D1)."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.corpus import dedup, shingles
from noonsight.corpus.dedup import DuplicatesConfig, find_duplicates
from tests.corpus import planting


def run(tmp_path, texts, config=None):
    """Returns {place: (covering place, reason, containment)} and the groups {place: smallest place of its group}."""
    folder = planting.write_corpus(tmp_path / "text", texts)
    documents = planting.collect(tmp_path / "documents", {"text": folder})
    out = planting.stage(find_duplicates, config or DuplicatesConfig(), {"documents": documents}, tmp_path / "out")
    place = planting.by_place(documents)
    found = planting.rows(out / "duplicates.parquet")
    covers = {
        place[row["doc_uid"]]: (place[row["covered_by"]], row["reason"], row["containment"])
        for row in found
        if row["covered_by"]
    }
    return covers, {place[row["doc_uid"]]: row["cluster"] for row in found}, out, place


def recall(covers, originals):
    """Share of the pairs (original, planted copy) of which one covers the other; the copy lies `originals` further."""
    hits = sum(
        covers.get(place + originals, (None,))[0] == place or covers.get(place, (None,))[0] == place + originals
        for place in range(originals)
    )
    return hits / originals


@pytest.mark.parametrize("kind", ["boilerplate", "case", "edits", "truncation"])
def test_planted_copies_are_found(tmp_path, kind):
    rng = random.Random(kind)
    texts = planting.real_texts("jargon", 30) + planting.real_texts("sqlite-source", 20)
    change = {
        "boilerplate": planting.with_boilerplate,
        "case": planting.with_other_case,
        "edits": lambda text: planting.with_edits(text, rng),
        "truncation": lambda text: planting.truncated(text, rng),
    }[kind]
    covers, _, _, _ = run(tmp_path, texts + [change(text) for text in texts])
    assert recall(covers, len(texts)) >= 0.95
    assert len(covers) <= len(texts)  # never both of a pair


def test_one_template_with_different_bodies_is_kept(tmp_path):
    covers, _, _, _ = run(tmp_path, planting.templated(random.Random(3), 300))
    assert len(covers) <= 3


def test_many_edited_copies_of_one_document_become_one(tmp_path):
    rng = random.Random(4)
    text = planting.real_texts("jargon", 1)[0]
    covers, _, _, _ = run(tmp_path, [text] + [planting.with_edits(text, rng) for _ in range(30)])
    assert len(covers) == 30


def test_long_unrelated_books_never_cluster(tmp_path):
    texts = [planting.words(random.Random(seed), 3000) for seed in range(40)]  # 3,000 words out of the same 3,125
    covers, groups, _, _ = run(tmp_path, texts)
    assert not covers
    assert len(set(groups.values())) == 40


def test_exact_duplicates_are_all_listed_and_name_one_that_stays(tmp_path):
    base = planting.words(random.Random(1), 200)
    covers, groups, _, _ = run(
        tmp_path, [base, base.upper(), f"\n\n{base}  ", base, planting.words(random.Random(2), 200)]
    )
    assert covers == {1: (0, "exact", 1.0), 2: (0, "exact", 1.0), 3: (0, "exact", 1.0)}
    assert len({groups[place] for place in range(4)}) == 1 and groups[4] != groups[0]


def test_an_exact_copy_of_a_covered_document_names_the_document_that_stays(tmp_path):
    whole = planting.words(random.Random(1), 400)
    part = whole[: len(whole) * 3 // 4]
    covers, _, _, _ = run(tmp_path, [part, part, whole])
    assert covers[0][0] == covers[1][0] == 2
    assert covers[1][1] == "fuzzy"


def test_stars_only_no_transitive_deletion(tmp_path):
    """A chain in which each text shares 60 % with the next: all stay, though each is like its neighbour."""
    stream = planting.words(random.Random(5), 4000).split()
    texts = [" ".join(stream[start : start + 500]) for start in range(0, 3000, 200)]
    covers, groups, _, _ = run(tmp_path, texts)
    assert not covers
    assert len(set(groups.values())) == 1  # but the split keeps them together


def test_every_cover_is_retained_and_contains_what_is_claimed(tmp_path):
    """Recomputed from text by other code than the stage's."""
    rng = random.Random(6)
    texts = planting.real_texts("sqlite-docs", 40)
    texts += [planting.truncated(text, rng) for text in texts] + [planting.with_edits(text, rng) for text in texts]
    covers, groups, out, place = run(tmp_path, texts)

    def grams(text):
        found = shingles._WORD.findall(text.lower())
        return set(zip(found, found[1:], found[2:]))

    assert covers
    for member, (cover, reason, containment) in covers.items():
        assert cover not in covers
        assert groups[member] == groups[cover]
        mine, other = grams(texts[member]), grams(texts[cover])
        assert len(mine & other) / len(mine) == pytest.approx(containment, abs=1e-5)
        assert containment >= 0.75 or reason == "exact"
    verdicts = [row for row in planting.rows(out / "pairs.parquet") if row["verdict"] == "rejected"]
    assert all(row["doc_uid"] in place and row["other_uid"] in place for row in verdicts)


def test_groups_equal_brute_force():
    rng = np.random.default_rng(0)
    config = DuplicatesConfig(group_documents=1000)
    pool = rng.integers(0, 2**63, 300, dtype=np.uint64)
    sets = [np.unique(rng.choice(pool, rng.integers(1, 40))) for _ in range(60)]
    groups, _ = dedup.near_groups(sets, [], config)
    parent = list(range(60))

    def root(node):
        while parent[node] != node:
            node = parent[node]
        return node

    for left in range(60):
        for right in range(left):
            shared = len(set(sets[left].tolist()) & set(sets[right].tolist()))
            if shared and shared >= config.group_containment * min(len(sets[left]), len(sets[right])):
                low, high = sorted((root(left), root(right)))
                parent[high] = low
    assert groups.tolist() == [root(node) for node in range(60)]


def test_what_the_cap_leaves_out_is_counted(tmp_path):
    config = DuplicatesConfig(max_candidates=2)
    texts = planting.templated(random.Random(3), 10)
    folder = planting.write_corpus(tmp_path / "text", texts)
    documents = planting.collect(tmp_path / "documents", {"text": folder})
    (tmp_path / "out").mkdir()
    facts = find_duplicates(config, {"documents": documents}, tmp_path / "out").facts
    assert facts["pairs_compared"] + facts["pairs_not_compared"] == 45
    assert facts["pairs_not_compared"] == sum(max(0, place - 2) for place in range(10))


@given(jaccard=st.sampled_from([0.3, 0.5, 0.7]))
@settings(max_examples=3, deadline=None)
def test_the_s_curve_is_what_happens(jaccard):
    banding = shingles.Banding(num_bands=16, num_rows=3)
    rng = np.random.default_rng(int(jaccard * 10))
    size = 300
    shared = round(2 * size * jaccard / (1 + jaccard))
    left, right = [], []
    for _ in range(300):
        pool = rng.integers(0, 2**63, 2 * size - shared, dtype=np.uint64)
        left.append(np.sort(pool[:size]))
        right.append(np.sort(pool[size - shared :]))
    met = (shingles.sketch(left, banding).bands == shingles.sketch(right, banding).bands).any(axis=1).mean()
    assert met == pytest.approx(banding.chance(jaccard), abs=0.08)


def test_sketches_of_unlike_parameters_do_not_join():
    sets = [np.arange(10, dtype=np.uint64)]
    one = shingles.sketch(sets, shingles.Banding())
    assert len(shingles.concatenate(one, one).bands) == 2
    with pytest.raises(ValueError, match="Sketch both with one Banding"):
        shingles.concatenate(one, shingles.sketch(sets, shingles.Banding(num_rows=4)))


def test_hashes_of_shingles_are_golden():
    """Identity of shipped tables hangs on these: a new version of a hash library must not move them (D5)."""
    found = shingles.shingles(shingles.word_hashes(["The quick, brown fox\njumps"])[0], 3)
    assert found.tolist() == shingles.shingles(shingles.word_hashes(["the QUICK brown fox jumps!"])[0], 3).tolist()
    assert [f"{value:016x}" for value in found.tolist()] == ["21210a34864ac393", "6abc97e138127c46", "8921d885eb98a835"]


def test_a_threshold_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"containment=1\.5"):
        DuplicatesConfig(containment=1.5)
