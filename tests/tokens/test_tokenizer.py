"""The tokenizer: exact, deterministic, blind to control tokens in text."""

import json
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.tokens import tokenizer as module
from noonsight.tokens.tokenizer import (
    SPECIALS,
    AlphabetConfig,
    TokenizerConfig,
    load,
    train_tokenizer,
    write_alphabet,
)
from tests.tokens.voyage import run_tokenizer, sentence, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    write_corpus(root, [sentence(rng, 40) for _ in range(60)])
    return root


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return load(run_tokenizer(corpus))


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(any_text, st.sampled_from([*SPECIALS, " 12", "\r\n", "\0", "\ufeff", "é", "👩‍🚀"]))))
def test_round_trip_is_exact_and_text_never_gives_a_control_token(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert min(ids, default=len(SPECIALS)) >= len(SPECIALS)


def test_bytes_that_are_no_text_have_their_bytes(tokenizer):
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)}
    assert all(bytes([byte]) in by_bytes for byte in range(256))
    cut = by_bytes[b"\xe2"]
    assert tokenizer.decode([cut]) == "\ufffd" and tokenizer.name(cut) == "<0xE2>"
    assert tokenizer.token_bytes(tokenizer.eos) == b"" and tokenizer.name(tokenizer.eos) == SPECIALS[0]


def test_encode_adds_nothing_and_eos_is_id_zero(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.eos == 0
    assert 0 not in tokenizer.encode("calm sea")


def test_digits_are_single_tokens(tokenizer):
    assert [tokenizer.name(i) for i in tokenizer.encode("12 12 12")] == ["1", "2", " ", "1", "2", " ", "1", "2"]


def test_two_trainings_give_the_same_bytes_and_heldout_text_has_no_part_in_them(corpus, tmp_path):
    rng = np.random.default_rng(0)
    texts = [sentence(rng, 40) for _ in range(60)]
    secret = "zyzzyva " * 500
    write_corpus(tmp_path, [*texts, secret], splits=["train"] * 60 + ["heldout"])
    first = (corpus / "tokenizer" / "tokenizer.json").read_bytes()
    assert (run_tokenizer(tmp_path) / "tokenizer.json").read_bytes() == first


def test_facts_are_those_of_the_file(corpus, tmp_path):
    config = TokenizerConfig(vocab_size=300)
    artifact = train_tokenizer(config, {"documents": corpus / "documents", "select": corpus / "select"}, tmp_path)
    tokenizer = load(tmp_path)
    assert artifact.facts["digest"] == tokenizer.digest
    assert 1 < artifact.facts["bytes_per_token"] < 8
    assert tokenizer.encode(artifact.facts["odd_token"])[0] >= len(SPECIALS)


def test_too_little_text_and_too_small_a_vocabulary_are_refused(tmp_path):
    write_corpus(tmp_path, ["calm"])
    inputs = {"documents": tmp_path / "documents", "select": tmp_path / "select"}
    with pytest.raises(ValueError, match=r"kept.parquet.* 4 bytes .*vocab_size 4096.*smaller vocab_size"):
        train_tokenizer(TokenizerConfig(), inputs, tmp_path)
    with pytest.raises(ValueError, match="need 264"):
        train_tokenizer(TokenizerConfig(vocab_size=100), inputs, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_long_text_is_cut_without_changing_ids(tokenizer, monkeypatch):
    rng = np.random.default_rng(1)
    text = "".join(sentence(rng, 12) + rng.choice(["\n\n", "  ", "\t", "x  y", " 1 ", "\u00a0", ""]) for _ in range(60))
    whole = tokenizer.encode(text)
    monkeypatch.setattr(module, "PIECE", 40)
    assert len(list(module._pieces(text))) > 20
    assert tokenizer.encode(text) == whole
    assert tokenizer.encode_batch(["", text, "sea"]) == [[], whole, tokenizer.encode("sea")]


@pytest.mark.parametrize(
    "text", ["a" * 100_000, "^" * 1_000_000, " " * 200_000, "1" * 200_000, "日本" * 50_000, "\n" * 200_000]
)
def test_pathological_text_takes_less_than_two_seconds(tokenizer, text):
    start = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - start < 2
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_training_on_one_endless_word_takes_less_than_two_seconds(tmp_path):
    rng = np.random.default_rng(0)
    write_corpus(tmp_path, ["a" * 300_000, "=-" * 100_000, " " * 300_000, *(sentence(rng, 40) for _ in range(40))])
    start = time.process_time()
    run_tokenizer(tmp_path, vocab_size=290)
    assert time.process_time() - start < 2


def test_time_is_linear_in_length(tokenizer):
    rng = np.random.default_rng(2)
    text = "".join(sentence(rng, 200) for _ in range(1000))
    seconds = []
    for size in (len(text) // 8, len(text)):
        start = time.process_time()
        tokenizer.encode(text[:size])
        seconds.append(time.process_time() - start)
    assert seconds[1] < 8 * seconds[0] * 3


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_memory_is_flat_over_unique_words(tokenizer):
    """A quarter of a million unseen words: a cache of words without bound would keep them all."""
    rng = np.random.default_rng(3)

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def encode_unseen(num_texts):
        for _ in range(num_texts):
            letters = rng.integers(97, 123, size=(250, 20), dtype=np.uint8)
            tokenizer.encode(" ".join(bytes(word).decode() for word in letters))

    encode_unseen(100)  # fills the bounded cache
    before = resident_bytes()
    encode_unseen(1000)
    assert resident_bytes() - before < 16 << 20


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(ValueError, match=r"text 1 .*U\+D800.* character 2"):
        tokenizer.encode_batch(["fine", "ab\ud800"])


def test_damaged_and_foreign_files_are_refused_by_name(corpus, tokenizer, tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        load(tmp_path)
    good = (corpus / "tokenizer" / "tokenizer.json").read_text()
    file.write_text(good[: len(good) // 2])
    with pytest.raises(ValueError, match=r"tokenizer.json is no readable tokenizer"):
        load(tmp_path)
    file.write_text(json.dumps(json.loads(good) | {"normalizer": {"type": "NFC"}}))
    with pytest.raises(ValueError, match="round trip"):
        load(tmp_path)
    file.write_text(good.replace(SPECIALS[0], "<|stop|>"))
    with pytest.raises(ValueError, match=r"no control token <\|end\|>"):
        load(tmp_path)


def test_an_alphabet_spells_and_refuses_what_it_cannot(tmp_path):
    facts = write_alphabet(AlphabetConfig(characters="ACGTN"), {}, tmp_path).facts
    letters = load(tmp_path)
    first = len(SPECIALS)
    assert (letters.vocab_size, letters.eos, facts["vocab_size"]) == (first + 5, 0, first + 5)
    assert letters.encode("GATTACAN") == [first + "ACGTN".index(base) for base in "GATTACAN"]
    assert letters.decode(letters.encode("GATTACAN" * 20_000)) == "GATTACAN" * 20_000
    with pytest.raises(ValueError, match=r"'x' at character 2, and this tokenizer knows only 'ACGNT'"):
        letters.encode("ACxG")


@pytest.mark.parametrize("characters", ["", "ACCA", "AÉ"])
def test_an_alphabet_that_is_none_is_refused(characters):
    with pytest.raises(ValueError, match="each once"):
        AlphabetConfig(characters=characters)
