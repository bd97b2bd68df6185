"""The verb that looks at the machine: doctor."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from noonsight.cli.plan import VOYAGES

Finding = tuple[bool, str, str]  # (fine, what was found, what to do otherwise)


def doctor(*, root: Path = VOYAGES) -> int:
    """Look at this machine and say what would hold a voyage up; exit code 1 if something would.

    Parameters
    ----------
    root
        Where results shall live.
    """
    bad = 0
    for fine, found, remedy in _findings(root):
        print(f"{'ok  ' if fine else 'warn'}  {found}" + ("" if fine else f". {remedy}"))
        bad += not fine
    return 1 if bad else 0


def _findings(root: Path) -> Iterator[Finding]:
    yield sys.version_info >= (3, 11), f"Python {platform.python_version()}", "Install 3.11 or newer"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield cores >= 2, f"{cores} cores", "The miniature is timed for two; it will take longer"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield memory >= 3, f"{memory:.1f} GiB of memory", "The miniature needs 2 GiB to itself"
    nearest = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(nearest).free / 2**30
    yield free >= 2, f"{free:.1f} GiB free at {root}", "Free some space, or choose another folder with --root"
    there = next(path for path in (root.absolute(), *root.absolute().parents) if os.path.lexists(path))
    writable = there.is_dir() and _takes_a_file(there)
    found = f"{root} {'can' if writable else 'cannot'} be written"
    yield writable, found, "Choose another folder with --root, or change its permissions"
    yield _huge_pages()
    yield _kernels()
    for package in (
        "jax",
        "optax",
        "numpy",
        "scipy",
        "scikit-learn",
        "msgspec",
        "xxhash",
        "tokenizers",
        "pyarrow",
        "duckdb",
        "safetensors",
    ):
        try:
            yield True, f"{package} {importlib.metadata.version(package)}", ""
        except importlib.metadata.PackageNotFoundError:
            yield False, f"{package} is missing", "Install again: pip install noonsight"


def _kernels() -> Finding:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        flags = ""
    unit = next((name for name in ("amx_bf16", "avx512_bf16") if f" {name}" in flags), None)
    if unit is None:
        return True, "bfloat16 products: by XLA, the processor has no unit for them", ""
    found = f"bfloat16 products: {unit}, {'with' if shutil.which('g++') else 'but without'} g++ for our kernels"
    return shutil.which("g++") is not None, found, "Install g++: such training is about twice as fast with them"


def _takes_a_file(folder: Path) -> bool:
    """Whether a file can be made there. Permissions alone do not say: a file system may refuse whoever asks."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _huge_pages() -> Finding:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        chosen = setting.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return True, "huge pages: this system does not say", ""
    remedy = "Training is slower without them: as root, echo madvise > " + str(setting)
    return chosen != "never", f"huge pages: {chosen}", remedy
