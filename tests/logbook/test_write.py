"""Lines survive a kill at any byte; whole files are old or new; a disk that refuses says so once."""

import os
import resource

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.logbook import read, record
from noonsight.logbook.claim import claim
from noonsight.logbook.write import LogbookError, Writer, append_line, write_atomic


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(min_value=0), texts=st.lists(st.text(max_size=8), min_size=1, max_size=6))
def test_a_line_torn_at_any_byte_costs_only_itself(tmp_path_factory, cut, texts):
    out = tmp_path_factory.mktemp("torn")
    path = out / "events.jsonl"
    for text in texts:
        append_line(path, record.encode(record.Event(at="t", kind="k", text=text)))
    data = path.read_bytes()
    cut %= len(data) + 1
    path.write_bytes(data[:cut])
    whole = data[:cut].count(b"\n")
    assert [event.text for event in read.events(out)] == texts[:whole]
    append_line(path, record.encode(record.Event(at="t", kind="k", text="after")))
    assert [event.text for event in read.events(out)] == [*texts[:whole], "after"]


def test_a_torn_line_longer_than_the_search_window_is_cut(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n' + b"x" * 200_000)
    append_line(path, b'{"a":2}')
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'


def test_damage_inside_a_file_is_named_not_skipped(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"at":"t","kind":"k","text":"a"}\nnonsense\n')
    with pytest.raises(LogbookError, match=r"events.jsonl, line 2"):
        read.events(tmp_path)


def test_unknown_fields_are_refused(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"at":"t","kind":"k","text":"a","casue":"oom"}\n')
    with pytest.raises(LogbookError, match="casue"):
        read.events(tmp_path)


def test_a_full_disk_is_one_message_and_nothing_half_written(tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "record.json").write_bytes(b"old")
    (tmp_path / "x.jsonl").write_bytes(b'{"a":1}\n')
    resource.setrlimit(resource.RLIMIT_FSIZE, (12, old[1]))  # the kernel refuses the 13th byte of any file
    try:
        with pytest.raises(LogbookError, match=r"cannot write .*record.json: .*Free some space"):
            write_atomic(tmp_path / "record.json", b"n" * 100)
        with pytest.raises(LogbookError, match=r"cannot append to .*x.jsonl: .*Free some space"):
            append_line(tmp_path / "x.jsonl", b'{"a":2}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert (tmp_path / "record.json").read_bytes() == b"old"
    assert (tmp_path / "x.jsonl").read_bytes() == b'{"a":1}\n'
    assert sorted(os.listdir(tmp_path)) == ["record.json", "x.jsonl"]


def test_a_path_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LogbookError, match="--root"):
        write_atomic(tmp_path / "file" / "record.json", b"x")
    with pytest.raises(LogbookError, match="--root"):
        claim(tmp_path / "file", "stage")


def test_numbers_that_are_not_finite_come_back_as_they_were(tmp_path):
    with claim(tmp_path) as mine:
        Writer(tmp_path, mine).metrics(3, {"loss": float("nan"), "norm/grad": float("inf")})
    assert b'"nan"' in (tmp_path / "metrics.jsonl").read_bytes()
    found = read.metrics(tmp_path)
    assert str(found["loss"].values[0]) == "nan" and found["norm/grad"].values == (float("inf"),)


def test_progress_reads_the_last_whole_line(tmp_path):
    with claim(tmp_path) as mine:
        writer = Writer(tmp_path, mine, attempt=2)
        for step in range(200):
            writer.progress(step, 200, rate=2.5, text="x" * 100)
    with open(tmp_path / "progress.jsonl", "ab") as file:
        file.write(b'{"step":200')
    last = read.last_progress(tmp_path)
    assert (last.step, last.of, last.attempt, last.rate) == (199, 200, 2, 2.5)


def test_a_record_survives_its_own_encoding(tmp_path):
    run = record.Run(
        experiment="e", name="n", version="1", fingerprint="f", function="m:f", status="done", started_at="t"
    )
    with claim(tmp_path) as mine:
        Writer(tmp_path, mine).record(run)
    assert read.run(tmp_path) == run
    assert msgspec.json.decode((tmp_path / "record.json").read_bytes())["schema"] == 1
