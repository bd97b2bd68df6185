"""Documents are part of the product: their commands exist, their places exist, their words are the code's."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1]
NOON = Path(sys.executable).parent / "noon"
PAGES = ("README.md", "CONTRIBUTING.md", "proofs/README.md", "benchmarks/README.md")
DOCUMENTS = [*(HOUSE / page for page in PAGES), *sorted((HOUSE / "docs").rglob("*.md"))]


def verbs() -> set[str]:
    text = subprocess.run([NOON, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^│ ([a-z]+) {2,}\S", text, flags=re.MULTILINE))


def test_every_place_in_the_glossary_exists():
    table = (HOUSE / "docs" / "glossary.md").read_text().split("## Verbs")[0]
    places = re.findall(r"\| `(noonsight[\w.]*)` \|$", table, flags=re.MULTILINE)
    assert len(places) > 30
    for place in places:
        module, _, name = place.rpartition(".")
        try:
            importlib.import_module(place)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), place


def test_every_verb_is_in_the_glossary_and_the_other_way_round():
    table = (HOUSE / "docs" / "glossary.md").read_text().split("## Verbs")[1]
    listed = set(re.findall(r"^\| `noon ([a-z]+)", table, flags=re.MULTILINE))
    assert listed == verbs()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(HOUSE)))
def test_verbs_and_files_named_in_documents_exist(path: Path):
    text = path.read_text()
    known = verbs()
    for verb in re.findall(r"`noon ([a-z]+)", text):
        assert verb in known, f"{path.name} names `noon {verb}`"
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert target == "prove-NAME" or re.search(
            rf"^{target}:", (HOUSE / "Makefile").read_text(), flags=re.MULTILINE
        ), target
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in link:
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_files_of_the_tour_exist():
    text = (HOUSE / "docs" / "tour.md").read_text()
    folder = ""
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        if name.endswith("/"):
            folder = name
        assert (HOUSE / name).exists() or (HOUSE / folder / name).exists() or list((HOUSE / "noonsight").rglob(name)), (
            name
        )


def test_readme_commands_work():
    """Those that only count are run as they stand; of the others the verb must exist."""
    commands = [shlex.split(line) for line in re.findall(r"`(noon [^`]+)`", (HOUSE / "README.md").read_text())]
    counted = [words for words in commands if words[1] == "count"]
    assert len(counted) > 5 and {words[1] for words in commands} <= verbs()
    for words in counted:
        done = subprocess.run([NOON, *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, f"{shlex.join(words)}: {done.stderr}"


def test_the_proof_on_the_page_is_the_proof_that_was_measured():
    import json

    from proofs import miniature

    figures = json.loads((HOUSE / "proofs" / "miniature.json").read_text())
    assert (HOUSE / "proofs" / "README.md").read_text().split(miniature.HEADING)[1] == miniature.table(figures)
    assert figures["seeds"] == list(miniature.SEEDS) == [run["seed"] for run in figures["voyages"]]


def test_the_models_proof_on_the_page_is_the_one_that_was_measured():
    import json

    from proofs import model, optimizers
    from proofs.page import section_of

    page, file = (HOUSE / "proofs" / "README.md").read_text(), HOUSE / "proofs" / "model.json"
    assert file.is_file() == (model.HEADING in page), "a figure on the page that no file holds, or the other way round"
    if file.is_file():
        figures = json.loads(file.read_text())
        assert section_of(page, model.HEADING) == model.table(figures)
        assert figures["summary"] == model.summary(figures)
        assert [trio["seed"] for trio in figures["optimizers"]["trios"]] == list(optimizers.SEEDS)
