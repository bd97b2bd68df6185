"""The drill: faults are drawn fairly, and what differs between two runs is found. Whole drills run in a lane."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.logbook.claim import claim
from noonsight.logbook.record import Run, encode, now
from noonsight.logbook.write import Writer, append_line
from noonsight.train.recover import drill
from noonsight.train.recover.drill import DrillConfig, compare, draw, judge, problems


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(0, 99), st.integers(1, 4))
def test_faults_are_drawn_fairly(num_faults, seed, num_processes):
    told = {"num_steps": 400, "checkpoint_every": 10, "num_processes": num_processes}
    faults = draw(num_faults, seed, **told)
    assert faults == draw(num_faults, seed, **told)
    steps = [fault.at_step for fault in faults]
    assert len(faults) == num_faults and steps == sorted(set(steps)) and 20 < min(steps) and max(steps) < 398
    counts = [sum(fault.kind == kind for fault in faults) for kind in drill.KINDS]
    assert max(counts) - min(counts) <= 1 and all(0 <= fault.rank < num_processes for fault in faults)
    bad = [fault.at_step for fault in faults if fault.kind == "nan"]
    assert all(not {step - 1, step - 2} <= set(bad) for step in bad), "three in a row would stop the run"


def test_too_many_faults_are_refused():
    with pytest.raises(ValueError, match=r"50 faults need a run with more steps than 100.*at least 123 steps"):
        draw(50, 0, num_steps=100, checkpoint_every=10)


def lived(out, losses, digests, params="p", **facts):
    """A finished run as its files tell it."""
    out.mkdir()
    with claim(out, "worker") as owned:
        writer = Writer(out, owned, 1)
        for step, (loss, digest) in enumerate(zip(losses, digests)):
            writer.metrics(step, {"loss": loss, "batch_digest": digest})
        run = Run(experiment="e", name="r", version="1", fingerprint="f", function="x", status="done", started_at=now())
        writer.record(
            run.__class__(
                **{**{f: getattr(run, f) for f in run.__struct_fields__}, "facts": {"params_hash": params, **facts}}
            )
        )
    return out


def test_what_differs_is_found(tmp_path):
    calm = lived(tmp_path / "calm", [3.0, 2.0, 1.0], [7, 8, 9])
    same = compare(calm, lived(tmp_path / "same", [3.0, 2.0, 1.0], [7, 8, 9]), 4)
    assert problems(same) == [] and same["final_weights_identical"] and same["loss_sequence_identical"]
    wrong = compare(calm, lived(tmp_path / "wrong", [3.0, 2.5, 1.0], [7, 7, 9], params="q"), 4)
    assert (wrong["lost_samples"], wrong["repeated_samples"]) == (4, 4)
    assert not wrong["final_weights_identical"] and not wrong["loss_sequence_identical"]
    with claim(tmp_path / "calm", "worker") as owned:
        Writer(tmp_path / "calm", owned).event("sentinel", "Told in both.", cause="drops", step=1)
    with claim(tmp_path / "same", "worker") as owned:
        told = Writer(tmp_path / "same", owned)
        told.event("sentinel", "Told in both.", cause="drops", step=1)
        told.event("sentinel", "Told in one.", cause="drops", step=2)
        told.event("hang", "Nobody asked for it.", cause="hang", step=2)
        told.event("killed", "On purpose.", cause="injected", step=2)
    assert compare(calm, tmp_path / "same", 4)["false_alarms"] == 2


def test_a_failed_drill_says_so_and_keeps_its_figures(tmp_path):
    calm, storm = (lived(tmp_path / name, [1.0], [digest]) for name, digest in (("calm", 1), ("storm", 2)))
    append_line(storm / "faults.jsonl", encode({"kind": "kill", "at_step": 0}))
    out = tmp_path / "drill"
    with pytest.raises(AssertionError, match="5 lost samples; 5 repeated samples"):
        judge(DrillConfig(batch_size=5), {"undisturbed": calm, "disturbed": storm}, out)
    assert (out / "drill.json").exists() and (out / "tables" / "drill.json").exists()
