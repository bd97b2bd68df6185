"""`batch(step)`: pure, exact, the same on any number of hosts, on any size of store."""

import random
import time
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.tokens.batches import open_batches
from noonsight.tokens.mixture import MixtureConfig, Phase
from tests.tokens.voyage import run_mixture, run_store, run_tokenizer, sentence, synthetic_store, write_corpus

LENGTH = 8
CELLS = {"aq0": 800, "bq2": 333, "cq4": 96, "dq0": 5}  # 100, 41 (5 cut) and 12 rows, and one shorter than a row


def numbered_store(root, cells=CELLS):
    """Every token is its own position + 1, so a batch shows where it was cut; 0 (EOS) never occurs."""
    return synthetic_store(root, cells, np.arange(1, sum(cells.values()) + 1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("batches")
    store = numbered_store(root)
    phases = (Phase(), Phase(name="cooldown", start_fraction=0.5, quality_tilt=0.5))
    return store, run_mixture(root, store), run_mixture(root, store, MixtureConfig(phases=phases, block_rows=16), "two")


def opened(folders, *, two=False, seed=0, batch_size=4, **options):
    store, one, other = folders
    return open_batches(
        store, other if two else one, seed=seed, sequence_length=LENGTH, batch_size=batch_size, **options
    )


def test_the_form_of_a_batch(folders):
    batch = opened(folders).batch(0)
    assert [(a.shape, a.dtype) for a in batch] == [((4, 8), np.int32), ((4, 8), np.int32), ((4, 8), np.float32)]
    assert (batch.weights[:, -1] == 0).all()


@pytest.mark.parametrize("length", [1, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH, 5 * LENGTH])
def test_segments_count_the_ends_before_a_position(tmp_path, length):
    """Documents of every awkward length, EOS included, packed: boundaries fall anywhere in a row."""
    stream = np.tile(np.r_[np.full(length - 1, 7), 0], 12 * LENGTH)
    store = synthetic_store(tmp_path, {"aq0": len(stream)}, stream)
    batches = open_batches(store, run_mixture(tmp_path, store), seed=0, sequence_length=LENGTH, batch_size=2)
    for step in range(batches.num_steps_per_epoch):
        batch, places = batches.batch(step), batches.places(step)
        for row in range(2):
            expected = stream[places.start[row] : places.start[row] + LENGTH]
            assert batch.tokens[row].tolist() == expected.tolist()
            assert batch.segments[row].tolist() == [int((expected[:t] == 0).sum()) for t in range(LENGTH)]
            assert batch.weights[row].tolist() == [1.0] * (LENGTH - 1) + [0.0]


def test_every_token_of_an_epoch_is_served_once_but_for_the_stated_cut(folders):
    batches = opened(folders, num_steps=400)
    seen = {name: {} for name in CELLS}
    for step in range(400):
        batch, places = batches.batch(step), batches.places(step)
        for row, (cell, epoch) in enumerate(zip(places.cell, places.epoch)):
            name = batches.mixture.cells[cell]
            tokens = batch.tokens[row][batch.segments[row] >= 0]
            seen[name].setdefault(int(epoch), Counter()).update(tokens.tolist())
    assert batches.cut_tokens == {"aq0": 0, "bq2": 5, "cq4": 0, "dq0": 0}
    first = 1
    for name, size in CELLS.items():
        epochs = seen[name]
        assert sorted(epochs) == list(range(len(epochs))) and len(epochs) >= 4
        for epoch in range(len(epochs) - 1):
            assert set(epochs[epoch].values()) == {1}
            assert len(epochs[epoch]) == size - batches.cut_tokens[name]
            assert set(epochs[epoch]) <= set(range(first, first + size))
        first += size
    everything = set().union(*(epoch for epochs in seen.values() for epoch in epochs.values()))
    assert len(everything) == sum(CELLS.values())  # the cut moves, so no token is left out for ever


def test_each_epoch_has_an_order_of_its_own(folders):
    batches = opened(folders)
    orders = {}
    for step in range(250):
        places = batches.places(step)
        for cell, epoch, start in zip(*places[1:]):
            orders.setdefault((int(cell), int(epoch)), []).append(int(start))
    first, second, third = (orders[0, epoch] for epoch in range(3))
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third != first and first != sorted(first)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 99))
def test_a_step_is_the_same_whenever_and_however_it_is_asked(folders, step, seed):
    """Resume, replay and any split over hosts: nothing depends on the calls before or on who asks."""
    straight, fresh = opened(folders, seed=seed), opened(folders, seed=seed)
    straight.batch(step + 1)
    whole = straight.batch(step)
    for hosts in (1, 2, 4):
        size = 4 // hosts
        parts = [fresh.batch(step, rows=slice(h * size, (h + 1) * size)) for h in range(hosts)]
        for field, expected in zip(zip(*parts), whole):
            assert np.array_equal(np.concatenate(field), expected)


