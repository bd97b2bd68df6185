"""The proof of exchanges and rehearsals: every verdict follows from figures, and what is missing is told as missing."""

from __future__ import annotations

import pytest

from proofs import exchange

GIB = 2**30


def figures():
    roomy = {"exchange": "ragged", "shards": 4, "remat": "none", "worst": "y", "dropped": 0}
    tight = {
        "exchange": "ragged",
        "shards": 4,
        "factor": 0.7,
        "draws": 25,
        "dropped": 9,
        "wrong_counts": 0,
        "error": 4e-7,
    }
    rows = [
        roomy | {"dtype": "float32", "error": 4e-7, "bound": 1e-5},
        roomy | {"dtype": "bfloat16", "error": 6e-3, "bound": 2e-2},
    ]
    training = [{"exchange": "ragged", "steps": 12, "first": 5.0, "last": 4.0, "error": 4e-6}]
    mesh = {"loss": 1e-7, "metrics": 1e-7, "gradients": 2e-6, "bound": 1e-5}
    return {
        "exchanges": {"rows": [*rows, tight | {"bound": 1e-5}], "training": training},
        "meshes": [mesh] * 60,
        "rehearsals": [
            *(rehearsed(name) for name in (*exchange.RACK_RUNS, *exchange.TPU_RUNS)),
            *({"name": f"planted: {name}", "told": [{"kind": name}]} for name in ("experts", "remat", "logits")),
            {"name": "planted: none", "told": []},
        ],
    }


def rehearsed(name):
    return {
        "name": name, "lower_s": 3.0, "compile_s": 20.0, "host_memory_bytes": 1.5e9, "peak_bytes_per_device": 100 * GIB,
        "budget_bytes_per_device": 110 * GIB, "exchanged": {"ratio": 1.001}, "useful_and_recompute_over_model_flops": 1.31,
    }  # fmt: skip


def test_good_figures_hold():
    assert all(each["holds"] for each in exchange.summary(figures()))


def first(found, name):
    return next(row for row in found["rehearsals"] if row["name"] == name)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found["exchanges"]["rows"][0].update(error=2e-5),
        lambda found: found["exchanges"]["rows"][0].update(error=float("inf")),
        lambda found: found["exchanges"]["rows"][1].update(dropped=1),
        lambda found: found["exchanges"]["rows"][2].update(wrong_counts=1),
        lambda found: found["exchanges"]["training"][0].update(error=1e-3),
        lambda found: found["meshes"].pop(),
        lambda found: found["meshes"].append(found["meshes"][0] | {"gradients": 2e-5}),
        lambda found: first(found, "hero").update(peak_bytes_per_device=140 * GIB),
        lambda found: first(found, "hero-pooled").update(exchanged={"ratio": 0.9}),
        lambda found: first(found, "hero-v5p").update(peak_bytes_per_device=111 * GIB),
        lambda found: first(found, "planted: remat").update(told=[]),
        lambda found: first(found, "planted: none").update(told=[{"kind": "remat"}]),
    ],
)
def test_one_bad_figure_is_one_verdict(spoil):
    found = figures()
    spoil(found)
    assert [each["holds"] for each in exchange.summary(found)].count(False) == 1


def test_what_was_not_measured_holds_nothing():
    found = figures() | {"rehearsals": [], "meshes": None}
    missing = [each for each in exchange.summary(found) if each["holds"] is None]
    assert len(missing) > 15 and not any(each["holds"] for each in missing)
