"""Rules at their limits, and what they must not do to real text (cases 17, 31)."""

import random

import pytest

from noonsight.corpus import rules
from noonsight.corpus.rules import RulesConfig, findings, measure
from tests.corpus import planting

PROSE = "It is not that the sea was calm, for in the night a wind had come and with it the rain.\n"


def broken(text, **limits):
    return [found.rule for found in findings(measure(text), RulesConfig(**limits))]


def test_ordinary_text_breaks_no_rule():
    assert broken(PROSE) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("too-few-words", "It is not the end."),
        ("too-few-letters", PROSE + "0.25 | 0.75 | " * 60),
        ("too-many-symbols", PROSE + "|=+-#" * 40),
        ("too-many-digits", PROSE + "1234567 " * 40),
        (
            "no-sentences",
            "Lantern harbour granite willow copper meadow thunder violet marble forest river candle stone bridge apple",
        ),
        ("words-too-long", PROSE + "abcdefghijklmnopqrstuvwxyz" * 40),
        ("words-too-short", "a b c d e f g h i j k l m n o the of " * 2),
        ("broken-characters", PROSE + "\ufffd"),
        ("repeated-lines", PROSE * 5),
        ("repeated-paragraphs", "\n".join([PROSE * 1] * 4)),
        ("one-phrase", PROSE + "click here now " * 20),
        ("placeholder-text", PROSE + "Lorem ipsum dolor sit amet."),
        ("line-too-long", PROSE.replace("\n", " ") * 300),
    ],
)
def test_each_rule_finds_its_fault(rule, text):
    assert rule in broken(text)


def test_a_file_repeated_inside_a_document_is_found():
    """The same file ten times in one document (Marin, issue #7788)."""
    text = planting.words(random.Random(0), 200)
    assert measure("\n".join([text] * 10)).repeated_runs == pytest.approx(0.9, abs=0.02)
    assert "repeated-runs" in broken("\n".join([text] * 10))


@pytest.mark.parametrize(
    ("measured", "limit", "rule", "floor"),
    [
        ("words", "min_words", "too-few-words", True),
        ("letters", "min_letters", "too-few-letters", True),
        ("mean_word", "min_mean_word", "words-too-short", True),
        ("stop_words", "min_stop_words", "no-sentences", True),
        ("symbols", "max_symbols", "too-many-symbols", False),
        ("digits", "max_digits", "too-many-digits", False),
        ("mean_word", "max_mean_word", "words-too-long", False),
        ("longest_line", "max_line", "line-too-long", False),
        ("repeated_lines", "max_repeated_lines", "repeated-lines", False),
        ("top_phrase", "max_top_phrase", "one-phrase", False),
        ("repeated_runs", "max_repeated_runs", "repeated-runs", False),
    ],
)
def test_the_limit_itself_is_allowed(measured, limit, rule, floor):
    text = PROSE + PROSE + "In 1851 the ship (a whaler) left; in 1853 the ship came back.\n" + "and so it was " * 5
    value = getattr(measure(text), measured)
    beyond = value + (1e-6 if floor else -1e-6)
    assert value > 0
    assert rule not in broken(text, **{limit: value})
    assert rule in broken(text, **{limit: beyond})


def test_code_is_measured_as_code():
    source = planting.real_texts("sqlite-source", 12)
    assert all(measure(text).code for text in source)
    assert not any(measure(text).code for text in planting.real_texts("shakespeare", 12))
    symbols = "int f(int *p){\n  return (*p)++ + --(*p) & ~(1<<2) | ((*p)>>3);\n}\n" * 2
    assert "too-many-symbols" not in broken(symbols)


def test_text_that_is_not_in_latin_letters_needs_no_english_words():
    text = "Он не знал, что море было спокойным, потому что ночью поднялся ветер и пошёл дождь над городом. " * 2
    assert broken(text) == []


def test_few_documents_of_the_shipped_text_break_a_rule():
    texts = [text for source in planting.KINDS for text in planting.real_texts(source, 60)]
    assert sum(bool(broken(text)) for text in texts) <= len(texts) // 50


def test_a_finding_says_value_and_limit():
    found = findings(measure("Too short."), RulesConfig())[0]
    assert (found.rule, found.value, found.limit) == ("too-few-words", 2, 15)
    assert found.evidence == "2 (limit 15)"


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="max_digits=-1"):
        rules.RulesConfig(max_digits=-1)