def test_the_stream_of_rows_does_not_depend_on_the_batch_size(folders):
    small = np.concatenate([opened(folders, batch_size=2).batch(step).tokens for step in range(60)])
    large = np.concatenate([opened(folders, batch_size=12).batch(step).tokens for step in range(10)])
    assert np.array_equal(small, large)


def test_other_seeds_give_other_orders(folders):
    assert not np.array_equal(opened(folders, seed=1).batch(0).tokens, opened(folders, seed=2).batch(0).tokens)


def test_weights_of_very_different_size_are_served_exactly(tmp_path):
    store = numbered_store(tmp_path, {"aq0": 4000, "bq0": 80, "cq0": 80})
    weights = (("aq0", 0.999), ("bq0", 0.001), ("cq0", 0.0))
    mixture = run_mixture(tmp_path, store, MixtureConfig(phases=(Phase(weights=weights),), block_rows=16))
    batches = open_batches(store, mixture, seed=0, sequence_length=LENGTH, batch_size=4)
    period = batches.mixture.period_rows
    cells = np.concatenate([batches.places(step).cell for step in range(period // 4)])
    assert np.bincount(cells, minlength=3).tolist() == list(batches.mixture.phases[0].rows)
    assert 1 in cells[:16] and 2 not in cells
    assert np.bincount(cells, minlength=3)[1] == pytest.approx(0.001 * period, abs=1)


def test_phases_change_the_mixture_at_a_whole_block_and_epochs_go_on(folders):
    batches = opened(folders, two=True, num_steps=100)
    phases = np.concatenate([batches.places(step).phase for step in range(100)])
    assert np.flatnonzero(np.diff(phases)).tolist() == [round(0.5 * 400 / 16) * 16 - 1]
    cells = np.concatenate([batches.places(step).cell for step in range(100)])
    cut = int((phases == 0).sum())
    share = [np.mean(cells[:cut] == 2), np.mean(cells[cut:] == 2)]
    assert share[1] > 3 * share[0]
    ordinals = {}
    for step in range(100):
        places = batches.places(step)
        for cell, epoch, start in zip(*places[1:]):
            ordinals.setdefault((int(cell), int(epoch)), []).append(int(start))
    assert all(len(set(starts)) == len(starts) for starts in ordinals.values())
    assert batches.epochs()["cq4"] == pytest.approx((cells == 2).sum() / 12)
    assert batches.epochs(37)["aq0"] == pytest.approx((cells[: 37 * 4] == 0).sum() / 100)
    assert batches.describe(0)["phase"] == "main" and batches.describe(99)["phase"] == "cooldown"
    assert sum(cell["rows"] for cell in batches.describe(5)["cells"].values()) == 4


def test_simulated_epochs_repeat_as_the_long_run_will(tmp_path):
    store = numbered_store(tmp_path, {"aq0": 8000, "bq0": 1600})
    config = MixtureConfig(run_tokens=4 * LENGTH * 1200, simulate_epochs=True, block_rows=16)
    mixture = run_mixture(tmp_path, store, config)
    short, long = (
        open_batches(store, mixture, seed=0, sequence_length=LENGTH, batch_size=4, num_steps=steps)
        for steps in (120, 1200)
    )
    assert short.epochs() == pytest.approx(long.epochs(), rel=0.05)
    assert long.epochs()["aq0"] == pytest.approx(4.0, rel=0.05)
    assert len({int(s) for step in range(120) for s in short.places(step).start}) == 120


def test_opening_refuses_what_would_go_wrong_later(folders):
    store, *_ = folders
    with pytest.raises(ValueError, match="give num_steps"):
        opened(folders, two=True)
    with pytest.raises(ValueError, match="phase 'main' would have no rows: the run has 4 rows"):
        opened(folders, two=True, num_steps=1)
    with pytest.raises(ValueError, match="step 10 is outside the run, which starts at step 0 and ends before step 10"):
        opened(folders, num_steps=10).batch(10)
    with pytest.raises(ValueError, match="step -1 is outside"):
        opened(folders).batch(-1)
    capped = run_mixture(store.parent, store, MixtureConfig(block_rows=16, run_tokens=1000), "capped")
    with pytest.raises(ValueError, match="planned for runs of up to 1000 tokens and this run has 1600"):
        open_batches(store, capped, seed=0, sequence_length=LENGTH, batch_size=4, num_steps=50)


def test_a_lost_file_is_refused_before_step_one_and_a_cut_one_by_name(tmp_path):
    store = numbered_store(tmp_path)
    mixture = run_mixture(tmp_path, store)
    batches = open_batches(store, mixture, seed=0, sequence_length=LENGTH, batch_size=64)
    with (store / "train.bin").open("r+b") as file:
        file.truncate(40)
    with pytest.raises(ValueError, match=r"train.bin ends before token"):
        batches.batch(0)
    (store / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest.json is missing"):
        open_batches(store, mixture, seed=0, sequence_length=LENGTH, batch_size=4)


def test_global_random_states_are_left_alone(folders):
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    opened(folders).batch(5)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_golden_order_of_twenty_batches(folders):
    """The order of training of version 1: a change here changes every run and needs a new version."""
    batches = opened(folders, two=True, seed=11, num_steps=40)
    digest = xxhash.xxh3_64()
    for step in range(10, 30):
        for field in batches.batch(step):
            digest.update(field.tobytes())
    assert digest.hexdigest() == "fd02cfde4de7fe52"


def test_any_step_of_ten_billion_tokens_is_cheap(tmp_path):
    """A sparse file of 20 GB, no span table at all: 64-bit positions, and nothing is read but the rows."""
    cells = {f"c{i}q{j}": 80_000_000 * (i + 1) for i in range(10) for j in range(2)}
    store = synthetic_store(tmp_path, cells | {"zq0": 1_200_000_000})
    mixture = run_mixture(tmp_path, store, MixtureConfig(block_rows=256))
    start = time.perf_counter()
    batches = open_batches(store, mixture, seed=0, sequence_length=256, batch_size=4)
    last = batches.num_steps_per_epoch - 1
    batches.batch(last)
    assert time.perf_counter() - start < 1.0
    starts = np.concatenate([batches.places(step).start for step in range(0, last, last // 200)])
    assert starts.min() >= 0 and starts.max() > 2**32 and starts.max() + 256 <= 10_000_000_000
    seconds = []
    for step in range(0, last, last // 50):
        start = time.perf_counter()
        batches.batch(step)
        seconds.append(time.perf_counter() - start)
    assert np.median(seconds) < 0.005


def test_real_text_survives_the_way_into_a_batch(tmp_path):
    """A source shorter than one sequence is served, padded, and gives no gradient where nothing follows."""
    rng = np.random.default_rng(0)
    write_corpus(tmp_path, [sentence(rng, 40) for _ in range(40)] + ["calm"], ["seaq0"] * 40 + ["bayq0"])
    store = run_store(tmp_path, run_tokenizer(tmp_path))
    batches = open_batches(store, run_mixture(tmp_path, store), seed=0, sequence_length=32, batch_size=16)
    batch, places = batches.batch(0), batches.places(0)
    row = int(np.flatnonzero(places.cell == batches.mixture.cells.index("bayq0"))[0])
    tokenizer = batches.store.tokenizer()
    ids = [*tokenizer.encode("calm"), tokenizer.eos]
    assert batch.tokens[row, : len(ids)].tolist() == ids
    assert batch.segments[row].tolist() == [0] * len(ids) + [-1] * (32 - len(ids))
    assert batch.weights[row].tolist() == [1.0] * (len(ids) - 1) + [0.0] * (33 - len(ids))
