"""The proof of boring runs: every verdict follows from figures."""

from __future__ import annotations

import copy

import pytest

from noonsight.train.health import RULES
from proofs import boring
from proofs.sentinels import FAULTS


def figures():
    facts = {
        "by_kind": {"kill": 50},
        "faults": 50,
        "recovered": 50,
        "lost_samples": 0,
        "repeated_samples": 0,
        "final_weights_identical": True,
        "loss_sequence_identical": True,
        "median_restart_s": 2.6,
        "median_regain_s": 7.0,
        "num_restarts": 50,
        "seconds_lost": 90.0,
        "false_alarms": 0,
    }
    clocks = [{"off_s": 0.1, "supervisors": 1, "goodput": 0.5}, {"off_s": 3.0, "supervisors": 4, "goodput": 0.1}]
    names = ("restarts", "one", "two", "pair")
    drills = [
        {"name": name, "experiment": "e", "stage": "s", "seed": 1, "facts": facts, "clocks": clocks} for name in names
    ]
    one = {"save_s": 0.5, "restore_s": 0.2, "save_over_copy": 0.7, "restore_over_copy": 0.3}
    return {
        "machine": {"cpu": "c", "cores": 2, "python": "3.11", "jax": "0.10"},
        "commit": "abc",
        "at": "now",
        "minutes": 1.0,
        "drills": drills,
        "saves": {
            "memory": {"saves": 1000, "slope_mb_per_save": 1e-4},
            "stall": {"step_s": 0.05, "beside_a_save": {"median": 0.06, "most": 0.09}},
        },
        "benchmark": {"contestants": {"ours": one, "orbax": one}},
        "sentinels": {
            "planted": [{"sentinel": name, "step": 100, "told_at": 110, "steps": 11} for name in FAULTS],
            "clean_steps": 10_200,
            "false_alarms": [],
        },
        "devices": [{"same_samples": True, "losses_off": 1e-7, "same_bits_again": True}],
    }


def test_good_figures_hold_and_are_shown():
    found = figures()
    found["summary"] = boring.summary(found)
    assert all(each["holds"] for each in found["summary"]) and "kill 200" in boring.table(found)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("drills", 0, "facts", "faults"), 49),
        (("drills", 1, "facts", "recovered"), 49),
        (("drills", 1, "facts", "lost_samples"), 4),
        (("drills", 2, "facts", "final_weights_identical"), False),
        (("drills", 3, "facts", "false_alarms"), 1),
        (("drills", 0, "facts", "median_restart_s"), 6.5),
        (("drills", 0, "clocks", 0, "off_s"), 1.2),
        (("saves", "memory", "slope_mb_per_save"), 0.2),
        (("saves", "stall", "beside_a_save", "most"), 0.3),
        (("benchmark", "contestants", "ours", "save_over_copy"), 1.6),
        (("sentinels", "planted", 3, "steps"), None),
        (("sentinels", "planted", 3, "steps"), 51),
        (("sentinels", "clean_steps"), 9_000),
        (("devices", 0, "losses_off"), 1e-5),
    ],
)
def test_each_figure_can_fail(path, value):
    found = copy.deepcopy(figures())
    inner = found
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    assert sum(not each["holds"] for each in boring.summary(found)) >= 1


def test_every_sentinel_is_planted():
    assert set(FAULTS) == {rule.name for rule in RULES}
