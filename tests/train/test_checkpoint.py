"""Checkpoints: whole or absent, verified on the way in, never a reason to start from random weights."""

import json
import os
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.logbook.claim import Fenced, claim
from noonsight.train import checkpoint
from noonsight.train.checkpoint import NonFiniteState, NoValidCheckpoint, Saver, folders, newest, restore
from noonsight.train.optim import by_path, make_optimizer
from noonsight.train.step import compile_step, init_state, make_train_step
from tests.train.toy import make_batch, make_program, optimizer_config, table


@pytest.fixture(scope="module")
def trained():
    """A state with seven real steps behind it."""
    program = make_program()
    optimizer = make_optimizer(optimizer_config(), program.init(jax.random.key(0))[0], num_steps=20, table=table())
    state = init_state(program, optimizer, jax.random.key(0))
    step = compile_step(make_train_step(program, optimizer), state, make_batch(0))
    for number in range(7):
        state, _ = step(state, make_batch(number))
    return state


@pytest.fixture
def owned(tmp_path):
    with claim(tmp_path, "worker") as claimed:
        yield claimed


def save(out, owned, state, step, kind="permanent"):
    return checkpoint.write(out, checkpoint.to_host(state), step=step, kind=kind, tokens=step, claim=owned, attempt=1)


def small(value=1.0):
    return {"w": jnp.full((3, 2), value), "step": jnp.int32(4)}


def test_every_leaf_of_the_live_state_comes_back_bit_for_bit(tmp_path, owned, trained):
    save(tmp_path, owned, trained, 7)
    again = restore(newest(tmp_path).path, jax.eval_shape(lambda: trained))
    live, kept = by_path(trained), by_path(again)
    assert (
        live.keys() == kept.keys()
        and "opt.inner_states.muonh.inner_state.0.trace.inner" in kept
        and "extra.seen" in kept
    )
    for path in live:
        assert live[path].dtype == kept[path].dtype
        np.testing.assert_array_equal(live[path], kept[path], err_msg=path)
    assert float(kept["extra.seen"]) > 0 and int(kept["step"]) == 7


def test_the_manifest_says_what_is_inside(tmp_path, owned):
    path = save(tmp_path, owned, small(), 12, "temporary")
    manifest = checkpoint.read_manifest(path)
    assert (manifest.step, manifest.kind, manifest.fence, manifest.tokens) == (12, "temporary", owned.fence, 12)
    assert manifest.arrays["w"]["shape"] == [3, 2] and manifest.arrays["w"]["dtype"] == "float32"
    assert manifest.files["arrays.safetensors"]["bytes"] == (path / "arrays.safetensors").stat().st_size


def test_only_exact_names_are_checkpoints(tmp_path, owned):
    for step in (9, 10, 100):
        save(tmp_path, owned, small(), step)
    for name in ("step_00000010_old", "step-9", "step_00000200.tmp", "step_7", "step_0000000300", "step_xxxxxxxx"):
        shutil.copytree(tmp_path / "checkpoints/step_00000010", tmp_path / "checkpoints" / name)
    assert [path.name for path in folders(tmp_path)] == ["step_00000009", "step_00000010", "step_00000100"]
    assert newest(tmp_path).manifest.step == 100


