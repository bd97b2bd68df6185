"""Rules for single documents: is this text, and does it say something more than once too often?

Limits follow Gopher (Rae et al. 2021, table A1) and C4 (Raffel et al. 2020, section 2.2), loosened where a corpus of
plays, dictionaries and source code shows that they speak of web pages only. A rule never looks at the source of a
document. Code is recognised by its lines and measured with its own limits; rules about English words apply to text in
Latin letters only. Each finding says the rule, the value and the limit, so that a decision can be checked by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields

import numpy as np

from noonsight.corpus.shingles import shingles, word_hashes

STOP_WORDS = frozenset("the be to of and that have with is in a it for not on you as this but his".split())
_CODE_LINE = re.compile(
    r"[;{}]\s*$|^\s*(#\s*(include|define|if|ifn?def|endif|else|undef)\b|//|/\*|\*\*|\*/|def |import |return\b)"
)


@dataclass(frozen=True, kw_only=True)
class RulesConfig:
    """Limits. `min_` and `max_` limits are themselves allowed: a value must pass beyond one to be a finding."""

    min_words: int = 15
    min_letters: float = 0.45  # letters among the characters that are no white space
    min_letters_code: float = 0.25
    max_symbols: float = 0.35  # punctuation among the characters that are no white space
    max_symbols_code: float = 0.65
    max_digits: float = 0.35
    min_mean_word: float = 2.0  # letters
    max_mean_word: float = 12.0
    min_stop_words: int = 2  # different ones, in prose of Latin letters
    max_broken: float = 0.002  # replacement and control characters
    max_line: int = 20_000  # characters of the longest line
    max_repeated_lines: float = 0.40  # characters in lines that occurred before
    max_repeated_lines_code: float = 0.50
    max_repeated_paragraphs: float = 0.30  # characters in paragraphs that occurred before (Marin, issue #7788)
    max_top_phrase: float = 0.20  # share of words inside the most frequent run of three words
    max_repeated_runs: float = 0.50  # share of runs of ten words that occurred before

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"RulesConfig.{limit.name}={value} is negative, and no measure is. Use 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that a document breaks: the measured value and the limit it passes."""

    rule: str
    value: float
    limit: float

    @property
    def evidence(self) -> str:
        return f"{self.value:g} (limit {self.limit:g})"


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What the rules look at; also features of the quality model."""

    words: int
    letters: float
    symbols: float
    digits: float
    mean_word: float
    stop_words: int
    latin: bool
    code: bool
    broken: float
    longest_line: int
    repeated_lines: float
    repeated_paragraphs: float
    top_phrase: float
    repeated_runs: float
    placeholder: bool


def findings(m: Measures, config: RulesConfig) -> list[Finding]:
    """Rules that a text of these measures breaks, in the order below. Empty means none."""
    ceiling = {
        "too-many-symbols": (m.symbols, config.max_symbols_code if m.code else config.max_symbols),
        "too-many-digits": (m.digits, config.max_digits),
        "words-too-long": (m.mean_word, config.max_mean_word if m.latin else float("inf")),
        "broken-characters": (m.broken, config.max_broken),
        "line-too-long": (m.longest_line, config.max_line),
        "repeated-lines": (m.repeated_lines, config.max_repeated_lines_code if m.code else config.max_repeated_lines),
        "repeated-paragraphs": (m.repeated_paragraphs, config.max_repeated_paragraphs),
        "one-phrase": (m.top_phrase, config.max_top_phrase),
        "repeated-runs": (m.repeated_runs, config.max_repeated_runs),
        "placeholder-text": (float(m.placeholder), 0.0),
    }
    floor = {
        "too-few-words": (m.words, config.min_words),
        "too-few-letters": (m.letters, config.min_letters_code if m.code else config.min_letters),
        "words-too-short": (m.mean_word, config.min_mean_word if m.latin else 0.0),
        "no-sentences": (m.stop_words, config.min_stop_words if m.latin and not m.code else 0),
    }
    broken = [Finding(rule=rule, value=value, limit=limit) for rule, (value, limit) in floor.items() if value < limit]
    return broken + [
        Finding(rule=rule, value=value, limit=limit) for rule, (value, limit) in ceiling.items() if value > limit
    ]


def measure(text: str) -> Measures:
    """All measures of a text. Shares are in [0, 1], rounded to six digits."""
    counts = Counter(text)
    for space in [ch for ch in counts if ch.isspace()]:
        del counts[space]
    size = max(1, counts.total())
    letters = sum(count for ch, count in counts.items() if ch.isalpha())
    words = text.lower().split()
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return Measures(
        words=len(words),
        letters=round(letters / size, 6),
        symbols=round(sum(count for ch, count in counts.items() if not ch.isalnum()) / size, 6),
        digits=round(sum(count for ch, count in counts.items() if ch.isdigit()) / size, 6),
        mean_word=round(letters / max(1, len(words)), 6),
        stop_words=len(STOP_WORDS.intersection(words)),
        latin=sum(count for ch, count in counts.items() if ch.isalpha() and ch.isascii()) >= 0.7 * letters,
        code=sum(bool(_CODE_LINE.search(line)) for line in lines) > 0.25 * max(1, len(lines)),
        broken=round(sum(count for ch, count in counts.items() if ch == "\ufffd" or ch < " ") / size, 6),
        longest_line=max(map(len, lines), default=0),
        repeated_lines=_repeated([line for line in lines if len(line) > 3]),
        repeated_paragraphs=_repeated([part.strip() for part in text.split("\n\n") if len(part.strip()) > 60]),
        top_phrase=_top_phrase(words),
        repeated_runs=_repeated_runs(word_hashes([text])[0]),
        placeholder="lorem ipsum" in text.lower(),
    )


def _repeated(parts: list[str]) -> float:
    """Share of the characters that stand in parts which occurred before."""
    total = sum(map(len, parts))
    again = sum(len(part) * (count - 1) for part, count in Counter(parts).items())
    return round(again / total, 6) if total else 0.0


def _top_phrase(words: list[str]) -> float:
    """Share of the words covered by the most frequent run of three words, if it occurs at least four times."""
    runs = Counter(zip(words, words[1:], words[2:]))
    if not runs:
        return 0.0
    count = max(runs.values())
    return round(min(1.0, 3 * count / len(words)), 6) if count > 3 else 0.0


def _repeated_runs(hashed: np.ndarray, size: int = 10) -> float:
    """Share of the runs of ten words that occurred before."""
    total = len(hashed) - size + 1
    return round(1.0 - len(shingles(hashed, size)) / total, 6) if total > 0 else 0.0
