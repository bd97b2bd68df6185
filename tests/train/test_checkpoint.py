"""Checkpoints: whole or absent, verified on the way in, never a reason to start from random weights."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from noonsight.logbook.claim import Fenced, claim
from noonsight.train import checkpoint
from noonsight.train.checkpoint import (
    NonFiniteState,
    NoValidCheckpoint,
    Saver,
    StorageRefused,
    folders,
    newest,
    restore,
    root_of,
    saving,
    storage,
    to_host,
)
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
    return checkpoint.write(root_of(out), to_host(state), step=step, kind=kind, tokens=step, claim=owned, attempt=1)


def small(value=1.0):
    return {"w": jnp.full((3, 2), value), "step": jnp.int32(4)}


def test_every_leaf_of_the_live_state_comes_back_bit_for_bit(tmp_path, owned, trained):
    save(tmp_path, owned, trained, 7)
    again = restore(newest(root_of(tmp_path)).path, jax.eval_shape(lambda: trained))
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
    assert manifest.files == {part_of(path).name: {"bytes": part_of(path).stat().st_size}}
    kept = load_file(part_of(path))  # the format is that of the safetensors library
    np.testing.assert_array_equal(kept["w|1"], np.ones((3, 2)))


def test_only_exact_names_are_checkpoints(tmp_path, owned):
    for step in (9, 10, 100):
        save(tmp_path, owned, small(), step)
    for name in ("step_00000010_old", "step-9", "step_00000200.tmp", "step_7", "step_0000000300", "step_xxxxxxxx"):
        shutil.copytree(tmp_path / "checkpoints/step_00000010", tmp_path / "checkpoints" / name)
    assert [path.name for path in folders(root_of(tmp_path))] == ["step_00000009", "step_00000010", "step_00000100"]
    assert newest(root_of(tmp_path)).manifest.step == 100


def part_of(path):
    (part,) = path.glob("*.safetensors")
    return part


def flip_a_byte(path):
    data = bytearray(part_of(path).read_bytes())
    data[-3] ^= 1
    part_of(path).write_bytes(data)


DAMAGE = {
    "flipped": flip_a_byte,
    "torn": lambda path: os.truncate(part_of(path), 40),
    "no arrays": lambda path: part_of(path).unlink(),
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
    found = newest(root_of(tmp_path))
    assert found.manifest.step == 10 and len(found.rejected) == 1
    assert found.rejected[0].startswith("step_00000020: ")
    if damage == "no arrays":
        assert ".safetensors is missing" in found.rejected[0]


def test_with_none_valid_it_raises_and_with_none_at_all_it_does_not(tmp_path, owned):
    assert newest(root_of(tmp_path)) is None
    for step in (10, 20):
        DAMAGE["flipped"](save(tmp_path, owned, small(), step))
    with pytest.raises(NoValidCheckpoint, match="does not start again from random weights"):
        newest(root_of(tmp_path))


def test_what_a_killed_save_left_is_no_checkpoint_and_does_not_block_the_next(tmp_path, owned):
    torn = tmp_path / "checkpoints/step_00000010.tmp"
    torn.mkdir(parents=True)
    (torn / "arrays.safetensors").write_bytes(b"half")
    assert newest(root_of(tmp_path)) is None
    save(tmp_path, owned, small(), 10)
    assert newest(root_of(tmp_path)).manifest.step == 10 and not torn.exists()


KILLED_INSIDE_WRITE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from noonsight.logbook.claim import claim
from noonsight.train import checkpoint
from noonsight.train.checkpoint import saving, storage

SLICE = saving.Slice(path="w", start=(0,), of=(100,), data=np.ones(100, np.float32))
saving.CHUNK_BYTES = 40  # ten writes

def write(root, owned, step):
    checkpoint.write(root, [SLICE], step=step, kind="permanent", tokens=0, claim=owned, attempt=1)

class Dying:
    def __init__(self, left): self.left = left
    def __call__(self, chunk):
        self.left -= 1
        return os.kill(os.getpid(), signal.SIGKILL) if self.left < 0 else memoryview(chunk)

root = Path(sys.argv[1]) / "checkpoints"
with claim(root.parent, "worker") as owned:
    write(root, owned, 10)
    cuts = [*range(10), "write_manifest", "sync"]
    for cut in cuts:
        child = os.fork()
        if child == 0:
            if isinstance(cut, int):
                saving.memoryview = Dying(cut)
            else:
                setattr(saving, cut, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            write(root, owned, 20)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, cut
        found = checkpoint.newest(root)
        assert found.manifest.step == 10 and not found.rejected, (cut, found)
        assert (root / "step_00000020.tmp").exists(), cut
    write(root, owned, 20)
    assert checkpoint.newest(root).manifest.step == 20
"""


