"""What a worker is started with."""

import sys

import pytest

from noonsight.logbook import read
from noonsight.logbook.record import Placement
from noonsight.plan import child
from noonsight.plan.child import ALLOCATOR, environment, with_huge_pages


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ":".join(ALLOCATOR)),
        ("glibc.malloc.check=1", ":".join(("glibc.malloc.check=1", *ALLOCATOR))),
        ("glibc.malloc.hugetlb=0", ":".join(("glibc.malloc.hugetlb=0", *ALLOCATOR[1:]))),
    ],
)
def test_huge_pages_unless_the_user_settled_it(given, expected):
    assert with_huge_pages(given) == expected


def test_only_glibc_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    monkeypatch.setattr(child.os, "confstr", lambda name: "glibc 2.36")
    assert environment(tmp_path, Placement())["GLIBC_TUNABLES"].endswith(":".join(ALLOCATOR))
    for other in (lambda name: "", lambda name: None, lambda name: _unknown()):
        monkeypatch.setattr(child.os, "confstr", other)
        assert environment(tmp_path, Placement())["GLIBC_TUNABLES"] == "glibc.malloc.check=1"


def test_the_placement_has_the_last_word(tmp_path):
    told = Placement(num_devices=3, environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    found = environment(tmp_path, told)
    assert found["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"
    assert "device_count=3" in found["XLA_FLAGS"]
    assert found["JAX_COMPILATION_CACHE_DIR"].startswith(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc and the kernel's huge pages are Linux's")
def test_the_record_says_what_the_worker_ran_with(voyage):
    voyage.run()
    allocator = read.run(next(voyage.root.glob("toy/*@*"))).machine["allocator"]
    assert allocator["glibc_tunables"] == environment(voyage.root, Placement())["GLIBC_TUNABLES"]
    assert allocator["huge_pages"] in ("always", "madvise", "never", "unknown")


def _unknown():
    raise ValueError("unrecognized configuration name")


def test_what_no_file_can_hold_is_said_to_the_screen(voyage):
    voyage.add("Stage(name='full', version='1', function=full, config=Config())")
    code, said = voyage.run()
    assert code == 0 and "full  Paused: the disk is full." in said
