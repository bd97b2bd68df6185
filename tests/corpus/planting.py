"""Small corpora for the tests: text written to disk, run through the stages, and copies planted on purpose."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from noonsight.corpus import sources
from noonsight.logbook.record import Placement, encode

VOYAGES = Path(__file__).parents[2] / "assets" / "voyages"
KINDS = {
    "shakespeare": "drama",
    "milton": "verse",
    "jargon": "dictionary",
    "sqlite-docs": "reference",
    "sqlite-source": "code",
}


def collect(out: Path, folders: Mapping[str, Path], **options) -> Path:
    """Run `scan` and `collect` on folders; returns the stage's folder."""
    found = tuple(sources.scan(folder, name=name, kind=KINDS.get(name, "prose")) for name, folder in folders.items())
    return collect_config(out, sources.CollectConfig(sources=found, **options), folders)


def collect_config(out: Path, config: sources.CollectConfig, folders: Mapping[str, Path]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    placement = Placement(locations={name: str(folder) for name, folder in folders.items()})
    (out / "placement.json").write_bytes(encode(placement))
    sources.collect(config, {}, out)
    return out


def write_corpus(root: Path, texts: Sequence[str]) -> Path:
    """One file per text, named by its place: 0000.txt, 0001.txt, ..."""
    root.mkdir(parents=True, exist_ok=True)
    for place, text in enumerate(texts):
        (root / f"{place:04d}.txt").write_text(text, encoding="utf-8")
    return root


def stage(function, config, inputs: Mapping[str, Path], out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    function(config, inputs, out)
    return out


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def by_place(documents: Path) -> dict[str, int]:
    """uid -> number of the file that `write_corpus` made."""
    return {row["doc_uid"]: int(Path(row["file"]).stem) for row in rows(documents / "documents.parquet")}


def words(rng: random.Random, count: int, stem: str = "w") -> str:
    """Text of invented words, of 3,125 different ones, in lines of ten."""
    chosen = [stem + "".join(rng.choices("aeiou", k=5)) for _ in range(count)]
    return "\n".join(" ".join(chosen[start : start + 10]) for start in range(0, count, 10))


def real_texts(source: str, count: int, low: int = 3000, high: int = 9000) -> list[str]:
    """Documents of the shipped text, in order of files, of some 3 to 9 kB."""
    found = []
    for file in sorted((VOYAGES / source).glob("*.txt")):
        found += [part for part in file.read_text(encoding="utf-8").split("\f") if low <= len(part) <= high]
    return found[:count]


def with_boilerplate(text: str) -> str:
    menu = "Home Products Contact us About this site Read the terms before use Your privacy matters to us all"
    return f"{menu}\n\n{text}\n\nCopyright is explained on another page. {menu}. Back to the top of this page."


def with_other_case(text: str) -> str:
    return text.upper().replace("\n", "\n\n  ")


def with_edits(text: str, rng: random.Random) -> str:
    """Two words in a hundred replaced."""
    parts = text.split(" ")
    for place in rng.sample(range(len(parts)), len(parts) // 50):
        parts[place] = f"edit{rng.randrange(10**6)}"
    return " ".join(parts)


def truncated(text: str, rng: random.Random) -> str:
    """The first 40 to 90 %."""
    return text[: round(len(text) * rng.uniform(0.4, 0.9))]


def templated(rng: random.Random, count: int) -> list[str]:
    """Documents of one template (four words in five are the same) with bodies of their own."""
    frame = words(random.Random(99), 240, "frame")
    return [f"{frame}\n{words(rng, 60, 'body')}\nYours faithfully" for _ in range(count)]