def test_a_kill_at_each_tenth_of_a_save_leaves_the_one_before_and_the_step_can_be_saved_again(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED_INSIDE_WRITE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_damaged_folder_of_the_same_step_is_replaced(tmp_path, owned):
    DAMAGE["flipped"](save(tmp_path, owned, small(1.0), 10))
    save(tmp_path, owned, small(2.0), 10)
    assert float(restore(newest(root_of(tmp_path)).path, small())["w"][0, 0]) == 2.0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"w": jnp.zeros((2, 3)), "step": jnp.int32(0)}, r"w is float32\[3, 2\], this run has float32\[2, 3\]"),
        ({"w": jnp.zeros((3, 2), jnp.float16), "step": jnp.int32(0)}, "this run has float16"),
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
    for value in (jnp.nan, jnp.inf):
        with pytest.raises(NonFiniteState, match="after 5 steps holds non-finite numbers in w; it is not saved"):
            save(tmp_path, owned, {"v": jnp.ones(2), "w": jnp.array([1.0, value])}, 5)
    assert folders(root_of(tmp_path)) == []


def test_saving_does_not_wait_for_the_disk_and_keeps_what_was_current(tmp_path, owned, monkeypatch):
    gate, saved, real = threading.Event(), [], saving._write_part
    monkeypatch.setattr(saving, "_write_part", lambda *args: (gate.wait(10), real(*args))[1])
    keeper = Saver(root_of(tmp_path), owned, attempt=1, on_saved=lambda path, kind: saved.append((path.name, kind)))
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = small(1.0)
    keeper.save(state, step=4, kind="permanent", tokens=0)
    state = advance(state)
    assert not saved, "the disk is still busy and the caller has gone on"
    gate.set()
    keeper.join()
    assert saved == [("step_00000004", "permanent")]
    assert float(restore(newest(root_of(tmp_path)).path, small())["w"][0, 0]) == 1.0


