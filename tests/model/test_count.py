import subprocess
import sys
from dataclasses import replace

import jax
import pytest

from noonsight.model.count import count, count_family
from noonsight.model.families import FAMILIES, delphi, hero, hero_ladder, marin_8b, miniature, snowball
from noonsight.model.params import init_params

HERO = count(hero())


def test_hero():
    assert HERO.total_parameters == 535_477_106_688
    assert HERO.active_parameters == 22_762_487_808
    assert HERO.touched_parameters == 24_510_216_192
    assert HERO.forward_flops_per_token == 49_912_086_528
    assert HERO.parts["experts"] == 48 * 10_871_635_968
    assert HERO.total_parameters - HERO.parts["gated_norms"] == 535_322_966_016
    assert sum(HERO.parts.values()) == HERO.total_parameters


def test_hero_run():
    run = count_family("hero")
    assert (run["steps"], run["tokens"], run["batch_tokens"]) == (390_251, 18_005_144_633_344, 46_137_344)
    assert f"{run['train_flops']:.5e}" == "2.69602e+24"
    shorter = count_family("hero", steps=390_139)
    assert (shorter["tokens"], f"{shorter['train_flops']:.5e}") == (17_999_977_250_816, "2.69525e+24")
    assert f"{6 * HERO.active_parameters * shorter['tokens']:.5e}" == "2.45835e+24"


LADDER = [  # width, active, total, forward FLOPs per token, train FLOPs
    (768, 60_555_264, 1_591_848_448, 381_394_944, "5.4805e+19"),
    (1024, 162_004_992, 3_980_116_480, 711_671_808, "2.7359e+20"),
    (1536, 481_296_384, 11_534_398_464, 1_603_436_544, "1.8313e+21"),
    (2048, 1_170_735_104, 27_742_902_528, 3_326_738_432, "9.2424e+21"),
]


@pytest.mark.parametrize(("width", "active", "total", "forward", "train"), LADDER)
def test_ladder(width, active, total, forward, train):
    run = count_family(f"ladder-{width}")
    assert (run["active_parameters"], run["total_parameters"], run["forward_flops_per_token"]) == (
        active,
        total,
        forward,
    )
    assert f"{run['train_flops']:.4e}" == train
    assert run["steps"] == round(791 * active / run["batch_tokens"])


def test_the_published_flops_of_2048_assume_five_global_layers():
    config = hero_ladder(2048)
    kv_difference = 2 * config.width * 2 * 2 * 128  # a local layer projects 4 kv heads, a global one 2
    query = config.num_heads * config.head_width
    span_difference = (4 * query + 3 * config.num_heads) * 2048
    assert count(config).forward_flops_per_token - span_difference + kv_difference == 3_311_960_064


def test_rungs_without_a_run():
    assert (count(hero_ladder(1280)).active_parameters, count(hero_ladder(1280)).total_parameters) == (
        291_307_520,
        7_098_266_112,
    )
    assert count(hero_ladder(512)).active_parameters == 20_840_448
    assert count_family("ladder-512")["steps"] == 3_930


def test_relatives():
    assert count_family("delphi-1e23")["total_parameters"] == 24_963_098_112
    assert count_family("delphi-1e23")["tokens"] == 628_172_521_472
    assert f"{count_family('delphi-1e23')['train_flops']:.3e}" == "1.000e+23"
    assert count(delphi(2560)).total_parameters == 3_383_110_656
    assert count(marin_8b()).total_parameters == 8_030_261_248
    # Published bf16 release of Snowball: 134 175 089 683 bytes, of which 17.2 MB are the tokenizer's file.
    assert 17.0e6 < 134_175_089_683 - 2 * count(snowball()).total_parameters < 17.6e6
    assert f"{6 * count(snowball()).active_parameters * 10e12:.2e}" == "1.19e+23"
    assert f"{count_family('moe-v1')['total_parameters']:.2e}" == "1.29e+11"
    assert count_family("marin-8b")["steps"] is None


def test_unknown_family_lists_the_known():
    with pytest.raises(ValueError, match="ladder-768"):
        count_family("heros")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_counts_equal_the_arrays(name):
    config = FAMILIES[name].config()
    params = jax.eval_shape(lambda key: init_params(key, config), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count(config).total_parameters


def test_counts_equal_the_arrays_with_parts_switched_off():
    for changes in (
        {"tie_embeddings": True},
        {"gated_norm_rank": 0},
        {"sconv_kernel": 0, "head_gate": False},
        {"latent_width": 0},
    ):
        config = replace(miniature(48, 2, 64), **changes)
        params = jax.eval_shape(lambda key, config=config: init_params(key, config), jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count(config).total_parameters


def test_counting_does_not_import_jax():
    code = (
        "import sys; from noonsight.model.count import count_family; count_family('hero'); print('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
