"""Quality of each document: rules that drop, and a score that sorts what is left into five levels.

The score estimates *how much of a text is intact*. Its labels are made, not collected: windows of the documents
themselves count as intact, and the same windows with a known share of their lines damaged (words shuffled, letters
mistyped, lines repeated, navigation, symbols, digits, wrong decoding) count as intact by the rest. A logistic model
on hashed byte trigrams and the measures of `rules` learns that share; isotonic regression calibrates it, per type
(code or other text), on folds that the model did not see. So a level means the same for every type: level 4, at least
96 % of the text is intact. Every score comes from a model that saw no window of its document's fold. Invariant: same
documents, same scores, on any number of threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from noonsight.corpus.document import read_documents, write_table
from noonsight.corpus.rules import RulesConfig, findings, measure
from noonsight.logbook.record import Artifact

QUALITY = pa.schema(
    [
        ("doc_uid", pa.string()),
        ("score", pa.float64()),  # estimated share of the text that is intact, calibrated
        ("level", pa.int64()),  # 0 (damaged) ... 4 (intact)
        ("drop_rule", pa.string()),  # first rule that the document breaks
        ("evidence", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """Rules, and the size of the model: windows in characters, trigram bins, windows to train on."""

    rules: RulesConfig = field(default_factory=RulesConfig)
    window: int = 1000
    levels: tuple[float, float, float, float] = (0.5, 0.75, 0.9, 0.96)  # scores at which levels 1 to 4 begin
    num_windows: int = 3  # begin, middle, end
    num_bins: int = 4096
    num_folds: int = 2
    max_training_documents: int = 1200

    def __post_init__(self) -> None:
        if list(self.levels) != sorted(set(self.levels)):
            raise ValueError(f"QualityConfig.levels={self.levels} must rise. Give four scores in growing order.")
        if self.num_folds < 2 or self.num_windows < 1 or self.window < 100:
            raise ValueError("QualityConfig needs num_folds >= 2, num_windows >= 1 and window >= 100 characters.")


@dataclass(frozen=True)
class _Windows:
    """Training windows as rows: features, label (share intact), fold, type."""

    features: np.ndarray
    intact: np.ndarray
    fold: np.ndarray
    code: np.ndarray


def judge(config: QualityConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: write `quality.parquet`, one row per document, sorted by `doc_uid`."""
    documents = read_documents(inputs["documents"], ["text"])
    uids, texts = documents["doc_uid"].to_pylist(), documents["text"].to_pylist()
    measures = [measure(text) for text in texts]
    broken = [findings(measured, config.rules) for measured in measures]
    sound = [not found for found in broken]
    score, fit = scores(uids, texts, sound, [measured.code for measured in measures], config)
    levels = np.digitize(score, config.levels)
    rows = []
    for row, uid in enumerate(uids):
        rule = broken[row][0].rule if broken[row] else None
        evidence = "; ".join(f"{found.rule} {found.evidence}" for found in broken[row])
        rows.append((uid, float(score[row]), int(levels[row]), rule, evidence))
    columns = [pa.array(column, type=kind.type) for column, kind in zip(zip(*rows), QUALITY)]
    write_table(out / "quality.parquet", pa.table(columns, schema=QUALITY))
    dropped = [found[0].rule for found in broken if found]
    facts = {
        "documents": len(uids),
        "rule_drops": {rule: dropped.count(rule) for rule in sorted(set(dropped))},
        "levels": np.bincount(levels, minlength=5).tolist(),
        "model": fit,
    }
    return Artifact(facts=facts)


def scores(
    uids: list[str], texts: list[str], sound: list[bool], code: list[bool], config: QualityConfig
) -> tuple[np.ndarray, dict]:
    """Calibrated score f64[documents] in [0, 1], and how well the model does on windows of the other fold.

    Labels come from the documents that are `sound` (break no rule); with fewer than ten of them nothing can be learned:
    every score is 1, and the facts say so. `code` tells apart the two types that are calibrated on their own.
    """
    folds = np.array([int(uid[:8], 16) % config.num_folds for uid in uids])
    chosen = [row for row in sorted(range(len(uids)), key=lambda row: uids[row][8:]) if sound[row]]
    chosen = chosen[: config.max_training_documents]
    if len(chosen) < 10 or len(set(folds[chosen].tolist())) < config.num_folds:
        reason = f"{len(chosen)} sound documents are too few to learn from"
        return np.ones(len(uids)), {"trained": False, "reason": reason}
    from threadpoolctl import threadpool_limits

    types = np.array(code)
    training = _training_windows(chosen, uids, texts, folds, types, config)
    windows = [_cut(text, config) for text in texts]
    own = np.concatenate([[features(window, config.num_bins) for window in parts] for parts in windows])
    owner = np.repeat(np.arange(len(texts)), [len(parts) for parts in windows])
    raw_own, raw_training = np.empty(len(own)), np.empty(len(training.intact))
    with threadpool_limits(1):  # sums in one order, whatever the machine
        for fold in range(config.num_folds):
            predict = _fit(training, training.fold != fold)
            mine, held = folds[owner] == fold, training.fold == fold
            raw_own[mine], raw_training[held] = predict(own[mine]), predict(training.features[held])
    calibrated, fit = _calibrate(raw_own, types[owner], raw_training, training)
    total = np.bincount(owner, weights=calibrated, minlength=len(texts))
    return np.round(total / np.bincount(owner, minlength=len(texts)), 4), fit