def test_a_failed_save_is_raised_to_the_caller_and_the_next_one_works(tmp_path, owned, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    keeper = Saver(root_of(tmp_path), owned, attempt=1, on_saved=lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "_write_part", full)
        keeper.save(small(), step=4, kind="permanent", tokens=0)
        with pytest.raises(StorageRefused, match=r"No space left on device\. The one before it is safe"):
            keeper.join()
    keeper.poll()
    assert newest(root_of(tmp_path)) is None
    keeper.save(small(), step=4, kind="permanent", tokens=0)
    keeper.join()
    assert newest(root_of(tmp_path)).manifest.step == 4


def test_the_first_save_is_read_back(tmp_path, owned, monkeypatch):
    monkeypatch.setattr(saving.reading, "_checksum", lambda *_: "another")
    keeper = Saver(root_of(tmp_path), owned, attempt=1, on_saved=lambda *_: None)
    keeper.save(small(), step=4, kind="permanent", tokens=0)
    with pytest.raises(RuntimeError, match="does not read back"):
        keeper.join()


def test_newest_temporary_only_and_a_promoted_one_stays(tmp_path, owned):
    keeper = Saver(root_of(tmp_path), owned, attempt=1, on_saved=lambda *_: None)
    for step, kind in ((1, "temporary"), (2, "permanent"), (3, "temporary"), (4, "temporary")):
        keeper.save(small(), step=step, kind=kind, tokens=0)
        keeper.join()
        if step == 3:
            checkpoint.relabel(checkpoint.folder(root_of(tmp_path), 3), "permanent")
    assert [path.name[-1] for path in folders(root_of(tmp_path))] == ["2", "3", "4"]


def test_who_lost_the_folder_cannot_save(tmp_path, owned):
    (tmp_path / "worker.fence").write_text(str(owned.fence + 1))
    with pytest.raises(Fenced):
        save(tmp_path, owned, small(), 4)
    assert folders(root_of(tmp_path)) == []


def test_manifest_is_the_contract(tmp_path, owned):
    path = save(tmp_path, owned, small(), 4)
    fields = json.loads((path / "manifest.json").read_text())
    assert set(fields) == {"schema", "step", "kind", "attempt", "fence", "arrays", "files", "tokens", "at"}


def shardings(num_devices, memory_kind=None):
    """w[E, D] by expert and data, b[D] whole, on the first devices."""
    sizes = {1: (1, 1), 2: (2, 1), 4: (4, 1), 8: (4, 2)}[num_devices]
    mesh = jax.make_mesh(sizes, ("expert", "data"), devices=jax.devices()[:num_devices])
    specs = {"w": jax.sharding.PartitionSpec("expert", "data"), "b": jax.sharding.PartitionSpec()}
    return {name: jax.sharding.NamedSharding(mesh, spec, memory_kind=memory_kind) for name, spec in specs.items()}


WHOLE = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.arange(4, dtype=np.float32)}


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 2), (4, 8), (1, 8), (8, 4)])
def test_kept_by_some_devices_restored_on_others(tmp_path, owned, before, after):
    path = save(tmp_path, owned, jax.device_put(WHOLE, shardings(before)), 3)
    assert len(checkpoint.read_manifest(path).arrays["w"]["slices"]) == before, "each slice once, no replica"
    assert len(checkpoint.read_manifest(path).arrays["b"]["slices"]) == 1
    target = {
        name: jax.ShapeDtypeStruct(WHOLE[name].shape, np.float32, sharding=at) for name, at in shardings(after).items()
    }
    again = restore(path, target)
    for name, array in again.items():
        np.testing.assert_array_equal(array, WHOLE[name])
        assert array.sharding == target[name].sharding


def test_float32_becomes_bfloat16_and_never_the_reverse(tmp_path, owned):
    path = save(tmp_path, owned, {"w": jnp.full((3,), 1.00390625)}, 1)
    short = restore(path, {"w": jnp.zeros(3, jnp.bfloat16)})["w"]
    assert short.dtype == jnp.bfloat16 and float(short[0]) == 1.0
    path = save(tmp_path, owned, {"w": short}, 2)
    np.testing.assert_array_equal(restore(path, {"w": short})["w"], short)
    with pytest.raises(ValueError, match="w was kept as bfloat16 and cannot become the float32 master"):
        restore(path, {"w": jnp.zeros(3)})


def parts(root, claims, ranks):
    """Each rank of several writes its half, in any order; what rank 0 returned, or raised."""
    halves = [
        [saving.Slice(path="w", start=(4 * rank, 0), of=(8, 4), data=WHOLE["w"][4 * rank : 4 * rank + 4])]
        for rank in (0, 1)
    ]
    told = {"step": 6, "kind": "permanent", "tokens": 0, "attempt": 1, "num_ranks": 2}
    return [checkpoint.write(root, halves[rank], rank=rank, claim=claims[rank], **told) for rank in ranks]


