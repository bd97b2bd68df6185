"""A run compiles its step once, and a second process with the same config compiles nothing at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Placement
from noonsight.train.pretrain import Part, counted_compilations, pretrain
from tests.train.toy import make_batch, make_program, pretrain_config, table

HOUSE = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
from noonsight.train.pretrain import counted_compilations
from tests.train.test_compilation import train
with counted_compilations() as seen:
    train(Path(sys.argv[1]))
print(seen["asked"], seen["found"])
"""
SETTINGS = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")


def train(out: Path, batch=make_batch) -> None:
    out.mkdir()
    config = pretrain_config(num_steps=12, checkpoint_every=5)
    with claim(out, "worker") as owned:
        pretrain(config, lambda _: Part(make_program(), batch), out, owned, Placement(), table=table())


def taken_from_the_cache(out: Path) -> list[bool]:
    return [event.data["from_cache"] for event in read.events(out) if event.kind == "compiled"]


def in_a_process(out: Path, cache: Path) -> tuple[int, int]:
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONPATH": str(HOUSE)}
    command = [sys.executable, "-c", RUN, str(out)]
    done = subprocess.run(command, env=environment, cwd=HOUSE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked, found = map(int, done.stdout.split())
    return asked, found


def test_a_second_process_compiles_nothing(tmp_path):
    asked, found = in_a_process(tmp_path / "first", tmp_path / "cache")
    assert asked > 1 and found < asked and taken_from_the_cache(tmp_path / "first") == [False]
    assert in_a_process(tmp_path / "second", tmp_path / "cache") == (asked, asked)
    assert taken_from_the_cache(tmp_path / "second") == [True]
    first, second = (read.metrics(tmp_path / name)["loss"].values for name in ("first", "second"))
    assert first == second, "an executable from the cache gives the same bits"


@pytest.fixture
def leave_jax_and_signals_alone():
    before, handler = {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS}, signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    for name, value in before.items():
        jax.config.update(f"jax_{name}", value)


def test_the_loop_never_compiles_again(tmp_path, leave_jax_and_signals_alone):
    asked = []

    def watching(step):
        asked.append(seen["asked"])
        return make_batch(step)

    with counted_compilations() as seen:
        train(tmp_path / "out", batch=watching)
    assert len(asked) == 13, "the batch of the first step is also the one it is compiled for"
    assert asked[0] < asked[1] == asked[-1], "compiled before the first step and never after"
    assert len(taken_from_the_cache(tmp_path / "out")) == 1
