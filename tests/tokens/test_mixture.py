"""The mixture: exact whole numbers, no starving cell, capped epochs; and the permutations under it."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.tokens.mixture import MixtureConfig, Phase, apportion, plan_mixture, read_mixture, spread
from noonsight.tokens.permutation import permute, unpermute
from noonsight.tokens.store import open_store
from tests.tokens.voyage import run_mixture, synthetic_store

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=1, max_size=12).filter(any)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection_with_an_inverse(size, key):
    index = np.arange(size)
    image = permute(index, np.full(size, size), np.full(size, key, np.uint64))
    assert sorted(image.tolist()) == index.tolist()
    assert unpermute(image, np.full(size, size), np.full(size, key, np.uint64)).tolist() == index.tolist()


def test_permutation_is_elementwise_and_exact_beyond_32_bits():
    sizes = np.array([3_000_000_000, 5_000_000_001, 7, 2**62], np.uint64)
    index = np.array([2_999_999_999, 4_123_456_789, 3, 2**61], np.uint64)
    keys = np.array([1, 2, 3, 4], np.uint64)
    image = permute(index, sizes, keys)
    assert (image < sizes).all() and unpermute(image, sizes, keys).tolist() == index.tolist()
    assert image.tolist() == [int(permute(index[i : i + 1], sizes[i : i + 1], keys[i : i + 1])[0]) for i in range(4)]


def test_permutation_shuffles():
    size = 10_000
    image = permute(np.arange(size), np.full(size, size), np.full(size, 9, np.uint64)).astype(float)
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.05
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05


@settings(max_examples=100, deadline=None)
@given(weights, st.integers(12, 5000))
def test_apportion_is_exact_and_leaves_nobody_out(weights, total):
    weights = np.array(weights)
    counts = apportion(weights, total)
    assert counts.sum() == total
    assert ((counts > 0) == (weights > 0)).all()
    quota = weights / weights.sum() * total
    if (quota[weights > 0] >= 1).all():
        assert (abs(counts - quota) <= 1 + 1e-6).all()


@settings(max_examples=60, deadline=None)
@given(weights, st.integers(12, 64), st.integers(1, 64))
def test_blocks_are_exact_and_carry_deficits(weights, block_rows, num_blocks):
    rows = apportion(np.array(weights), block_rows * num_blocks)
    counts = spread(rows, block_rows)
    assert counts.shape == (num_blocks, len(rows)) and (counts >= 0).all()
    assert (counts.sum(axis=1) == block_rows).all()
    assert (counts.sum(axis=0) == rows).all()
    assert (counts[0] >= (rows > 0)).all()
    owed = np.arange(1, num_blocks + 1)[:, None] * block_rows * rows / rows.sum()
    ahead = np.cumsum(counts, axis=0) - owed
    assert ahead.max() <= 1 and ahead.min() >= -len(rows)


def test_a_tiny_weight_is_served_in_the_first_block_and_zero_never(tmp_path):
    store = synthetic_store(tmp_path, {"aq0": 10_000_000, "bq0": 10_000, "cq0": 10_000})
    weights = (("aq0", 1 - 1e-6), ("bq0", 1e-6), ("cq0", 0.0))
    folder = run_mixture(tmp_path, store, MixtureConfig(phases=(Phase(weights=weights),), block_rows=16))
    mixture = read_mixture(folder, open_store(store))
    counts = spread(np.array(mixture.phases[0].rows), mixture.block_rows)
    assert counts[0].tolist() == [15, 1, 0] and counts[:, 2].sum() == 0


def test_weights_follow_tokens_and_tilt(tmp_path):
    store = synthetic_store(tmp_path, {"aq0": 600_000, "aq1": 300_000, "bq1": 100_000})
    flat = plan(tmp_path, store, MixtureConfig())
    assert flat["main"] == pytest.approx({"aq0": 0.6, "aq1": 0.3, "bq1": 0.1}, abs=1e-3)
    tilted = plan(tmp_path, store, MixtureConfig(phases=(Phase(quality_tilt=float(np.log(2))),)))
    assert tilted["main"] == pytest.approx({"aq0": 0.3 / 0.7, "aq1": 0.3 / 0.7, "bq1": 0.1 / 0.7}, abs=1e-3)


def test_epochs_are_reported_and_capped(tmp_path):
    store = synthetic_store(tmp_path, {"aq0": 900_000, "bq4": 100_000})
    phases = (Phase(), Phase(name="cooldown", start_fraction=0.8, quality_tilt=2.0))
    config = MixtureConfig(phases=phases, run_tokens=1_000_000, max_epochs=1.5)
    facts = plan_mixture(config, {"store": store}, tmp_path).facts
    assert facts["epochs"]["bq4"] == pytest.approx(1.5, rel=0.01)
    tokens = {
        cell: sum(share * facts["weights"][name][cell] for name, share in [("main", 8e5), ("cooldown", 2e5)])
        for cell in ("aq0", "bq4")
    }
    assert facts["epochs"] == pytest.approx({"aq0": tokens["aq0"] / 9e5, "bq4": tokens["bq4"] / 1e5})
    table = json.loads((tmp_path / "tables/mixture.json").read_text())
    assert table["columns"] == ["cell", "domain", "level", "tokens", "weight in main", "weight in cooldown", "epochs"]
    assert [row[-1] for row in table["rows"]] == list(facts["epochs"].values())
    with pytest.raises(ValueError, match=r"run of 2000000 tokens repeats the store \(1000000 tokens\).*max_epochs 1.5"):
        plan_mixture(MixtureConfig(run_tokens=2_000_000, max_epochs=1.5), {"store": store}, tmp_path)


def test_a_cell_too_small_for_the_smallest_share_is_named(tmp_path):
    store = synthetic_store(tmp_path, {"aq0": 10**10, "bq0": 100})
    with pytest.raises(ValueError, match="cell 'bq0' has only 100 tokens"):
        plan_mixture(MixtureConfig(run_tokens=10**10, block_rows=16), {"store": store}, tmp_path)


def test_a_named_step_is_a_fraction_of_the_named_run(tmp_path):
    store = synthetic_store(tmp_path, {"aq0": 10_000})
    phases = (Phase(), Phase(name="cooldown", start_step=30))
    folder = run_mixture(tmp_path, store, MixtureConfig(phases=phases, run_steps=40))
    assert [phase.start_fraction for phase in read_mixture(folder, open_store(store)).phases] == [0.0, 0.75]
    with pytest.raises(ValueError, match=r"'cooldown' starts at step 30: set run_steps"):
        plan_mixture(MixtureConfig(phases=phases), {"store": store}, tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MixtureConfig(phases=(Phase(weights=(("aq0", 1.0), ("bq9", 1.0))),)), "'bq9'.*did you mean 'bq0'"),
        (MixtureConfig(phases=(Phase(weights=(("aq0", 1.0),)),)), r"gives no weight to \['bq0'\]"),
        (MixtureConfig(phases=(Phase(weights=(("aq0", -1.0), ("bq0", 1.0))),)), "finite, >= 0"),
        (MixtureConfig(phases=(Phase(weights=(("aq0", float("nan")), ("bq0", 1.0))),)), "finite, >= 0"),
        (MixtureConfig(phases=(Phase(start_fraction=0.1),)), "must start at 0"),
        (MixtureConfig(phases=(Phase(), Phase())), "share a name"),
        (MixtureConfig(phases=()), "must start at 0"),
        (MixtureConfig(block_rows=1), "cannot hold a row of each of 2 cells"),
        (MixtureConfig(simulate_epochs=True), "needs run_tokens"),
    ],
)
def test_a_wrong_plan_is_refused_and_nothing_is_written(tmp_path, config, message):
    store = synthetic_store(tmp_path, {"aq0": 1000, "bq0": 1000})
    with pytest.raises(ValueError, match=message):
        plan_mixture(config, {"store": store}, tmp_path)
    assert not (tmp_path / "mixture.json").exists()


def test_a_mixture_of_another_store_or_damaged_is_refused(tmp_path):
    store = synthetic_store(tmp_path / "one", {"aq0": 1000, "bq0": 1000})
    other = synthetic_store(tmp_path / "two", {"aq0": 1000, "bq0": 999})
    folder = run_mixture(tmp_path, store)
    with pytest.raises(ValueError, match=r"mixture.json was planned for store"):
        read_mixture(folder, open_store(other))
    moved = shutil.move(store, tmp_path / "moved")
    read_mixture(folder, open_store(moved))  # identity is content, not place
    (folder / "mixture.json").write_text('{"schema":1}')
    with pytest.raises(ValueError, match=r"mixture.json is no mixture"):
        read_mixture(folder, open_store(moved))
    (folder / "mixture.json").unlink()
    with pytest.raises(ValueError, match=r"mixture.json is missing"):
        read_mixture(folder, open_store(moved))


def plan(root, store, config):
    return plan_mixture(config, {"store": store}, root).facts["weights"]
