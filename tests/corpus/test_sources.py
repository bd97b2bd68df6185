"""Sources and documents: ranges point at raw bytes, bad input is named, nothing is lost (cases 14, 23; D4, D11)."""

import random
import re
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.corpus import document, sources
from tests.corpus import planting


def reread(documents: Path, folders) -> list[dict]:
    """All documents, each checked against the raw bytes of its file."""
    found = planting.rows(documents / "documents.parquet")
    for row in found:
        raw = (folders[row["source"]] / row["file"]).read_bytes()
        assert document.text_of(raw[row["start"] : row["end"]]) == row["text"]
        assert row["num_bytes"] == len(row["text"].encode())
        assert row["text_hash"] == document.hexdigest(row["text"])
    return found


def test_shipped_text_rereads_from_its_files(tmp_path):
    folders = {name: planting.VOYAGES / name for name in planting.KINDS}
    found = reread(planting.collect(tmp_path, folders), folders)
    assert len(found) > 900
    assert {row["source"] for row in found} == set(planting.KINDS)
    assert max(row["num_bytes"] for row in found) <= 20_000
    assert len({row["doc_uid"] for row in found}) == len(found)


@pytest.mark.parametrize("name", sorted(planting.KINDS))
def test_every_shipped_source_states_its_licence_and_origin(name):
    note = (planting.VOYAGES / name / "LICENCE.md").read_text(encoding="utf-8")
    for part in ("**Origin**", "**Why public domain**", "**What was cut**"):
        assert part in note
    for file in (planting.VOYAGES / name).glob("*.txt"):
        text = file.read_text(encoding="utf-8")
        assert "all rights reserved" not in text.lower()
        assert not re.search(r"gutenberg-tm|gutenberg etext|\bworld library\b", text, re.IGNORECASE)


def test_shipped_text_is_small_and_of_four_kinds_or_more():
    files = [file for file in planting.VOYAGES.rglob("*") if file.is_file()]
    assert len(files) < 150
    assert 4_500_000 <= sum(file.stat().st_size for file in files) <= 6_000_000
    assert len(set(planting.KINDS.values())) >= 4


def test_byte_order_mark_line_ends_and_form_feeds(tmp_path):
    raw = b"\xef\xbb\xbf  first line\r\nsecond\r\n\f\r\n\f\r\n  third \xc3\xa9\r\n\r\n"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(raw)
    folders = {"own": tmp_path / "text"}
    found = sorted(reread(planting.collect(tmp_path / "out", folders), folders), key=lambda row: row["start"])
    assert [row["text"] for row in found] == ["  first line\nsecond", "  third é"]
    assert found[0]["start"] == 3


@given(
    parts=st.lists(st.text(alphabet=st.sampled_from("ab é\n\r\f\t漢\u2028"), max_size=400), max_size=4),
    limit=st.integers(64, 200),
    mark=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_ranges_are_ordered_bounded_and_lose_only_white_space(parts, limit, mark):
    raw = (b"\xef\xbb\xbf" if mark else b"") + "".join(parts).encode()
    found = document.ranges(raw, limit)
    kept = b"".join(raw[start:end] for start, end in found)
    assert all(0 < end - start <= limit for start, end in found)
    assert all(left[1] <= right[0] for left, right in pairwise(found))
    solid = bytes.maketrans(b"", b"")
    spaces = b" \t\r\n\x0b\x0c"
    assert kept.translate(solid, spaces) == raw.removeprefix(b"\xef\xbb\xbf" if mark else b"").translate(solid, spaces)
    for start, end in found:
        document.text_of(raw[start:end])  # never inside a character


def test_a_long_file_is_cut_at_empty_lines_first():
    paragraph = b"word " * 30 + b"\n\n"
    pieces = [b"".join(paragraph for _ in range(40))]
    raw = pieces[0]
    found = document.ranges(raw, 1000)
    assert all(raw[end : end + 3].strip() == b"" for _, end in found)
    assert len(found) == pytest.approx(len(raw) / 1000, abs=2)


def test_a_very_long_line_is_cut_in_linear_time():
    raw = "é".encode() * 2_000_000
    found = document.ranges(raw, 20_000)
    assert sum(end - start for start, end in found) == len(raw)


def test_identity_holds_names_bytes_and_hashes_but_no_folder(tmp_path):
    text = planting.words(random.Random(0), 100)
    one = planting.write_corpus(tmp_path / "here" / "deep", [text])
    two = planting.write_corpus(tmp_path / "there", [text])
    left, right = (sources.scan(folder, name="own", kind="prose") for folder in (one, two))
    assert left == right
    (two / "0000.txt").write_text(text + "x")
    assert sources.scan(two, name="own", kind="prose").revision != left.revision


def test_uid_does_not_depend_on_the_text():
    assert document.uid_of("a", "b", "c", 0) == "27be7e6d9c37c972ac399c39ff8ecae6"
    assert document.uid_of("a", "b", "c", 1) != document.uid_of("a", "b", "c", 0)


def test_scan_leaves_out_notes_and_hidden_files(tmp_path):
    folder = planting.write_corpus(tmp_path / "text", ["some text"])
    for name in ("README.md", "LICENCE.md", "LICENSE", ".hidden.txt"):
        (folder / name).write_text("a note")
    assert [file.path for file in sources.scan(folder, name="own", kind="prose").files] == ["0000.txt"]


@pytest.mark.parametrize("what", ["missing", "file", "empty"])
def test_scan_says_what_is_wrong_with_the_folder(tmp_path, what):
    path = tmp_path / "text"
    if what == "file":
        path.write_text("x")
    if what == "empty":
        path.mkdir()
    with pytest.raises(
        ValueError,
        match=f"source 'own': .*{ {'missing': 'is missing', 'file': 'is a file', 'empty': 'no text file'}[what] }",
    ):
        sources.scan(path, name="own", kind="prose")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"text\x00text", "binary .NUL byte at 4."),
        (b"good \xff bad", "not UTF-8 .byte 5"),
        (b"\xed\xa0\x80 lone surrogate", "not UTF-8 .byte 0"),
        ("utf-16".encode("utf-16"), "binary"),
        (b"cut off \xc3", "not UTF-8 .byte 8"),
    ],
)
def test_what_is_not_text_stops_or_is_skipped_and_counted(tmp_path, raw, words):
    folder = planting.write_corpus(tmp_path / "text", ["a good file"])
    (folder / "bad.txt").write_bytes(raw)
    with pytest.raises(ValueError, match=f"bad.txt is {words}.*on_bad"):
        planting.collect(tmp_path / "stop", {"own": folder})
    assert not (tmp_path / "stop" / "documents.parquet").exists()
    out = planting.collect(tmp_path / "skip", {"own": folder}, on_bad="skip")
    assert [row["text"] for row in planting.rows(out / "documents.parquet")] == ["a good file"]
    assert b"bad.txt" in (out / "tables" / "skipped.json").read_bytes()


