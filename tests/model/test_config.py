from dataclasses import fields, replace

import pytest

from noonsight.model.config import MAX_HISTOGRAM_BINS, ModelConfig
from noonsight.model.families import HERO_LADDER, delphi, delphi_layers, hero, hero_kv_heads, hero_ladder, miniature


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
        ({"latent_width": -48}, "latent_width is -48"),
        ({"num_shared_experts": -1}, "num_shared_experts is -1"),
        ({"num_experts": -1}, "num_experts is -1"),
        ({"expert_width": -3}, "expert_width is -3"),
        ({"expert_width": 0}, "expert_width is 0; routed experts"),
        ({"shared_width": 0}, "shared_width is 0; 2 shared experts"),
        ({"global_window": 0}, "global_window is 0.*None lets"),
        ({"global_window": -5}, "global_window is -5"),
        ({"global_every": 0}, "global_every is 0.*None"),
        ({"num_kv_heads_local": 0}, "num_kv_heads_local is 0"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"qk_mult": 0.0}, "qk_mult is 0.0"),
        ({"init_scale": -0.5}, "init_scale is -0.5"),
        ({"head_init_scale": 0.0}, "head_init_scale is 0.0"),
        ({"tie_embeddings": True, "head_init_scale": 1.0}, "the head is the embedding; use its init_scale 0.5"),
        ({"gated_norm_rank": 97}, "more than the width 96"),
        ({"sconv_kernel": 257}, "more than the sequence_length 256"),
        ({"norm_eps": 1e-46}, "norm_eps is 1e-46; it must be at least 1.2e-38"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(miniature(96, 3, 64), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 96.0}, "width is 96.0; it must be an int"),
        ({"num_layers": True}, "num_layers is True; it must be an int"),
        ({"num_experts_per_token": 2.5}, "it must be an int"),
        ({"global_every": 2.5}, "it must be an int or None"),
        ({"window": None}, "window is None; it must be an int$"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; it must be a number"),
        ({"norm_eps": None}, "norm_eps is None; it must be a number"),
        ({"qk_mult": True}, "it must be a number"),
        ({"head_gate": "no"}, "head_gate is 'no'; it must be True or False"),
        ({"tie_embeddings": 1}, "it must be True or False"),
        ({"balance": "histogramm"}, "did you mean 'histogram'"),
        ({"remat": None}, "remat is None; choose one of none, block, offload"),
    ],
)
def test_a_value_of_another_type_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(miniature(96, 3, 64), **changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39, 10**400], ids=str)
def test_no_float_is_beyond_float32(value):
    config = hero()
    names = [field.name for field in fields(ModelConfig) if "float" in field.type and "Literal" not in field.type]
    assert {"rope_theta", "z_loss_weight", "norm_eps", "capacity_factor"} < set(names)
    for name in names:
        with pytest.raises(ValueError, match=f"{name} is .*finite in float32"):
            replace(config, **{name: value})


def test_an_int_will_do_for_a_float():
    assert replace(hero(), rope_theta=10_000) == hero()


def test_the_rotated_part_is_whole_within_rounding():
    assert replace(hero(), head_width=100, rope_fraction=0.28).rotated_width == 28  # 28.000000000000004
    assert replace(hero(), head_width=100, rope_fraction=0.58).rotated_width == 58  # 57.99999999999999
    for fraction, found in ((0.29, "28.99"), (0.285, "28.4")):
        with pytest.raises(ValueError, match=f"is {found}.*even number"):
            replace(hero(), head_width=100, rope_fraction=fraction)


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
    for width, near in ((0, "128 or more"), (-128, "128 or more"), (100, "128 or more"), (200, "128 or 256")):
        with pytest.raises(ValueError, match=f"delphi: width {width} is not a positive multiple.*take {near}"):
            delphi(width)
    with pytest.raises(ValueError, match="take 8 or more"):
        miniature(0, 2, 64)
