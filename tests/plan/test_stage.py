"""A stage that could not be run again from its record is refused when it is written."""

import dataclasses

import pytest

from noonsight.logbook.record import Artifact
from noonsight.plan import fingerprint
from noonsight.plan.stage import Experiment, Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    value: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loose:
    where: object = None


@dataclasses.dataclass
class Mutable:
    value: int = 1


def work(config, inputs, out):
    return Artifact()


def make(**fields):
    return Stage(**{"name": "a", "version": "1", "function": work, "config": Config(), **fields})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": "A b"}, "lower-case"),
        ({"version": "1@2"}, "version"),
        ({"function": lambda config, inputs, out: None}, "top level"),
        ({"config": Mutable()}, "frozen dataclass"),
        ({"config": Config}, "frozen dataclass"),
        ({"inputs": {"x": "voyages/a@1"}}, "must be a Stage"),
        ({"prediction": "oracle"}, "none of its inputs"),
    ],
)
def test_wrong_stages_are_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        make(**fields)


def test_one_address_has_one_meaning_and_the_rule_is_stated():
    other = make(config=Config(value=2))
    with pytest.raises(ValueError, match=r"a@1 twice, differently: config is .*value=1.* and .*value=2.* The rule"):
        Experiment(name="e", question="?", stages=(make(), other)).ordered()
    start, warm = make(name="start"), make(name="warm")
    cold = make(name="run", inputs={"start": start})
    with pytest.raises(ValueError, match=r"run@1 twice.*start@1.*warm@1.*starts from its inputs and its own folder"):
        Experiment(name="e", question="?", stages=(cold, make(name="run", inputs={"start": warm}))).ordered()
    assert [each.name for each in Experiment(name="e", question="?", stages=(make(), make())).ordered()] == ["a"]


def test_inputs_come_first_and_need_not_be_listed():
    first = make(name="first")
    middle = make(name="middle", inputs={"x": first})
    last = make(name="last", inputs={"x": middle, "y": first})
    order = Experiment(name="e", question="?", stages=(last, first)).ordered()
    assert [each.name for each in order] == ["first", "middle", "last"]


@pytest.mark.parametrize("value", [object(), float("nan"), float("inf"), {1, 2}, work])
def test_a_config_that_cannot_be_read_back_is_refused(value):
    with pytest.raises(ValueError, match="config Loose cannot be written down"):
        fingerprint.canonical(Loose(where=value))
