"""Export and import: exact both ways, complete both ways, and nothing in the config left to a default."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import jax
import ml_dtypes
import numpy as np
import pytest

from noonsight.model.config import ModelConfig
from noonsight.model.families import marin_8b
from noonsight.model.moe import effective_bias
from noonsight.serve import hf, reference, schema
from tests.serve.fixtures import random_model, tiny_config, tiny_tokenizer


@pytest.fixture(scope="module")
def model():
    config = tiny_config()
    return (*random_model(config), config)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def export(model, tokenizer_path, tmp_path):
    hf.export_model(*model, tokenizer_path, tmp_path / "export")
    return tmp_path / "export"


def assert_same(ours, theirs, dtype=np.float32):
    def equal(path, a, b):
        wanted = np.float32 if any(word in path[-1].name for word in hf.PRECISE) else dtype
        assert b.dtype == wanted and np.array_equal(np.asarray(a).astype(wanted), b), jax.tree_util.keystr(path)

    jax.tree.map_with_path(equal, ours, theirs)


def with_bias(params, extra):
    return replace(params, layers=replace(params.layers, router_bias=effective_bias(extra["pending_beta"])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_exact(model, tokenizer_path, tmp_path, dtype):
    params, extra, config = model
    facts = hf.export_model(*model, tokenizer_path, tmp_path / "a", dtype=dtype, part_bytes=100_000)
    assert facts["num_parts"] > 1
    imported, state, read = hf.import_model(tmp_path / "a")
    assert read == config
    assert_same(with_bias(params, extra), imported, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    assert np.array_equal(state["pending_beta"], extra["pending_beta"])
    again = hf.export_model(imported, state, read, tokenizer_path, tmp_path / "b", dtype=dtype, part_bytes=100_000)
    assert again["digest"] == facts["digest"]


def test_pending_bias_is_applied_once(model, export):
    """The stored bias is -pending, centred; evaluating the folder is evaluating the training state."""
    params, extra, config = model
    imported, state, read = hf.import_model(export)
    wanted = -extra["pending_beta"] - np.mean(-extra["pending_beta"], axis=-1, keepdims=True)
    assert np.allclose(imported.layers.router_bias, wanted, atol=1e-6) and np.abs(wanted).max() > 0.3
    tokens = np.arange(40).reshape(1, 40)
    assert np.array_equal(
        reference.forward(params, extra, config, tokens), reference.forward(imported, state, read, tokens)
    )
    without = reference.forward(params, {"pending_beta": 0 * extra["pending_beta"]}, config, tokens)
    assert np.abs(without - reference.forward(imported, state, read, tokens)).max() > 1e-3


def test_import_without_the_training_state_starts_from_the_same_bias(export):
    stored = hf.import_model(export)[0].layers.router_bias
    (export / "training_state.safetensors").unlink()
    hf.write_digest(export)
    _, state, _ = hf.import_model(export)
    assert np.abs(effective_bias(state["pending_beta"]) - stored).max() < 1e-6


def test_every_field_of_the_model_config_is_written():
    described = schema.describe(tiny_config(), dtype="float32", eos=0)
    training = described["noonsight_training"]
    for field in fields(ModelConfig):
        assert field.name in schema.FIELDS or field.name in training or field.name == "exclusive_attention"
    assert described["rope_theta"] == described["rope_parameters"]["rope_theta"] == 10_000.0
    assert described["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert schema.config_of(json.loads(json.dumps(described))) == tiny_config()


@pytest.mark.parametrize("rope_theta, window, latent_width", [(5e5, 17, 24), (1e4, 24, 0)])
def test_unusual_sizes_survive(tokenizer_path, tmp_path, rope_theta, window, latent_width):
    config = replace(
        tiny_config(), rope_theta=rope_theta, window=window, latent_width=latent_width, num_shared_experts=1
    )
    model = (*random_model(config), config)
    hf.export_model(*model, tokenizer_path, tmp_path / "export")
    imported, _, read = hf.import_model(tmp_path / "export")
    assert read == config
    assert_same(with_bias(*model[:2]), imported)


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda config: config.pop("qk_mult"), "lacks qk_mult"),
        (lambda config: config.pop("rope_parameters"), "lacks rope_parameters"),
        (lambda config: config.update(rope_scaling={"factor": 8}), "unknown field rope_scaling"),
        (lambda config: config["rope_parameters"].update(rope_theta=5e5), "rope_parameters = .* contradicts"),
        (lambda config: config.update(layer_types=["full_attention"] * 4), "layer_types = .* contradicts"),
        (lambda config: config.update(artifact_schema_version=2), "artifact_schema_version 2"),
        (lambda config: config["noonsight_training"].pop("balance"), "lacks balance"),
    ],
)
def test_config_faults_are_named(export, change, complaint):
    described = json.loads((export / "config.json").read_text())
    change(described)
    (export / "config.json").write_text(json.dumps(described))
    hf.write_digest(export)
    with pytest.raises(ValueError, match=complaint):
        hf.import_model(export)


def test_damaged_folders_are_refused(export, model):
    part = export / "model-00001-of-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    with pytest.raises(ValueError, match="differs from its digest in model-00001"):
        hf.import_model(export)
    (export / "digest.json").unlink()
    with pytest.raises(ValueError, match=r"no digest\.json"):
        hf.import_model(export)


def test_tensors_are_complete_both_ways(export):
    tensors = hf.load_file(export / "model-00001-of-00001.safetensors")
    for change, complaint in (
        (lambda held: held.pop("model.norm.weight"), r"missing tensors \['model.norm.weight'\]"),
        (lambda held: held.update({"model.extra": np.zeros(2, np.float32)}), r"unexpected \['model.extra'\]"),
        (
            lambda held: held.update({"lm_head.weight": np.zeros((3, 3), np.float32)}),
            r"lm_head.weight is float32\[3, 3\]",
        ),
    ):
        held = dict(tensors)
        change(held)
        (export / "model-00001-of-00001.safetensors").write_bytes(hf.save(held))
        index = {"weight_map": dict.fromkeys(held, "model-00001-of-00001.safetensors")}
        (export / "model.safetensors.index.json").write_text(json.dumps(index))
        hf.write_digest(export)
        with pytest.raises(ValueError, match=complaint):
            hf.import_model(export)


def test_what_has_no_form_is_refused(model, tokenizer_path, tmp_path):
    params, extra, config = model
    with pytest.raises(ValueError, match="num_experts is 0"):
        schema.describe(marin_8b(), dtype="float32", eos=0)
    with pytest.raises(ValueError, match="dtype 'int8'"):
        hf.export_model(params, extra, config, tokenizer_path, tmp_path / "x", dtype="int8")
    with pytest.raises(ValueError, match="not the tokenizer"):
        hf.export_model(params, extra, replace(config, vocab_size=100), tokenizer_path, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_folder_can_be_read_without_us(export):
    """Modelling files are copies that import only torch, transformers and each other."""
    for name in hf.MODELLING_FILES:
        text = (export / name).read_text()
        imports = [line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))]
        assert {name.split(".")[0] for name in imports} <= {"torch", "transformers", ""}
    required = json.loads((export / "config.json").read_text()).keys()
    assert {"rope_fused", "sconv_sites", "attention_mode"} <= required
