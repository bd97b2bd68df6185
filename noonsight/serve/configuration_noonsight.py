"""Transformers configuration of the Noonsight mixture-of-experts family (versions 4.57 and 5).

Copied unchanged into every export, so it imports transformers only. No semantic field has a default: a model that is
read with a guessed window, rotation base or multiplier is a different model that still talks, which nobody notices
(Marin, issues #7146 and #8644). A missing field is an error that names it.
"""

from transformers import PretrainedConfig

REQUIRED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "sliding_window", "global_window", "layer_types", "global_every", "rope_theta"),
    *("rope_fraction", "rope_fused", "rope_on_global", "qk_mult", "qk_norm", "local_kv_heads", "global_kv_heads"),
    *("attention_mode", "head_gate"),
    *("rms_norm_eps", "initializer_range", "gated_norm_rank", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "num_shared_experts", "latent_dim"),
    *("router_combine_sum", "sconv", "sconv_kernel", "sconv_sites", "artifact_schema_version"),
)


class NoonsightMoeConfig(PretrainedConfig):
    """All fields of `REQUIRED`, as the export writes them to config.json. Raises ValueError when one is missing."""

    model_type = "noonsight_moe"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, **kwargs):
        missing = [name for name in REQUIRED if name not in kwargs]
        if missing:
            raise ValueError(f"config.json of a noonsight_moe model lacks {', '.join(missing)}; none has a default.")
        for name in REQUIRED:
            setattr(self, name, kwargs.pop(name))
        rotation = kwargs.pop("rope_parameters", None) or {}
        if rotation.get("rope_theta", self.rope_theta) != self.rope_theta or rotation.get("rope_type") not in (
            None,
            "default",
        ):
            raise ValueError(f"rope_theta {self.rope_theta} (Transformers 4) contradicts rope_parameters {rotation}.")
        self.rope_parameters = {"rope_theta": self.rope_theta, "rope_type": "default"}
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
