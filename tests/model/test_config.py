from dataclasses import fields, replace

import pytest

from noonsight.model.config import MAX_HISTOGRAM_BINS, ModelConfig
from noonsight.model.families import HERO_LADDER, delphi_layers, hero, hero_kv_heads, hero_ladder, miniature


def test_no_field_has_a_default():
    assert all(field.default is field.default_factory for field in fields(ModelConfig))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_token": 8}, "must be smaller"),  # F16: the (K + 1)-th score would not exist
        ({"num_kv_heads_local": 5, "num_kv_heads_global": 5}, "not a multiple"),
        ({"num_kv_heads_global": 2, "num_kv_heads_local": 3}, "repeat"),
        ({"rope_fraction": 0.4}, "even"),
        ({"dense_width": 64}, "one of them must be 0"),
        ({"num_experts": 0, "balance": "none"}, "no MLP"),
        ({"capacity_factor": 1.15}, "drops nothing"),
        ({"balance": "auxiliary"}, "choose one of"),
        ({"balance_bins": MAX_HISTOGRAM_BINS + 1}, "balance_bins"),
        ({"exchange": "teleport"}, "choose one of"),
        ({"width": 0}, "width"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(miniature(96, 3, 64), **changes)


def test_layers_of_the_hero():
    config = hero()
    is_global = [config.is_global(layer) for layer in range(48)]
    assert sum(is_global) == 12
    assert is_global[3]
    assert not is_global[0]
    assert [layer for layer in range(22) if hero_ladder(2048).is_global(layer)] == [3, 7, 11, 15, 19, 21]


def test_kv_heads_follow_the_published_table():
    published = {768: (1, 1), 1024: (2, 1), 1280: (2, 1), 1536: (3, 1), 2048: (4, 2), 6144: (12, 6)}
    assert {width: hero_kv_heads(width // 128) for width in published} == published


def test_depth_rules():
    assert [delphi_layers(width) for width in (512, 768, 1024, 1280, 1536, 2048, 2560, 3840, 5376, 6144)] == [
        6,
        8,
        11,
        13,
        16,
        21,
        26,
        37,
        51,
        58,
    ]
    assert {width: row[0] for width, row in HERO_LADDER.items() if width > 512} == {
        768: 8,
        1024: 12,
        1280: 14,
        1536: 16,
        2048: 22,
        6144: 48,
    }


def test_unknown_rung_and_odd_width_are_named():
    with pytest.raises(ValueError, match="no rung of width 1000"):
        hero_ladder(1000)
    with pytest.raises(ValueError, match="multiple of the head width"):
        miniature(100, 2, 64)