def flip_a_byte(path):
    data = bytearray((path / "arrays.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "arrays.safetensors").write_bytes(data)


DAMAGE = {
    "flipped": flip_a_byte,
    "torn": lambda path: os.truncate(path / "arrays.safetensors", 40),
    "no arrays": lambda path: (path / "arrays.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "torn manifest": lambda path: os.truncate(path / "manifest.json", 30),
    "wrong step": lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('"step":20', '"step":30')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_passed_over_with_its_reason(tmp_path, owned, damage):
    save(tmp_path, owned, small(1.0), 10)
    DAMAGE[damage](save(tmp_path, owned, small(2.0), 20))
    found = newest(tmp_path)
    assert found.manifest.step == 10 and len(found.rejected) == 1
    assert found.rejected[0].startswith("step_00000020: ")
    if damage == "no arrays":
        assert "arrays.safetensors is missing" in found.rejected[0]


def test_with_none_valid_it_raises_and_with_none_at_all_it_does_not(tmp_path, owned):
    assert newest(tmp_path) is None
    for step in (10, 20):
        DAMAGE["flipped"](save(tmp_path, owned, small(), step))
    with pytest.raises(NoValidCheckpoint, match="does not start again from random weights"):
        newest(tmp_path)


def test_what_a_killed_save_left_is_no_checkpoint_and_does_not_block_the_next(tmp_path, owned):
    torn = tmp_path / "checkpoints/step_00000010.tmp"
    torn.mkdir(parents=True)
    (torn / "arrays.safetensors").write_bytes(b"half")
    assert newest(tmp_path) is None
    save(tmp_path, owned, small(), 10)
    assert newest(tmp_path).manifest.step == 10 and not torn.exists()


KILLED_INSIDE_WRITE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from noonsight.logbook.claim import claim
from noonsight.train import checkpoint

def write(out, owned, step):
    checkpoint.write(out, {"w": np.ones(3)}, step=step, kind="permanent", tokens=0, claim=owned, attempt=1)

for cut in ("_write_arrays", "_file_hash", "_write_manifest", "_sync"):
    out = Path(sys.argv[1]) / cut
    with claim(out, "worker") as owned:
        write(out, owned, 10)
        child = os.fork()
        if child == 0:
            setattr(checkpoint, cut, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            write(out, owned, 20)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        found = checkpoint.newest(out)
        assert found.manifest.step == 10 and not found.rejected, (cut, found)
        assert (out / "checkpoints/step_00000020.tmp").exists(), cut
        write(out, owned, 20)
        assert checkpoint.newest(out).manifest.step == 20, cut
"""


def test_a_kill_inside_write_leaves_the_one_before_and_the_step_can_be_saved_again(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED_INSIDE_WRITE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_damaged_folder_of_the_same_step_is_replaced(tmp_path, owned):
    DAMAGE["flipped"](save(tmp_path, owned, small(1.0), 10))
    save(tmp_path, owned, small(2.0), 10)
    assert float(restore(newest(tmp_path).path, small())["w"][0, 0]) == 2.0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"w": jnp.zeros((2, 3)), "step": jnp.int32(0)}, r"w is float32\[3, 2\], this run has float32\[2, 3\]"),
        ({"w": jnp.zeros((3, 2), jnp.bfloat16), "step": jnp.int32(0)}, "this run has bfloat16"),
        ({"w": jnp.zeros((3, 2))}, "step is in the checkpoint but not in this run"),
        ({**small(), "bias": jnp.zeros(2)}, "bias is missing from the checkpoint"),
    ],
)
def test_restoring_into_another_model_says_which_leaf(tmp_path, owned, target, message):
    path = save(tmp_path, owned, small(), 4)
    with pytest.raises(ValueError, match=message):
        restore(path, target)


def test_restore_lays_out_like_its_target(tmp_path, owned):
    path = save(tmp_path, owned, {"w": jnp.arange(8.0)}, 4)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"), memory_kind="pinned_host")
    again = restore(path, {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)})
    assert again["w"].sharding == sharding and again["w"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(again["w"], np.arange(8.0))


def test_a_state_with_a_nan_is_never_written(tmp_path, owned):
    saver = Saver(tmp_path, owned, attempt=1, on_saved=lambda *_: None)
    with pytest.raises(NonFiniteState, match=r"in w \(1 leaves\)"):
        saver.save({"w": jnp.array([1.0, jnp.nan]), "v": jnp.ones(2)}, step=5, kind="permanent", tokens=0)
    assert folders(tmp_path) == []


def test_saving_does_not_wait_for_the_disk_and_keeps_what_was_current(tmp_path, owned, monkeypatch):
    gate, saved, real = threading.Event(), [], checkpoint._write_arrays
    monkeypatch.setattr(checkpoint, "_write_arrays", lambda *args: (gate.wait(10), real(*args)))
    saver = Saver(tmp_path, owned, attempt=1, on_saved=lambda path, kind: saved.append((path.name, kind)))
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = small(1.0)
    saver.save(state, step=4, kind="permanent", tokens=0)
    state = advance(state)
    assert not saved, "the disk is still busy and the caller has gone on"
    gate.set()
    saver.join()
    assert saved == [("step_00000004", "permanent")]
    assert float(restore(newest(tmp_path).path, small())["w"][0, 0]) == 1.0


def test_a_failed_save_is_raised_to_the_caller(tmp_path, owned, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_arrays", full)
    saver = Saver(tmp_path, owned, attempt=1, on_saved=lambda *_: None)
    saver.save(small(), step=4, kind="permanent", tokens=0)
    with pytest.raises(OSError, match="No space left"):
        saver.join()
    saver.poll()
    assert newest(tmp_path) is None


def test_the_first_save_is_read_back(tmp_path, owned, monkeypatch):
    monkeypatch.setattr(checkpoint, "load_file", lambda path: {"w": np.zeros((3, 2), np.float32)})
    saver = Saver(tmp_path, owned, attempt=1, on_saved=lambda *_: None)
    saver.save(small(), step=4, kind="permanent", tokens=0)
    with pytest.raises(RuntimeError, match="does not read back"):
        saver.join()


def test_newest_temporary_only_and_a_promoted_one_stays(tmp_path, owned):
    saver = Saver(tmp_path, owned, attempt=1, on_saved=lambda *_: None)
    for step, kind in ((1, "temporary"), (2, "permanent"), (3, "temporary"), (4, "temporary")):
        saver.save(small(), step=step, kind=kind, tokens=0)
        saver.join()
        if step == 3:
            checkpoint.relabel(checkpoint.folder(tmp_path, 3), "permanent")
    assert [path.name[-1] for path in folders(tmp_path)] == ["2", "3", "4"]


def test_who_lost_the_folder_cannot_save(tmp_path, owned):
    (tmp_path / "worker.fence").write_text(str(owned.fence + 1))
    with pytest.raises(Fenced):
        save(tmp_path, owned, small(), 4)
    assert folders(tmp_path) == []


def test_manifest_is_the_contract(tmp_path, owned):
    path = save(tmp_path, owned, small(), 4)
    fields = json.loads((path / "manifest.json").read_text())
    assert set(fields) == {"schema", "step", "kind", "attempt", "fence", "arrays", "files", "tokens", "at"}
