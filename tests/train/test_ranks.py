"""Several ranks: what comes to one of them from outside reaches all at the same step, and a gang stands and falls together."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.logbook import read
from noonsight.logbook.claim import claim
from noonsight.logbook.record import Fault, Placement, encode
from noonsight.logbook.write import Writer
from noonsight.train.ranks import TURNS_AHEAD, Ranks
from noonsight.train.recover import supervise
from noonsight.train.recover.gang import start
from noonsight.train.recover.watch import RankBeat, Tail, Watch, rank_beats


class Client:
    """The key-value store of a coordinator."""

    def __init__(self):
        self.kept = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.kept
        self.kept[key] = value

    def key_value_dir_get(self, prefix):
        return [pair for pair in self.kept.items() if pair[0].startswith(prefix)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_wish_is_acted_on_by_all_at_the_same_turn(data):
    """Any interleaving that collectives allow: nobody begins turn t + 2 before everybody has begun turn t."""
    count = data.draw(st.integers(2, 4))
    client = Client()
    ranks = [Ranks(rank, count, client) for rank in range(count)]
    turns, acted = [0] * count, [[] for _ in range(count)]
    wishes = {(data.draw(st.integers(0, count - 1)), data.draw(st.integers(1, 8))) for _ in range(3)}
    while min(turns) < 12:
        ready = [rank for rank in range(count) if turns[rank] < 12 and turns[rank] + 1 < min(turns) + TURNS_AHEAD]
        rank = data.draw(st.sampled_from(ready))
        turns[rank] += 1
        due = ranks[rank].next_turn({"stop": (rank, turns[rank]) in wishes})
        acted[rank] += [turns[rank]] * ("stop" in due)
    assert all(each == acted[0] for each in acted) and acted[0]


def test_alone_a_wish_is_heard_at_once():
    alone = Ranks()
    assert alone.next_turn({"stop": False}) == set() and alone.next_turn({"stop": True, "save": True}) == {
        "stop",
        "save",
    }
    assert alone.next_turn({}) == set() and alone.share("x", "7") == "7"


def gang(out, part, **placement):
    placement = Placement(num_devices=4, num_processes=2, hang_floor_s=20.0, **placement)
    out.mkdir(exist_ok=True)
    (out / "placement.json").write_bytes(encode(placement))
    with claim(out, "stage") as owned:
        return supervise([sys.executable, "-m", "tests.train.rank_puppet", part], out, writer=Writer(out, owned))


def test_a_gang_is_restarted_whole_when_one_rank_is_killed(tmp_path):
    facts = gang(tmp_path, "killed-first")
    assert facts["total"] == 4 * 3.0 and facts["attempt"] == 2, "each of four devices added three"
    assert [event.kind for event in read.events(tmp_path)] == ["killed", "restart"]
    assert facts["stopped"] == [5, 5], "a wish of rank 1 alone stops both before the same turn"


def test_a_gang_goes_on_with_fewer_devices_when_told_so(tmp_path):
    facts = gang(tmp_path, "killed-and-fewer")
    assert (facts["devices"], facts["attempt"], facts["total"]) == (2, 2, 12.0)
    assert facts["stopped"] == [3], "alone a wish is heard at once"


def test_processes_must_share_the_devices(tmp_path):
    with pytest.raises(ValueError, match="shares 4 devices among 3 processes, which leaves a remainder"):
        start([sys.executable], tmp_path, Placement(num_devices=4, num_processes=3))


def test_a_rank_that_holds_the_others_up_is_named_once(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank, own_s in enumerate((0.01, 0.08, 0.012)):
        lines = [encode(RankBeat(step=step, own_s=own_s, step_s=0.1)) for step in range(12)]
        rank_beats(tmp_path, rank).write_bytes(b"\n".join(lines) + b"\n")
    tails = [Tail(path=rank_beats(tmp_path, rank), kind=RankBeat) for rank in range(3)]
    seen = Watch(beats=Tail(path=Path("none"), kind=RankBeat), ranks=tails)
    assert seen.stragglers() == [(1, 0.08, pytest.approx(0.011))] and seen.stragglers() == []


def test_faults_strike_their_own_rank_only(tmp_path):
    from noonsight.train.recover.faults import Faults

    placement = Placement(faults=(Fault(kind="nan", at_step=3, rank=1),))
    with claim(tmp_path, "worker") as owned:
        for rank, struck in ((0, False), (1, True), (1, False)):
            batch = Faults(placement, tmp_path, Writer(tmp_path, owned), rank).before(3, {"x": np.ones(2, np.float32)})
            assert np.isnan(batch["x"]).all() == struck, "once in the life of a folder"
