"""Skip, run, stop: the same command is always right, and whatever moved is named."""

import json

import pytest

from noonsight.logbook import read
from noonsight.plan import runner


def files(voyage):
    return {path: path.read_bytes() for path in voyage.root.rglob("*.json")}


def test_runs_in_order_then_says_that_all_is_done(voyage):
    code, said = voyage.run()
    assert code == runner.DONE
    assert "toy: 2 stages, 0 done" in said and "number > double" in said and "the double is 12" in said
    assert voyage.pages == 1 and all(len(line) <= 100 for line in said.splitlines())
    run = read.run(voyage.out("double@1"))
    assert (run.status, run.facts) == ("done", {"value": 12})
    assert run.files.keys() == {"n.txt"} and run.inputs["number"]["stage"] == "number@1"
    before = files(voyage)
    code, said = voyage.run()
    assert code == runner.DONE and "all 2 stages are done already" in said
    assert files(voyage) == before and voyage.pages == 1
    found = read.experiments(voyage.root)[0]
    assert (found.stages, found.edges) == (("number@1", "double@1"), (("number@1", "double@1"),))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("value: int = 2", "value: int = 5", "number@1  config.value: 2 -> 5"),
        ("rate: float = 0.5", "rate: float = 0.25", "number@1  config.inner.rate: 0.5 -> 0.25"),
        ("(1, 2)", "(1, 3)", "number@1  config.sizes[1]: 2 -> 3"),
        ('inputs={"number": first}', 'inputs={"number": first, "more": first}', "double@1  input more: added"),
        ("* 2\n", "* 4\n", "double@1  code toy.py changed"),
    ],
)
def test_what_moved_is_named_and_nothing_runs(voyage, old, new, named):
    voyage.run()
    before = files(voyage)
    voyage.edit(old, new)
    code, said = voyage.run()
    assert code == runner.MOVED and named in said
    assert ("--accept-code" in said) == ("code" in named)
    assert files(voyage) == before and voyage.pages == 1


def test_results_made_from_what_moved_are_named_too(voyage):
    voyage.run()
    voyage.edit("function=number, config=Config()", "function=number, config=Config(value=5)")
    code, said = voyage.run()
    assert code == runner.MOVED and "number@1  config.value: 2 -> 5" in said
    assert "and what was made from them: double@1" in said


def test_code_beside_the_experiment_is_seen_and_unreached_code_is_not(voyage):
    voyage.run()
    voyage.edit("nobody's business", "still nobody's")
    voyage.edit("Does it run?", "Does it run well?")
    assert voyage.run()[0] == runner.DONE
    voyage.edit("* 3", "* 3 + 0", "beside.py")
    code, said = voyage.run()
    assert code == runner.MOVED and "number@1  code beside.py changed" in said and "double@1  " not in said


def test_accepted_code_is_recorded_kept_and_settles_its_users(voyage):
    voyage.run()
    before = (voyage.out("number@1") / "record.json").read_bytes()
    voyage.edit("* 3", "* 3 + 0", "beside.py")
    code, said = voyage.run(accept_code=True)
    assert code == runner.DONE and "accepted: beside.py changed" in said
    assert (voyage.out("number@1") / "record.json").read_bytes() == before
    accepted = [event for event in read.events(voyage.out("number@1")) if event.kind == "code-accepted"]
    assert len(accepted) == 1 and "beside.py" in accepted[0].text
    assert voyage.run()[0] == runner.DONE  # remembered without the flag
    voyage.edit("+ 0", "+ 1", "beside.py")
    assert voyage.run()[0] == runner.MOVED  # but only for the code that was accepted


def test_a_moved_config_cannot_be_accepted_as_code(voyage):
    voyage.run()
    voyage.edit("value: int = 2", "value: int = 5")
    assert voyage.run(accept_code=True)[0] == runner.MOVED


def test_placement_moves_nothing_and_reaches_the_function(voyage):
    voyage.run()
    before = read.run(voyage.out("number@1"))
    voyage.edit('sentence="A number."', "placement=Placement(num_devices=3)")
    assert voyage.run()[0] == runner.DONE and read.run(voyage.out("number@1")) == before


