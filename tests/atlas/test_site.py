"""The site as a whole: everything is there, nothing is asked of a network, no text becomes markup, no fault stops it."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from noonsight.atlas.pages import front, predictions, run, stage
from noonsight.atlas.site import build_site
from noonsight.logbook.claim import claim
from tests.atlas.sample import STAGES, write_sample

TARGET = "site/miniature/target@1.html"
HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


class Outline(HTMLParser):
    """Elements with their attributes, the text outside scripts and styles, and whether tags close as they opened."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("voyages")
    write_sample(root)
    build_site(root)
    return root


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A voyage of few steps, to be damaged."""
    write_sample(tmp_path, steps=640)
    return tmp_path


def pages(root: Path) -> dict[str, Outline]:
    site = root / "site"
    return {str(path.relative_to(site)): Outline(path.read_text()) for path in sorted(site.rglob("*.html"))}


def text_of(path: Path) -> str:
    return " ".join(Outline(path.read_text()).text.split())


def test_there_is_a_page_for_every_stage_and_every_link_arrives(root: Path):
    found = pages(root)
    assert set(found) == {"index.html", "predictions.html"} | {f"miniature/{address}.html" for address in STAGES}
    for name, page in found.items():
        folder = (root / "site" / name).parent
        for link in page.all("a"):
            place = link["href"]
            if place.startswith("#"):
                assert any(attributes.get("id") == place[1:] for _, attributes in page.elements), (name, place)
            else:
                assert (folder / place.replace("%40", "@")).resolve().is_file(), (name, place)


def test_pages_ask_nothing_of_any_network(root: Path):
    for name, page in pages(root).items():
        for tag, attributes in page.elements:
            for key in ("src", "href", "action", "data", "poster", "srcset"):
                value = attributes.get(key)
                assert value is None or not re.match(r"\w+:|//", value) or value == "data:,", (name, tag, value)
        assert "@import" not in (text := (root / "site" / name).read_text()) and not re.search(
            r"url\(\s*['\"]?http", text
        )
        policy = next(item["content"] for item in page.all("meta") if item.get("http-equiv"))
        assert "default-src 'none'" in policy and "connect-src" not in policy


def test_pages_have_landmarks_headings_and_labelled_tables(root: Path):
    for name, page in pages(root).items():
        assert len(page.all("h1")) == 1, name
        assert len(page.all("main")) == 1 and page.all("html")[0]["lang"] == "en"
        assert len(page.all("caption")) == len(page.all("table")), name
        assert all(header.get("scope") in ("col", "row") for header in page.all("th")), name
        assert page.open == [], name


def test_a_run_page_weighs_little_without_its_data(root: Path):
    text = (root / TARGET).read_text()
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, flags=re.S).group(1)
    assert json.loads(data)["run"] == "target@1"
    assert len(text.encode()) - len(data.encode()) <= 300_000


def test_the_run_page_says_how_it_went(root: Path):
    text = text_of(root / TARGET)
    assert (
        "Trained 1,348 steps in 3 min 20 s, killed once on purpose at step 600 and resumed bit-identically; "
        "2.031 bits per byte, inside the predicted 1.982 to 2.094." in text
    )
    data = run.collect(root, experiment="miniature", stage="target@1")
    for wanted in (
        data["prediction"]["hash"],
        "Started again from step 588",
        "gradient-jump",
        "sqlite-docs",
        "drama",
        "numpy reference",
    ):
        assert wanted in text, wanted
    assert data["prediction"]["hash"] == data["verdict"]["prediction_hash"]
    assert [(item["steps_lost"], item["planned"], item["recovered"]) for item in data["incidents"]] == [
        (12, True, True)
    ]
    assert {item["stage"] for item in data["lineage"]["made_from"]} == set(STAGES) - {
        "target@1", "evaluate@1", "verdict@1", "export@1", "samples@1",
    }  # fmt: skip


def test_the_run_page_shows_where_the_time_went_and_what_was_lost_to_what(root: Path):
    data = run.collect(root, experiment="miniature", stage="target@1")["time"]
    assert sum(part["seconds"] for part in data["parts"]) == pytest.approx(data["wall_s"], abs=0.01)
    assert [(row["cause"], row["times"], row["steps"]) for row in data["lost"]] == [("injected", 1, 12)]
    text = text_of(root / TARGET)
    assert "went into steps that count (goodput)" in text and "Lost by cause" in text and "repeated" in text


def test_the_front_page_answers_the_three_questions(root: Path):
    data = front.collect(root)
    assert data["sentence"] == "One voyage, nothing running, one prediction met, nothing unexplained."
    text = text_of(root / "site/index.html")
    assert "Can four small models trained in a minute tell where one eight times their cost will end?" in text
    assert "It ended 0.25 % below the median, inside the interval" in text


def test_every_collected_page_is_json_and_the_same_logbook_gives_the_same_bytes(root: Path):
    for data in (
        front.collect(root),
        predictions.collect(root),
        run.collect(root, experiment="miniature", stage="target@1"),
        stage.collect(root, experiment="miniature", stage="select@1"),
    ):
        assert json.loads(json.dumps(data, allow_nan=False))["schema"] == 1
    before = {name: (root / "site" / name).read_bytes() for name in pages(root)}
    build_site(root)
    assert {name: (root / "site" / name).read_bytes() for name in before} == before


def test_text_of_others_is_shown_as_text(small: Path):
    folder = small / "miniature"
    for path, old in [
        (folder / "samples@1/tables/samples.json", "The king"),
        (folder / "experiment.json", "Can four small models"),
        (folder / "target@1/record.json", "Trains the target"),
        (folder / "target@1/events.jsonl", "The worker was killed from outside."),
        (folder / "target@1/metrics.jsonl", "norm/grad/adam"),
        (folder / "select@1/tables/flow.json", "milton"),
        (folder / "target@1/tables/health.json", "rate-off-schedule"),
    ]:
        text = path.read_text()
        assert old in text, path
        path.write_text(text.replace(old, json.dumps(HOSTILE)[1:-1]))
    build_site(small)
    for name, page in pages(small).items():
        assert not page.all("img") and not any(
            key.startswith("on") for _, attributes in page.elements for key in attributes
        ), name
        assert len(page.all("script")) == (4 if "target" in name or "rung" in name else 0), name
    assert HOSTILE in pages(small)["miniature/target@1.html"].text
    assert HOSTILE in pages(small)["index.html"].text


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("target@1/metrics.jsonl", b'{"step": 3, "att\n{}\n'),
        ("target@1/record.json", b'{"experiment": "mini'),
        ("forecast@1/prediction.json", b"[]"),
        ("verdict@1/verdict.json", b""),
        ("select@1/tables/flow.json", b'{"rows": 7}'),
        ("export@1/receipts/parity.json", b'{"kind": "x"}'),
        ("target@1/events.jsonl", b"\xff\xfe\n"),
        ("experiment.json", b"{"),
    ],
)
def test_a_damaged_file_is_named_on_the_pages_and_stops_none(small: Path, name: str, damage: bytes):
    (small / "miniature" / name).write_bytes(damage)
    index = build_site(small)
    found = pages(small)
    assert set(found) == {"index.html", "predictions.html"} | {f"miniature/{address}.html" for address in STAGES}
    assert not any("could not be made" in page.text for page in found.values())
    assert name.rsplit("/", 1)[-1] in Outline(index.read_text()).text


def test_a_torn_last_line_is_no_damage(small: Path):
    path = small / "miniature/target@1/metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 640, "atte')
    build_site(small)
    assert "cannot be read" not in text_of(small / TARGET)


def test_a_failed_run_shows_what_failed(tmp_path: Path):
    write_sample(tmp_path, steps=640, status="failed")
    build_site(tmp_path)
    assert "no space left on the disk of the run's folder" in text_of(tmp_path / TARGET)
    assert "target: failed: OSError: no space left" in text_of(tmp_path / "site/index.html")
    assert "Not started" in text_of(tmp_path / "site/miniature/evaluate@1.html")


def test_a_run_under_way_is_running_and_without_its_process_interrupted(tmp_path: Path):
    write_sample(tmp_path, status="running")
    folder = tmp_path / "miniature/target@1"
    with claim(folder, "stage"):
        assert "At step 820 of 1,348" in front.collect(tmp_path)["running"][0]["text"]
    data = front.collect(tmp_path)
    assert data["running"] == [] and "interrupted" in data["unexplained"][0]["text"]


def test_pages_of_stages_that_are_gone_are_removed(small: Path):
    build_site(small)
    shutil.rmtree(small / "miniature")
    assert text_of(build_site(small)).count("Nothing has sailed yet.") == 1
    assert set(pages(small)) == {"index.html", "predictions.html"}


def test_names_from_a_record_cannot_leave_the_site(small: Path):
    path = small / "miniature/experiment.json"
    path.write_text(path.read_text().replace('"samples@1"', '"../../escaped@1"'))
    build_site(small)
    assert not list(small.rglob("escaped*"))
    assert "../../escaped@1" in text_of(small / "site/index.html")


def test_a_page_that_cannot_be_made_says_so_and_stops_no_other(small: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(voyage, folder):
        raise RuntimeError("a fault of ours <b>")

    monkeypatch.setattr(stage, "_neighbours", broken)
    build_site(small)
    assert "RuntimeError: a fault of ours <b>" in text_of(small / TARGET)
    assert "One voyage" in text_of(small / "site/index.html")
