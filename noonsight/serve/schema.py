"""config.json of an export: every field that changes the function, in one spelling, none with a default.

`describe` writes it from a `ModelConfig`; `config_of` reads it back and compares the whole file with what `describe`
would write, so that an unknown, missing or contradictory field is an error that names it. What only training needs
(loss weight, exchange, ...) sits in one nested field, so that import gives back the very same `ModelConfig`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from noonsight.model.config import ModelConfig

SCHEMA_VERSION = 1
IGNORED = ("transformers_version",)  # bookkeeping that transformers adds when it saves a folder again

# ModelConfig field -> published field.
FIELDS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "sequence_length": "max_position_embeddings",
    "num_heads": "num_attention_heads",
    "num_kv_heads_local": "local_kv_heads",
    "num_kv_heads_global": "global_kv_heads",
    "head_width": "head_dim",
    "window": "sliding_window",
    "global_window": "global_window",
    "global_every": "global_every",
    "rope_theta": "rope_theta",
    "rope_fraction": "rope_fraction",
    "rope_on_global": "rope_on_global",
    "qk_norm": "qk_norm",
    "qk_mult": "qk_mult",
    "head_gate": "head_gate",
    "norm_eps": "rms_norm_eps",
    "gated_norm_rank": "gated_norm_rank",
    "sconv_kernel": "sconv_kernel",
    "num_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "latent_width": "latent_dim",
    "num_shared_experts": "num_shared_experts",
    "shared_width": "shared_expert_intermediate_size",  # of one shared expert
    "router_combine_sum": "router_combine_sum",
    "tie_embeddings": "tie_word_embeddings",
}
ATTENTION_MODES = {True: "exclusive", False: "standard"}


def describe(config: ModelConfig, *, dtype: str, eos: int) -> dict[str, Any]:
    """The content of config.json. `dtype` is that of the stored matrices, `eos` the id that ends a document.

    Raises ValueError when the config needs what this form has no field for.
    """
    _refuse(config)
    kinds = ["full_attention" if config.is_global(i) else "sliding_attention" for i in range(config.num_layers)]
    return {
        "architectures": ["NoonsightMoeForCausalLM"],
        "model_type": "noonsight_moe",
        "artifact_schema_version": SCHEMA_VERSION,
        "auto_map": {
            "AutoConfig": "configuration_noonsight.NoonsightMoeConfig",
            "AutoModel": "modeling_noonsight.NoonsightMoeModel",
            "AutoModelForCausalLM": "modeling_noonsight.NoonsightMoeForCausalLM",
        },
        "dtype": dtype,
        "torch_dtype": dtype,  # the same, for Transformers 4
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
        **{published: getattr(config, ours) for ours, published in FIELDS.items()},
        "num_key_value_heads": config.num_kv_heads_local,  # stored in every layer
        "layer_types": kinds,
        "rope_fused": True,  # adjacent dims (2p, 2p+1) turn together
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},  # the same, for Transformers 5
        "attention_mode": ATTENTION_MODES[config.exclusive_attention],
        "initializer_range": config.init_scale / config.width**0.5,
        "sconv": config.sconv_kernel > 0,
        "sconv_sites": ["k", "attn", "moe"] if config.sconv_kernel else [],
        "noonsight_training": {name: getattr(config, name) for name in _training_fields()},
    }


def config_of(described: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` that a config.json describes.

    Raises ValueError naming every field that is unknown, missing or contradicts the others.
    """
    found = {name: value for name, value in described.items() if name not in IGNORED}
    needed = {*FIELDS.values(), "attention_mode", "noonsight_training", "dtype", "eos_token_id"}
    _complain(found, missing=needed - found.keys())
    if found.get("artifact_schema_version") != SCHEMA_VERSION or found.get("model_type") != "noonsight_moe":
        raise ValueError(
            f"config.json: model_type {found.get('model_type')!r}, artifact_schema_version "
            f"{found.get('artifact_schema_version')!r}; this reader knows noonsight_moe, version {SCHEMA_VERSION}."
        )
    training = found["noonsight_training"]
    if training.keys() != set(_training_fields()):
        _complain(training, _training_fields() - training.keys(), training.keys() - set(_training_fields()))
    config = ModelConfig(
        **{ours: found[published] for ours, published in FIELDS.items()},
        exclusive_attention=found["attention_mode"] == ATTENTION_MODES[True],
        **training,
    )
    expected = describe(config, dtype=found["dtype"], eos=found["eos_token_id"])
    _complain(
        found,
        missing=expected.keys() - found.keys(),
        unknown=found.keys() - expected.keys(),
        contradictory={name for name in expected.keys() & found.keys() if expected[name] != found[name]},
    )
    return config


def _training_fields() -> dict[str, None]:
    names = (field.name for field in dataclasses.fields(ModelConfig))
    return dict.fromkeys(name for name in names if name not in FIELDS and name != "exclusive_attention")


def _complain(found: dict[str, Any], missing: Any = (), unknown: Any = (), contradictory: Any = ()) -> None:
    problems = [f"lacks {name} (no field has a default)" for name in sorted(missing)]
    problems += [f"has the unknown field {name}" for name in sorted(unknown)]
    problems += [f"has {name} = {found[name]!r}, which contradicts its other fields" for name in sorted(contradictory)]
    if problems:
        raise ValueError("config.json " + "; ".join(problems) + ".")


def _refuse(config: ModelConfig) -> None:
    if not config.is_moe:
        raise ValueError(
            "export: num_experts is 0; this form is for mixtures of experts, a dense model has a stock form."
        )
    if config.qk_norm == "gain":
        raise ValueError("export: qk_norm 'gain' has no place in the noonsight_moe form; use 'free' or 'off'.")
    if config.tie_embeddings:
        raise ValueError("export: tie_embeddings has no place in the noonsight_moe form; its output matrix is untied.")