def features(text: str, num_bins: int) -> np.ndarray:
    """f32[num_bins + 8]: hashed byte trigrams, square-rooted and of length one, then eight measures of the text."""
    raw = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32)
    row = np.zeros(num_bins + 8, dtype=np.float32)
    if len(raw) > 2:
        key = (raw[:-2] << 16 | raw[1:-1] << 8 | raw[2:]) * np.uint32(2654435761)
        counts = np.sqrt(np.bincount((key >> np.uint32(12)) % num_bins, minlength=num_bins))
        row[:num_bins] = counts / np.linalg.norm(counts)
    m = measure(text)
    form = (m.letters, m.symbols, m.digits, min(m.mean_word, 12.0) / 12.0)
    row[num_bins:] = (*form, m.repeated_lines, m.top_phrase, m.repeated_runs, min(m.stop_words, 10) / 10.0)
    return row


def damage(text: str, share: float, seed: str) -> str:
    """`text` with `share` of its lines damaged in one way that the seed picks. The same seed damages the same way."""
    rng = random.Random(seed)
    lines = text.split("\n")
    filled = [place for place, line in enumerate(lines) if line.strip()]
    way = rng.choice(_WAYS)
    for place in rng.sample(filled, round(share * len(filled))):
        lines[place] = way(lines[place], rng, lines[filled[0]])
    return "\n".join(lines)


def _shuffle(line: str, rng: random.Random, first: str) -> str:
    words = line.split()
    rng.shuffle(words)
    return " ".join("".join(rng.sample(word, len(word))) if rng.random() < 0.5 else word for word in words)


def _mistype(line: str, rng: random.Random, first: str) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") if rng.random() < 0.3 else ch for ch in line)


def _repeat(line: str, rng: random.Random, first: str) -> str:
    return first


def _navigate(line: str, rng: random.Random, first: str) -> str:
    items = ("Home", "Login", "Next", "Share", "Menu", "Contact us", "Click here", "Read more", "Cookies", "Subscribe")
    return " | ".join(rng.sample(items, 5))


def _symbols(line: str, rng: random.Random, first: str) -> str:
    return "".join(rng.choice("#*~=-_+|<>@%^&") if ch != " " else ch for ch in line)


def _digits(line: str, rng: random.Random, first: str) -> str:
    return " ".join(str(rng.randrange(10**6)) for _ in range(1 + len(line) // 7))


def _misread(line: str, rng: random.Random, first: str) -> str:
    return "".join(rng.choice("ÃÂâ€™\u00a0\ufffd¤") + ch if rng.random() < 0.3 else ch for ch in line)


_WAYS: tuple[Callable[[str, random.Random, str], str], ...] = (
    _shuffle,
    _mistype,
    _repeat,
    _navigate,
    _symbols,
    _digits,
    _misread,
)


def _cut(text: str, config: QualityConfig) -> list[str]:
    """Windows at begin, middle and end; a short text is one window."""
    if len(text) <= config.window or config.num_windows == 1:
        return [text[: config.window]]
    last = len(text) - config.window
    starts = {round(last * part / (config.num_windows - 1)) for part in range(config.num_windows)}
    return [text[start : start + config.window] for start in sorted(starts)]


def _training_windows(
    chosen: list[int], uids: list[str], texts: list[str], folds: np.ndarray, types: np.ndarray, config: QualityConfig
) -> _Windows:
    """One window of each chosen document, once intact and twice damaged by shares spread over (0, 1]."""
    rows, intact, owner = [], [], []
    for row in chosen:
        windows = _cut(texts[row], config)
        window = windows[int(uids[row][:2], 16) % len(windows)]
        for copy in range(3):
            share = 0.0 if copy == 0 else (int(uids[row][2:6], 16) / 65536 + copy / 2) % 1.0
            rows.append(features(damage(window, share, f"{uids[row]}-{copy}") if share else window, config.num_bins))
            intact.append(1.0 - share)
            owner.append(row)
    return _Windows(np.array(rows), np.array(intact), folds[owner], types[owner])


def _fit(training: _Windows, rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Logistic regression on soft labels: each window counts as intact by its share and as damaged by the rest."""
    from scipy.sparse import csr_matrix, vstack
    from sklearn.linear_model import LogisticRegression

    x, share = csr_matrix(training.features[rows]), training.intact[rows]
    model = LogisticRegression(C=30.0, max_iter=200)
    ones = np.ones(len(share))
    model.fit(vstack([x, x]), np.concatenate([ones, 0 * ones]), sample_weight=np.concatenate([share, 1.0 - share]))
    return lambda features: model.predict_proba(csr_matrix(features))[:, 1]


def _calibrate(
    raw: np.ndarray, types: np.ndarray, raw_training: np.ndarray, training: _Windows
) -> tuple[np.ndarray, dict]:
    """Isotonic map from raw score to share intact, per type where there are 50 windows, and the fit on unseen folds."""
    from scipy.stats import spearmanr
    from sklearn.isotonic import IsotonicRegression

    calibrated, unseen = np.empty(len(raw)), np.empty(len(raw_training))
    fit: dict = {"trained": True, "windows": len(raw_training), "spearman": {}, "mean_error": {}}
    for code, name in ((True, "code"), (False, "text")):
        mine = training.code == code
        base = mine if mine.sum() >= 50 else np.ones(len(mine), bool)
        isotonic = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
        isotonic.fit(raw_training[base], training.intact[base])
        if (types == code).any():
            calibrated[types == code] = isotonic.predict(raw[types == code])
        if mine.sum() > 2:
            unseen[mine] = isotonic.predict(raw_training[mine])
            fit["spearman"][name] = round(float(spearmanr(raw_training[mine], training.intact[mine])[0]), 4)
            fit["mean_error"][name] = round(float(np.abs(unseen[mine] - training.intact[mine]).mean()), 4)
    return calibrated, fit