def test_only_empty_files_is_an_error(tmp_path):
    folder = planting.write_corpus(tmp_path / "text", ["", " \n\f\n"])
    with pytest.raises(ValueError, match="no document in 1 sources"):
        planting.collect(tmp_path / "out", {"own": folder})


@pytest.mark.parametrize("change", ["edited", "gone", "new"])
def test_a_folder_that_changed_since_the_scan_is_named(tmp_path, change):
    folder = planting.write_corpus(tmp_path / "text", ["first", "second"])
    config = sources.CollectConfig(sources=(sources.scan(folder, name="own", kind="prose"),))
    if change == "edited":
        (folder / "0001.txt").write_text("sec0nd")
    elif change == "gone":
        (folder / "0001.txt").unlink()
    else:
        (folder / "0002.txt").write_text("third")
    message = {
        "edited": "0001.txt changed",
        "gone": "0001.txt was scanned and cannot be read",
        "new": "0002.txt appeared",
    }
    with pytest.raises(ValueError, match=message[change]):
        planting.collect_config(tmp_path / "out", config, {"own": folder})


def test_a_folder_that_is_not_located_is_named(tmp_path):
    folder = planting.write_corpus(tmp_path / "text", ["first"])
    config = sources.CollectConfig(sources=(sources.scan(folder, name="own", kind="prose"),))
    with pytest.raises(ValueError, match=r"source 'own': placement\.locations .*known: other"):
        planting.collect_config(tmp_path / "out", config, {"other": folder})


def test_two_sources_of_one_name_are_refused_before_any_work(tmp_path):
    source = sources.scan(planting.write_corpus(tmp_path / "text", ["first"]), name="own", kind="prose")
    with pytest.raises(ValueError, match="two sources are named own"):
        planting.collect_config(tmp_path / "out", sources.CollectConfig(sources=(source, source)), {"own": tmp_path})


def test_unsorted_or_repeated_rows_are_refused_on_reading(tmp_path):
    folder = planting.write_corpus(tmp_path / "text", ["first", "second", "third"])
    out = planting.collect(tmp_path / "out", {"own": folder})
    table = document.read_documents(out)
    document.write_table(out / "documents.parquet", table.take(pa.array([1, 0, 2])))
    with pytest.raises(ValueError, match="not sorted by doc_uid"):
        document.read_documents(out)
    document.write_table(out / "documents.parquet", table.take(pa.array([0, 0, 1])))
    with pytest.raises(ValueError, match="a uid occurs twice"):
        document.read_documents(out)
    with pytest.raises(ValueError, match="not the 2 documents"):
        document.read_sidecar(out / "documents.parquet", table["doc_uid"].to_pylist()[:2])