def test_a_result_that_was_damaged_is_named(voyage):
    voyage.run()
    (voyage.out("number@1") / "n.txt").write_text("longer than before")
    code, said = voyage.run()
    assert code == runner.MOVED and "number@1  file n.txt: 1 bytes recorded, 18 found" in said


def test_a_failed_stage_is_one_message_still_makes_pages_and_is_tried_again(voyage):
    voyage.add('Stage(name="collect", version="1", function=collect, config=Config())')
    for _ in range(2):  # not resumable: each try starts from an empty folder
        code, said = voyage.run()
        assert code == runner.FAILED and "failed: RuntimeError: one line is not enough" in said
        assert read.run(voyage.out("collect@1")).status == "failed"
        assert "one line is not enough" in (voyage.out("collect@1") / "error.txt").read_text()
    assert voyage.pages == 2 and read.experiments(voyage.root)[0].status == "failed"
    voyage.edit("< 2", "< 1")  # repaired code needs no permission: there is no result to keep
    assert voyage.run()[0] == runner.DONE
    assert read.run(voyage.out("collect@1")).facts == {"lines": 1}
    assert not (voyage.out("collect@1") / "error.txt").exists()


def test_a_resumable_stage_goes_on_but_never_from_another_config(voyage):
    voyage.add('Stage(name="collect", version="1", function=collect, config=Config(sizes=(9,)), resumable=True)')
    assert voyage.run()[0] == runner.FAILED
    first_s = read.run(voyage.out("collect@1")).seconds
    voyage.edit("sizes=(9,)", "sizes=(8,)")
    code, said = voyage.run()
    assert code == runner.MOVED and "collect@1  config.sizes[0]: 9 -> 8" in said
    voyage.edit("sizes=(8,)", "sizes=(9,)")
    assert voyage.run()[0] == runner.DONE
    run = read.run(voyage.out("collect@1"))
    assert run.facts == {"lines": 2} and run.seconds > first_s


def predicted(voyage):
    voyage.edit(
        '    second = Stage(name="double", version="1", function=double, config=Config(), inputs={"number": first})',
        '    oracle = Stage(name="oracle", version="1", function=forecast, config=Config())\n'
        '    second = Stage(name="double", version="1", function=double, config=Config(), prediction="oracle", '
        'inputs={"number": first, "oracle": oracle})',
    )


def test_a_predicted_stage_records_the_prediction_it_ran_under(voyage):
    predicted(voyage)
    assert voyage.run()[0] == runner.DONE
    run, frozen = read.run(voyage.out("double@1")), read.prediction(voyage.out("oracle@1"))
    assert (run.prediction_hash, run.chain_length) == (frozen.hash, 1)
    assert run.started_at > frozen.frozen_at


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("    write_atomic(out / \"prediction.json\"", "    0 and (out / \"prediction.json\"", "There is no"),
        ("chain.append(out.parent", "0 and (out.parent", "does not hold its hash"),
        ("msgspec.json.encode(frozen)", "msgspec.json.encode(draft)", "was changed after it was hashed"),
        ('run="double@1"', 'run="other@1"', "is about other@1"),
    ],
)  # fmt: skip
def test_no_run_before_its_prediction_is_frozen(voyage, old, new, why):
    predicted(voyage)
    voyage.edit(old, new)
    with pytest.raises(ValueError, match=f"double@1 cannot start before its prediction is frozen.*{why}"):
        voyage.run()
    assert read.run(voyage.out("double@1")) is None
    assert read.run(voyage.out("oracle@1")).status == "done" and voyage.pages == 1


def test_a_full_disk_is_one_message(voyage):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        voyage.edit("str(triple(config.value))", "'x' * 10000")
        code, said = voyage.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == runner.FAILED and " ".join(said.split()).count("Free some space") == 1
    assert read.run(voyage.out("number@1")).status == "failed" and not list(voyage.root.rglob("*.tmp"))
    voyage.edit("'x' * 10000", "str(6)")
    assert voyage.run()[0] == runner.DONE


def test_what_a_stage_prints_is_kept_not_shown(voyage):
    voyage.edit("    (out /", "    print('chatter')\n    (out /")
    assert "chatter" not in voyage.run()[1]
    assert (voyage.out("number@1") / "stderr.txt").read_text() == "chatter\nchatter\n"[:8]
    assert json.loads((voyage.out("number@1") / "stage.json").read_text())["schema"] == 1
