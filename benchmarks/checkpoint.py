"""A state of 1 GB kept and brought back: ours, orbax, and a plain copy of the same bytes, in turns, in one run.

    python benchmarks/checkpoint.py [--megabytes 1000] [--repeats 7] [--write]

Save: from the call to the moment when the checkpoint is complete on the disk (fsync). Restore: until every array is on the
device, verified where the contestant verifies. Copy: read the file of the same bytes, write it elsewhere, fsync; it stands
for both, as what the machine asks for moving the bytes. Figures are medians; ratios are to the copy of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "checkpoint.json"
NUM_ARRAYS = 100


def main() -> None:
    """Print a table, and with --write keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    asked = parser.parse_args()
    found = measure(asked.megabytes, asked.repeats)
    if asked.json:
        return print(json.dumps(found))
    for name, figures in found["contestants"].items():
        print(f"{name:10} " + "  ".join(f"{key} {value:7.3f}" for key, value in figures.items()))
    if asked.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


def measure(megabytes: int = 1000, repeats: int = 5) -> dict[str, Any]:
    """Medians in seconds of every contestant and its ratios to the copy."""
    import jax

    state = _state(megabytes)
    rounds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        source = Path(folder) / "bytes"
        source.write_bytes(os.urandom(1_000_000) * megabytes)
        for number in range(repeats + 1):  # the first warms up
            for name, contestant in {"ours": _ours, "orbax": _orbax}.items():
                out = Path(folder) / name
                copy_s = _copy(source, Path(folder) / "copied")
                figures = contestant(out, state) | {"copy_s": copy_s}
                figures |= {f"{what}_over_copy": figures[f"{what}_s"] / copy_s for what in ("save", "restore")}
                if number:
                    rounds.setdefault(name, []).append(figures)
                shutil.rmtree(out)
    medians = {
        name: {key: round(statistics.median(each[key] for each in lines), 4) for key in lines[0]}
        for name, lines in rounds.items()
    }
    return {"megabytes": megabytes, "repeats": repeats, "jax": jax.__version__, "contestants": medians}


def _state(megabytes: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    each = megabytes * 1_000_000 // 4 // NUM_ARRAYS // 1000
    make = jax.jit(lambda key: jax.random.normal(key, (each, 1000), jnp.float32))
    return {f"layer_{number:03d}": make(jax.random.key(number)) for number in range(NUM_ARRAYS)}


def _copy(source: Path, target: Path) -> float:
    def copy() -> None:
        with source.open("rb") as read, target.open("wb") as write:
            while block := read.read(16 << 20):
                write.write(block)
            write.flush()
            os.fsync(write.fileno())

    return _timed(copy)


def _ours(out: Path, state: dict[str, Any]) -> dict[str, float]:
    import jax

    from noonsight.logbook.claim import claim
    from noonsight.train import checkpoint

    out.mkdir()
    with claim(out, "worker") as owned:
        saver = checkpoint.Saver(checkpoint.root_of(out), owned, attempt=1, on_saved=lambda *_: None)
        saver._proven = True  # the first save of a process is read back as well: not part of a save
        held_s = _timed(lambda: saver.save(state, step=1, kind="permanent", tokens=0))
        save_s = held_s + _timed(saver.join)
    target = jax.eval_shape(lambda: state)

    def restore() -> None:
        found = checkpoint.newest(checkpoint.root_of(out))
        jax.block_until_ready(checkpoint.restore(found.path, target))

    return {"held_s": held_s, "save_s": save_s, "restore_s": _timed(restore)}


def _orbax(out: Path, state: dict[str, Any]) -> dict[str, float]:
    import jax
    import orbax.checkpoint as ocp

    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        held_s = _timed(lambda: checkpointer.save(out / "step_1", args=ocp.args.StandardSave(state)))
        save_s = held_s + _timed(checkpointer.wait_until_finished)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

        def restore() -> None:
            jax.block_until_ready(checkpointer.restore(out / "step_1", args=ocp.args.StandardRestore(target)))

        return {"held_s": held_s, "save_s": save_s, "restore_s": _timed(restore)}


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
