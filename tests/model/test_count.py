"""Counts in closed form against published figures, the real arrays and masks counted one by one."""

import subprocess
import sys
from dataclasses import replace
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noonsight.model.attention import lower_bounds
from noonsight.model.count import count, count_family
from noonsight.model.count.devices import carry_bytes, local_expert_parameters, local_experts, pooled_wave, ragged
from noonsight.model.count.flops import (
    forward_flops,
    hidden_keys,
    newton_schulz_flops,
    optimizer_flops,
    recompute_flops,
    step_flops,
    utilisation,
    visible_keys,
)
from noonsight.model.count.parameters import matrix_stacks
from noonsight.model.families import FAMILIES, delphi, hero, hero_ladder, marin_8b, miniature, moe_v1, snowball
from noonsight.model.params import init_params
from noonsight.train.config import OptimizerConfig
from noonsight.train.optim import by_path, make_optimizer
from tests.model.setting import tiny_config
from tests.train.toy import optimizer_config

HERO = count(hero())


def test_hero():
    assert HERO.total_parameters == 535_477_106_688
    assert HERO.active_parameters == 22_762_487_808
    assert HERO.touched_parameters == 24_510_216_192
    assert HERO.forward_flops_per_token == 49_912_086_528
    assert HERO.parts["experts"] == 48 * 10_871_635_968
    assert HERO.total_parameters - HERO.parts["gated_norms"] == 535_322_966_016
    assert sum(HERO.parts.values()) == HERO.total_parameters


def test_hero_layer_by_tensor():
    parts = {name: value / 48 for name, value in HERO.parts.items()}
    assert parts["attention"] == 2 * 37_748_736 + 2 * 9_437_184
    assert (parts["head_gates"], parts["convolutions"], parts["router"]) == (294_912, 55_296, 2_359_296 + 384)
    assert (parts["latent"], parts["shared_experts"]) == (37_751_808 - 3_072, 113_246_208)
    assert HERO.parts["gated_norms"] == 48 * 3_145_728 + 2 * 1_572_864
    assert HERO.parts["gains"] == 48 * (12_288 + 3_072) + 2 * 6_144
    assert HERO.parts["embedding"] == HERO.parts["head"] == 788_004_864


def test_hero_run():
    run = count_family("hero")
    assert (run["steps"], run["tokens"], run["batch_tokens"]) == (390_251, 18_005_144_633_344, 46_137_344)
    assert f"{run['train_flops']:.5e}" == "2.69602e+24"
    shorter = count_family("hero", steps=390_139)
    assert (shorter["tokens"], f"{shorter['train_flops']:.5e}") == (17_999_977_250_816, "2.69525e+24")
    contrast = [6 * HERO.active_parameters * each["tokens"] for each in (shorter, run)]
    assert [f"{each:.5e}" for each in contrast] == ["2.45835e+24", "2.45905e+24"]
    assert round(791 * HERO.active_parameters / run["batch_tokens"], 2) == 390_250.64


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


