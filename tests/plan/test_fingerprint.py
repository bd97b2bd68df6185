"""What enters identity and what does not."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from noonsight.logbook import record
from noonsight.plan import fingerprint

RUN = record.Run(
    experiment="e", name="n", version="1", fingerprint="", function="m:f", status="waiting", started_at="t",
    config={"value": 1, "inner": {"rates": [0.5, 1.0]}}, inputs={"a": {"stage": "a@1", "fingerprint": "x"}},
    code={"m.py": "h"},
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
configs = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


@given(configs, configs)
def test_equal_fingerprints_exactly_when_nothing_moved(one, other):
    left, right = (msgspec.structs.replace(RUN, config=config) for config in (one, other))
    same = fingerprint.fingerprint(left) == fingerprint.fingerprint(right)
    assert same == (fingerprint.moved(left, right) == []) == (record.encode(one) == record.encode(other))


def test_every_part_of_identity_moves_it_and_nothing_else_does():
    base = fingerprint.fingerprint(RUN)
    for part in (
        {"name": "other"},
        {"version": "2"},
        {"function": "m:g"},
        {"config": {"value": 2}},
        {"inputs": {"a": {"stage": "a@1", "fingerprint": "y"}}},
        {"code": {"m.py": "other"}},
    ):
        changed = msgspec.structs.replace(RUN, **part)
        assert fingerprint.fingerprint(changed) != base
        assert "name" in part or "version" in part or fingerprint.moved(RUN, changed)
    elsewhere = msgspec.structs.replace(
        RUN, placement=record.Placement(num_devices=8), started_at="later", status="done", sentence="x", seconds=3.0
    )
    assert fingerprint.fingerprint(elsewhere) == base and fingerprint.moved(RUN, elsewhere) == []


def test_moves_are_named_by_path():
    other = msgspec.structs.replace(
        RUN, config={"inner": {"rates": [0.5, 2.0]}, "added": 1}, code={"new.py": "h"}, function="m:g"
    )
    assert fingerprint.moved(RUN, other) == [
        "config.added: absent -> 1",
        "config.inner.rates[1]: 1.0 -> 2.0",
        "config.value: 1 -> absent",
        "function: m:f -> m:g",
        "code m.py is gone",
        "code new.py is new",
    ]


def test_the_closure_follows_imports_through_files_and_into_functions(tmp_path):
    (tmp_path / "deep.py").write_text("X = 1\n")
    (tmp_path / "lazy.py").write_text("from deep import X\n")
    (tmp_path / "unused.py").write_text("")
    path = tmp_path / "file.py"
    path.write_text(
        "import unused\n"
        "LIMIT = 3\n"
        "OTHER = 4\n"
        "def used(config, inputs, out):\n"
        "    import lazy\n"
        "    from noonsight.logbook import record\n"
        "    from noonsight.plan import worker\n"
        "    return helper()\n"
        "def helper():\n"
        "    return LIMIT\n"
        "def other():\n"
        "    return unused, OTHER\n"
    )

    def closure():
        from noonsight.plan.worker import load_experiment_module

        return fingerprint.source_closure(load_experiment_module(path).used, path)

    native = tmp_path / "native"
    native.mkdir()
    (native / "__init__.py").write_text("")
    (native / "kernel.cc").write_text("int one = 1;")
    path.write_text(path.read_text().replace("    import lazy\n", "    import lazy, native\n"))
    first = closure()
    assert "native/kernel.cc" in first
    (native / "kernel.cc").write_text("int one = 2;")
    assert {name for name, digest in closure().items() if digest != first[name]} == {"native/kernel.cc"}
    (native / "kernel.cc").write_text("int one = 1;")
    assert first.keys() >= {"file.py", "lazy.py", "deep.py", "noonsight/logbook/record.py"}
    assert "unused.py" not in first
    assert not any(name.startswith(("msgspec", "jax", "noonsight/plan")) for name in first)
    path.write_text(path.read_text().replace("OTHER = 4", "OTHER = 5").replace("return unused", "return 0, unused"))
    assert closure() == first
    path.write_text(path.read_text().replace("LIMIT = 3", "LIMIT = 4"))
    assert closure()["file.py"] != first["file.py"]
