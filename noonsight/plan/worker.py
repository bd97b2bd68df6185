"""The process in which one stage runs: `python -m noonsight.plan.worker OUT`.

It owns the folder (claim `stage`), loads function and config by name from `stage.json`, calls the function and writes
`record.json`: running, then done, failed or interrupted. Whatever it leaves is hashed.

Nothing outlives it. The kernel kills it when its parent dies (Linux), and a guard process in its group, which can
neither be blocked by a long computation nor by a lock of the interpreter, kills the whole group when either the worker
or the runner is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import xxhash

from noonsight.logbook import read, record
from noonsight.logbook.claim import Claim, claim
from noonsight.logbook.write import LogbookError, Writer, refusal
from noonsight.plan.fingerprint import EXPERIMENT_MODULE, rebuild

PARENT = "NOONSIGHT_PARENT"  # environment variable: pid of the runner
KEPT = {"record.json", "events.jsonl", "metrics.jsonl", "progress.jsonl", "stage.json", "placement.json", "stderr.txt"}
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
ASKED_TO_STOP = 128 + signal.SIGTERM  # exit code of a function that cleaned up after the runner's request to stop
_PR_SET_PDEATHSIG = 1


class Job(record.Record, kw_only=True):
    """`stage.json`: what the runner asks of a worker."""

    schema: int = record.SCHEMA
    run: record.Run  # as it shall be recorded, status "waiting"
    config_type: str  # "module:qualname"
    experiment_file: str
    inputs: dict[str, str]  # name -> folder
    resumable: bool = False


def main(out: Path) -> int:
    """Run the stage of the folder `out`; 0 when it is done, 1 when it failed and said why in its record."""
    die_with(int(os.environ.get(PARENT, os.getppid())))
    try:
        with claim(out, "stage", wait_s=10, lend=True) as mine:
            job = msgspec.json.decode((out / "stage.json").read_bytes(), type=Job)
            return _work(out, job, mine)
    except Exception as error:  # the folder cannot be owned or written: stderr is all that is left
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def die_with(parent: int) -> None:
    """Tie the life of this process, and of its whole process group if it leads one, to that of `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
    if os.getpgrp() == os.getpid() and os.fork() == 0:
        _guard(os.getppid(), parent)


def load_experiment_module(path: Path) -> ModuleType:
    """Execute an experiment file under the name `EXPERIMENT_MODULE`, the same in every process."""
    make_importable(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(EXPERIMENT_MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[EXPERIMENT_MODULE] = module
    spec.loader.exec_module(module)
    return module


def make_importable(folder: Path) -> None:
    """Let modules that lie beside an experiment file be imported, after everything else."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _guard(worker: int, runner: int) -> None:
    """The guard's whole life: wait until worker or runner is gone, then take the group along."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the grace of a stop belongs to the worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == worker and _alive(runner):
        time.sleep(0.1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _work(out: Path, job: Job, mine: Claim) -> int:
    writer = Writer(out, mine)
    old = read.run(out)
    before_s = _seconds_before(out, old)
    if not job.resumable:
        _empty(out)
    run = msgspec.structs.replace(
        job.run,
        status="running",
        started_at=old.started_at if old and job.resumable else record.now(),
        seconds=before_s,
        machine=_machine(),
    )
    writer.record(run)
    writer.event("start", f"{run.name}@{run.version} starts", data={"monotonic": round(time.monotonic(), 3)})
    start = time.monotonic()
    try:
        make_importable(Path(job.experiment_file).parent)
        function = _named(run.function, job)
        config = rebuild(run.config, _named(job.config_type, job))
        artifact = function(config, {name: Path(folder) for name, folder in job.inputs.items()}, out)
        if not isinstance(artifact, record.Artifact):
            raise TypeError(f"{run.function} returned {type(artifact).__name__}; a stage returns Artifact(facts=...)")
        result: dict[str, Any] = {
            "status": "done",
            "facts": _written(artifact.facts, "fact"),
            "files": _hash_files(out),
        }
    except (Exception, SystemExit) as error:
        result = _ending(error, out, writer)
    seconds = round(before_s + time.monotonic() - start, 3)
    run = msgspec.structs.replace(run, ended_at=record.now(), seconds=seconds, **result)
    writer.record(run)
    return 0 if run.status == "done" else 1


def _ending(error: BaseException, out: Path, writer: Writer) -> dict[str, Any]:
    """What the record says of a function that did not return: interrupted when it was asked to stop, else failed."""
    if isinstance(error, SystemExit) and error.code == ASKED_TO_STOP:
        writer.event("interrupted", "Stopped because the runner asked for it.")
        return {"status": "interrupted"}
    with contextlib.suppress(OSError):  # a full disk must not hide what failed
        (out / "error.txt").write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
    if isinstance(error, OSError) and error.errno in DISK and not isinstance(error, LogbookError):
        error = refusal("write", error.filename or out, error)
    kind = type(error).__name__
    message = str(error) if isinstance(error, LogbookError) else f"{kind}: {error}" if str(error) else kind
    message = message.encode("utf-8", "backslashreplace").decode()
    writer.event("failed", message)
    return {"status": "failed", "error": message}


def _seconds_before(out: Path, old: record.Run | None) -> float:
    """Wall seconds of earlier attempts; one that was killed counts from its start to its last heartbeat."""
    if old is None:
        return 0.0
    starts = [event for event in read.events(out) if event.kind == "start"]
    last = read.last_progress(out)
    if old.ended_at is not None or not starts or last is None:
        return old.seconds
    began = starts[-1].data.get("monotonic")
    if began is not None and last.monotonic >= began:  # the date may have been set meanwhile
        return old.seconds + last.monotonic - began
    alive = datetime.fromisoformat(last.at) - datetime.fromisoformat(starts[-1].at)
    return old.seconds + max(0.0, alive.total_seconds())


def _empty(out: Path) -> None:
    for path in out.iterdir():
        if path.name in KEPT or path.suffix in (".lock", ".fence"):
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _named(name: str, job: Job) -> Any:
    """The function or class "module:qualname"; the experiment file is loaded only when it is the module."""
    module_name, _, qualname = name.partition(":")
    if module_name == EXPERIMENT_MODULE and EXPERIMENT_MODULE not in sys.modules:
        load_experiment_module(Path(job.experiment_file))
    found: Any = importlib.import_module(module_name)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _written(values: dict[str, Any], what: str) -> dict[str, Any]:
    """`values`, once each is known to be JSON. Raises TypeError naming the first that is not."""
    for name, value in values.items():
        try:
            record.encode({name: value})
        except (TypeError, UnicodeEncodeError, RecursionError) as error:
            raise TypeError(f"{what} {name!r} cannot be written as JSON: {error}") from None
    return values


def _hash_files(out: Path) -> dict[str, dict[str, Any]]:
    """Every file of the result; temporary checkpoints and the logbook's own growing files are not part of it."""
    files = {}
    passing = _temporary_checkpoints(out)
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if not path.is_file() or name in KEPT or path.suffix in (".lock", ".fence", ".tmp"):
            continue
        if any(path.is_relative_to(folder) for folder in passing):
            continue
        digest = xxhash.xxh3_128()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        files[name] = {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}
    return _written(files, "file name")


def _temporary_checkpoints(out: Path) -> list[Path]:
    """Also those whose manifest cannot be read: the training went on from another one, and they prove nothing."""
    found = []
    for path in out.glob("checkpoints/*/manifest.json"):
        try:
            kind = msgspec.json.decode(path.read_bytes(), type=record.CheckpointManifest).kind
        except msgspec.MsgspecError:
            kind = "temporary"
        if kind == "temporary":
            found.append(path.parent)
    return found


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "numpy")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.machine()}"
    allocator = {"glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""), "huge_pages": _huge_pages()}
    about = {"cores": cores, "memory_bytes": memory, "system": system, "python": platform.python_version()}
    return {**about, **versions, "allocator": allocator}


def _huge_pages() -> str:
    """When the kernel gives transparent huge pages: always, madvise (to who asks) or never."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