def test_published_tables_count_a_quarter_of_the_layers_as_global():
    tokens = count_family("ladder-2048")["tokens"]
    published = sum(forward_flops(hero_ladder(2048), num_global=22 // 4).values())
    assert (published, f"{3 * published * tokens:.4e}") == (3_311_960_064, "9.2013e+21")
    for width in (768, 1024, 1536, 6144):  # where the depth is a multiple of four both agree
        config = hero_ladder(width)
        assert forward_flops(config, num_global=config.num_layers // 4) == forward_flops(config)


def test_rungs_without_a_run():
    assert (count(hero_ladder(1280)).active_parameters, count(hero_ladder(1280)).total_parameters) == (
        291_307_520,
        7_098_266_112,
    )
    assert count(hero_ladder(512)).active_parameters == 20_840_448
    assert count_family("ladder-512")["steps"] == 3_930 == round(791 * 20_840_448 / (1024 * 4096))


def test_dense_relatives():
    published = {"delphi-1e21": 3_383_110_656, "delphi-1e22": 9_714_698_752, "delphi-1e23": 24_963_098_112}
    tokens = {"delphi-1e21": 46_256_881_664, "delphi-1e22": 160_369_213_440, "delphi-1e23": 628_172_521_472}
    for name, total in published.items():
        run = count_family(name)
        assert (run["total_parameters"], run["tokens"]) == (total, tokens[name])
        assert run["train_flops"] == pytest.approx(float(name.removeprefix("delphi-")), rel=0.003)
    assert count(delphi(2560)).total_parameters == 3_383_110_656
    assert count(marin_8b()).total_parameters == 8_030_261_248  # as Llama 3.1 8B
    assert count_family("marin-8b")["steps"] is None
    assert f"{count_family('marin-32b')['total_parameters']:.2e}" == "3.25e+10"


def test_snowball_is_as_published():
    counts = count(snowball())
    # bf16 release: 134 175 089 683 bytes, of which 17.2 MB are the tokenizer's file.
    assert 17.0e6 < 134_175_089_683 - 2 * counts.total_parameters < 17.6e6
    core = counts.active_parameters + 26 * counts.parts["gated_norms"] // 27  # published with the layers' gated norms
    assert (f"{core:.2e}", f"{core + counts.parts['head']:.2e}") == ("2.01e+09", "2.34e+09")
    assert f"{6 * counts.active_parameters * 10e12:.2e}" == "1.19e+23"
    run = count_family("snowball")
    assert f"{run['tokens']:.3e}" == "1.007e+13"
    assert count_family("snowball", steps=157_500)["tokens"] == 157_500 * 67_108_864  # 10.57 T at the last batch size


def test_moe_v1_is_as_published():
    counts = count(moe_v1())
    assert f"{counts.touched_parameters:.3g}" == "1.59e+10"
    assert f"{counts.total_parameters - counts.parts['gated_norms']:.4g}" == "1.291e+11"
    run = count_family("moe-v1")
    without_head = run["train_flops"] - 3 * run["forward_flops_by_part"]["head"] * run["tokens"]
    assert without_head == pytest.approx(1e23, rel=0.02)  # its budget, in the convention of its ladder


def test_exchange_sizes_of_the_hero():
    wave = pooled_wave(hero(), 65_536, expert_shards=64)
    assert (wave.rows_per_pair, wave.rows_per_expert, wave.header_rows) == (3_141, 33_497, 2)
    rows = ragged(hero(), 65_536)
    assert (rows.capacity, rows.rows_per_chunk) == (602_932, 301_466)
    assert local_experts(hero(), 64) == 6
    with pytest.raises(ValueError, match="split evenly over 5 devices"):
        pooled_wave(hero(), 65_536, expert_shards=5)


def test_bytes_of_one_device():
    assert carry_bytes(hero(), 65_536) == 38_654_705_664
    assert f"{carry_bytes(hero(), 65_536) / 2**30:.1f}" == "36.0"
    experts = local_expert_parameters(hero(), 64)
    assert experts == 8_153_726_976
    assert (f"{4 * experts / 1e9:.2f}", f"{2 * experts / 1e9:.2f}") == ("32.61", "16.31")


def test_utilisation_of_the_hero():
    use = utilisation(hero(), batch_tokens=46_137_344, step_s=16.8, num_devices=704, peak_flops_per_s=2.5e15)
    assert (round(use.tokens_per_s), f"{use.device_flops_per_s / 1e12:.1f}") == (2_746_270, "584.1")
    assert f"{100 * use.mfu:.2f}" == "23.36"


def test_a_step_part_by_part():
    config = hero()
    plain = step_flops(config, 11_264)
    assert plain.model == 3 * HERO.forward_flops_per_token * 46_137_344
    assert plain.padding == 0 and plain.attention_mask > 0
    padded = step_flops(config, 11_264, padding_share=0.25, document_tokens=1_000)
    assert padded.model == plain.model
    assert padded.padding == pytest.approx(plain.model / 4, rel=1e-12)
    assert padded.useful + padded.attention_mask == pytest.approx(0.75 * plain.model, rel=1e-12)
    assert padded.attention_mask > 0.75 * plain.attention_mask  # short documents hide more
    assert padded.executed == sum(
        (padded.useful, padded.attention_mask, padded.padding, padded.recompute, padded.optimizer)
    )
    assert recompute_flops(replace(config, remat="none")) < recompute_flops(config) < HERO.forward_flops_per_token
    for wrong in ({"padding_share": 1.0}, {"document_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            step_flops(config, 1, **wrong)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 50), st.integers(1, 50))
def test_hidden_keys_are_those_the_mask_hides(window, document):
    length = 37
    config = replace(tiny_config(), sequence_length=length, window=window)
    segments = jnp.arange(length)[None] // document
    spans = [min(window, length), length]  # one local layer, one global
    seen = sum(int((jnp.arange(length) - lower_bounds(segments, span)[0] + 1).sum()) for span in spans)
    assert hidden_keys(config, document) == length * sum(spans) - seen


def test_visible_keys_of_a_document():
    assert visible_keys(4096, 2048) == sum(min(t + 1, 2048) for t in range(4096))
    assert visible_keys(5, 9) == 1 + 2 + 3 + 4 + 5
    assert visible_keys(0, 9) == 0


def test_newton_schulz_takes_the_short_side():
    assert newton_schulz_flops(64, 256) == newton_schulz_flops(256, 64)
    assert newton_schulz_flops(1, 1) == 5 * (4 + 2 + 3 + 2)


@pytest.mark.parametrize("config", [tiny_config(), replace(tiny_config(), num_shared_experts=0), delphi(512)])
def test_the_matrices_are_those_of_the_optimiser(config):
    params = jax.eval_shape(lambda key: init_params(key, config), jax.random.key(0))
    groups = make_optimizer(optimizer_config(), params, num_steps=10).groups
    turned = [leaf.shape for path, leaf in by_path(params).items() if groups[path] == "muonh"]
    expected = sum(int(np.prod(shape[:-2])) * newton_schulz_flops(*shape[-2:]) for shape in turned)
    stacks = matrix_stacks(config).values()
    assert sum(number * newton_schulz_flops(rows, columns) for number, rows, columns in stacks) == expected
    assert sum(number * rows * columns for number, rows, columns in stacks) == sum(map(np.prod, turned))


def test_optimisers_by_cost():
    costs = [optimizer_flops(hero_ladder(768), kind) for kind in ("adamw", "adamh", "muon", "muonh")]
    assert costs == sorted(costs) and len(set(costs)) == 4


def test_every_optimiser_of_a_run_can_be_counted_and_no_other():
    for kind in get_args(get_type_hints(OptimizerConfig)["kind"]):
        assert optimizer_flops(miniature(16, 1, 64), kind) > 0
    with pytest.raises(ValueError, match="no optimiser 'sgd'; choose one of muonh, adamh, adamw, muon"):
        optimizer_flops(hero(), "sgd")


def test_what_is_no_family_or_no_run_is_refused():
    with pytest.raises(ValueError, match=r"did you mean .hero.\?.*ladder-768"):
        count_family("heros")
    with pytest.raises(ValueError, match="model of width 1280, but no run of it was published"):
        count_family("ladder-1280")
    with pytest.raises(ValueError, match=r"no family named 'zzz'\. The families are hero, .*nucleotide\.$"):
        count_family("zzz")
    with pytest.raises(ValueError, match="0 steps are no run"):
        count_family("hero", steps=0)


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
        {"num_experts": 0, "dense_width": 40, "balance": "none"},  # what is left of the experts counts for nothing
    ):
        config = replace(miniature(48, 2, 64), **changes)
        params = jax.eval_shape(lambda key, config=config: init_params(key, config), jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count(config).total_parameters


def test_counting_does_not_import_jax():
    code = (
        "import sys; from noonsight.model.count import count_family; count_family('hero'); print('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
