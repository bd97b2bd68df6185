"""No entry of the ledger can be altered, dropped, repeated or slipped in."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.logbook import chain, record


def make(metric: str = "eval/bits_per_byte") -> record.Prediction:
    draft = record.Prediction(
        experiment="e",
        run="target@1",
        metric=metric,
        unit="bits/byte",
        components=((1.0, 2.0, 0.1),),
        median=2.0,
        interval=(1.84, 2.16),
        baseline=(2.2, 0.2),
        frozen_at="2026-01-01T00:00:00.000+00:00",
    )
    return msgspec.structs.replace(draft, hash=chain.content_hash(draft))


def test_entries_follow_each_other(tmp_path):
    path = tmp_path / "root" / "predictions.jsonl"
    first, second = chain.append(path, make("a")), chain.append(path, make("b"))
    assert (first.index, second.index) == (0, 1)
    assert second.previous == first.hash
    assert chain.verify(path) == [first, second]
    assert chain.verify(tmp_path / "none.jsonl") == []


def test_a_prediction_changed_after_hashing_is_refused(tmp_path):
    changed = msgspec.structs.replace(make(), median=1.9)
    with pytest.raises(ValueError, match="changed after it was hashed"):
        chain.append(tmp_path / "predictions.jsonl", changed)
    assert not (tmp_path / "predictions.jsonl").exists()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_edit_is_named(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("chain") / "predictions.jsonl"
    for name in ("a", "b", "c"):
        chain.append(path, make(name))
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    edit = data.draw(st.sampled_from(["field", "drop", "swap", "repeat"]))
    index = data.draw(st.integers(0, 1))  # dropping only the last entry is what the public hash guards against
    if edit == "field":
        name = data.draw(st.sampled_from(["prediction", "at", "previous", "hash", "index"]))
        lines[index][name] = 7 if name == "index" else lines[index][name][::-1] + "0"
    elif edit == "drop":
        del lines[index]
    elif edit == "swap":
        lines[index], lines[index + 1] = lines[index + 1], lines[index]
    else:
        lines.insert(index, lines[index])
    path.write_bytes(b"".join(record.encode(line) + b"\n" for line in lines))
    with pytest.raises(chain.BrokenChain, match=r"predictions.jsonl, entry \d"):
        chain.verify(path)


def test_a_torn_last_entry_was_never_acknowledged(tmp_path):
    path = tmp_path / "predictions.jsonl"
    first = chain.append(path, make("a"))
    chain.append(path, make("b"))
    path.write_bytes(path.read_bytes()[:-10])
    assert chain.verify(path) == [first]
    again = chain.append(path, make("b"))
    assert (again.index, chain.verify(path)) == (1, [first, again])