@pytest.mark.parametrize("address", ["local", "memory://kept"])
def test_ranks_write_their_parts_and_the_first_completes_them(tmp_path, owned, address, monkeypatch):
    from upath import UPath

    monkeypatch.setattr(storage, "INVISIBLE_S", 0.0)
    root = root_of(tmp_path) if address == "local" else UPath(f"{address}/{tmp_path.name}")
    nothing, path = parts(root, [owned, owned], (1, 0))
    assert nothing is None and [each.name for each in folders(root)] == ["step_00000006"]
    assert sorted(each.name for each in path.iterdir()) == [
        "manifest.json",
        f"part_00000_of_00002_f{owned.fence}.safetensors",
        f"part_00001_of_00002_f{owned.fence}.safetensors",
    ]
    np.testing.assert_array_equal(restore(newest(root).path, {"w": jnp.zeros((8, 4))})["w"], WHOLE["w"])
    (path / f"part_00001_of_00002_f{owned.fence}.safetensors").unlink()
    assert "part_00001" in checkpoint.verify(path)
    (path / "manifest.json").unlink()
    assert (newest(root) is None) if address != "local" else True, "without the mark it is nothing"


def test_a_rank_that_does_not_come_is_named(tmp_path, owned, monkeypatch):
    monkeypatch.setattr(saving, "RANKS_S", 0.0)
    with pytest.raises(TimeoutError, match=r"rank 1 has not written its part of step_00000006\.tmp"):
        parts(root_of(tmp_path), [owned, owned], (0,))
    assert folders(root_of(tmp_path)) == []


def test_parts_of_an_earlier_attempt_are_not_mixed_in(tmp_path, owned, monkeypatch):
    parts(root_of(tmp_path), [owned, owned], (1,))
    monkeypatch.setattr(saving, "RANKS_S", 0.0)
    owned.fence += 1
    (tmp_path / "worker.fence").write_text(str(owned.fence))
    with pytest.raises(TimeoutError):
        parts(root_of(tmp_path), [owned, owned], (0,))


def test_room_is_looked_for_before_anything_is_written(tmp_path, owned, monkeypatch):
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda place: SimpleNamespace(free=20_000_000))
    with pytest.raises(StorageRefused, match=r"20.0 MB free and 50.0 MB are needed.*noon prune.*last one is safe"):
        checkpoint.require_space(root_of(tmp_path), 50_000_000)
    checkpoint.require_space(root_of(tmp_path), 19_000_000)
    assert list(root_of(tmp_path).iterdir()) == []


def test_storage_that_refuses_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    assert "takes no writes" in checkpoint.writable(tmp_path / "file" / "below", 1)
    assert checkpoint.writable(tmp_path / "new", 1) is None and checkpoint.writable("memory://new", 1) is None


def test_a_file_that_shows_late_is_waited_for():
    now, looks = [0.0], []

    def look():
        looks.append(now[0])
        return "here" if now[0] >= 3.0 else None

    def wait(seconds):
        now[0] += seconds

    assert storage.patiently(look, 10.0, clock=lambda: now[0], wait=wait) == "here" and now[0] < 4.5
    assert storage.patiently(lambda: None, 10.0, clock=lambda: now[0], wait=wait) is None


def test_a_hundred_saves_leave_no_thread_no_file_and_no_memory(tmp_path, owned):
    def held():
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident, len(os.listdir("/proc/self/fd")), threading.active_count()

    state = {"w": jnp.ones((256, 1024))}  # 1 MB
    keeper = Saver(root_of(tmp_path), owned, attempt=1, on_saved=lambda *_: None)
    for step in range(120):
        if step == 20:
            before = held()
        keeper.save(state, step=step, kind="temporary", tokens=0)
        keeper.join()
    after = held()
    assert after[1:] == before[1:] and after[0] - before[0] < 100 * 100_000, "0.1 MB a save"
    assert [path.name for path in folders(root_of(tmp_path))] == ["step_00000119"]
