"""Building and loading the kernels: once per machine, compiler and source; a failure is a reason, not an error."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import jax

SETTING = "NOONSIGHT_KERNELS"  # "xla": never use the kernels; "native": fail without them; else use them if possible
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-w"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mamx-tile", "-mamx-bf16"),
)
TARGETS = (
    *("noon_matmul", "noon_experts_forward", "noon_experts_backward"),
    *("noon_attention_forward", "noon_attention_backward", "noon_cross_entropy", "noon_newton_schulz"),
)
UNITS = ("none", "avx512-bf16", "amx-bf16")
BUILD_TIMEOUT_S = 120


class _Loaded(NamedTuple):
    unit: str  # of UNITS
    reason: str  # why there is none, else ""


def is_available() -> bool:
    """Whether the kernels can be called here. The first call may build them (some 5 s).

    Raises RuntimeError when NOONSIGHT_KERNELS=native and they cannot.
    """
    setting = os.environ.get(SETTING, "auto")
    if setting not in ("auto", "xla", "native"):
        raise ValueError(f"{SETTING} is {setting!r}; use auto, xla or native")
    if setting == "xla":
        return False
    loaded = _load()
    if setting == "native" and loaded.unit == "none":
        raise RuntimeError(f"{SETTING}=native, but there are no native kernels here: {loaded.reason}")
    return loaded.unit != "none"


def serves(dtype: str, *arrays: jax.Array) -> bool:
    """Whether products that round to `dtype` are computed here, from these arrays if they must be float32."""
    return dtype == "bfloat16" and all(each.dtype == jax.numpy.float32 for each in arrays) and is_available()


def description() -> str:
    """What products are computed with, for records: "native avx512-bf16", or "xla (why)"."""
    if os.environ.get(SETTING) == "xla":
        return f"xla ({SETTING}=xla)"
    loaded = _load()
    return f"xla ({loaded.reason})" if loaded.unit == "none" else f"native {loaded.unit}"


@functools.cache
def _load() -> _Loaded:
    if reason := _obstacle():
        return _Loaded("none", reason)
    try:
        library = _opened(_built())
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        text = (getattr(error, "stderr", None) or str(error)).strip()
        reason = f"building the kernels failed: {text.splitlines()[0] if text else type(error).__name__}"
        warnings.warn(f"{reason}; going on with XLA, which is slower in bfloat16", stacklevel=2)
        return _Loaded("none", reason)
    unit = UNITS[library.noon_unit()]
    if unit == "none":
        return _Loaded("none", "the kernels do not compute rightly on this processor")
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return _Loaded(unit, "")


def _obstacle() -> str:
    if jax.default_backend() != "cpu":
        return f"arrays live on {jax.default_backend()}"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{platform.system()} on {platform.machine()}, the kernels are for Linux on x86-64"
    if " avx512_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        return "the processor has no bfloat16 unit"
    return "" if shutil.which("g++") else "no C++ compiler (g++) is installed"


def _opened(path: Path) -> ctypes.CDLL:
    """The library with all its targets; a damaged one is built once more."""
    try:
        return _with_targets(path)
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)
        return _with_targets(_built())


def _with_targets(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for target in TARGETS:
        getattr(library, target)
    return library


def _built() -> Path:
    """The library, built unless an equal one is in the cache. Written aside and renamed: builders do not collide.

    Raises OSError when the cached one belongs to somebody else: code of another user is not run.
    """
    here = Path(__file__).parent
    sources = sorted(here.glob("*.cc"))
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    digest = hashlib.sha256(repr((FLAGS, version, jax.__version__)).encode())
    for path in (*sources, *sorted(here.glob("*.h"))):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noonsight"
    library = cache / f"kernels-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache) as aside:
            made = Path(aside) / library.name
            command = ["g++", *FLAGS, "-isystem", jax.ffi.include_dir(), *map(str, sources), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S)
            os.replace(made, library)
    if library.stat().st_uid != os.geteuid():
        raise OSError(f"{library} belongs to another user; remove it or set XDG_CACHE_HOME")
    return library
