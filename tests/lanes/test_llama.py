"""The dense families are the models whose shape they have: Marin 8B is transformers' Llama, Marin 32B and Delphi are
its Qwen3. Same weights, same loss: logits and the gradient of every array agree.

Ours turns adjacent channels, theirs the two halves of a head, so the columns of wq and wk (and the gains on them) are
permuted on the way there, and their gradients on the way back (F15). Needs torch and transformers, which the lane
installs; skipped everywhere else.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from noonsight.model.families import delphi, marin_8b, marin_32b
from tests.model.setting import Packed, dense_config, logits_of, shaken_params, step_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.lane("transformers")

BOUND = 1e-5
CASES = {
    "marin 8b": ("Llama", dense_config(marin_8b())),
    "marin 8b, tied, wide heads": (
        "Llama",
        dense_config(
            marin_8b(), tie_embeddings=True, head_width=128, num_heads=2, num_kv_heads_local=1, num_kv_heads_global=1
        ),
    ),
    "marin 32b": ("Qwen3", dense_config(marin_32b())),
    "delphi": ("Qwen3", dense_config(delphi(512), num_kv_heads_local=4, num_kv_heads_global=4)),
}
# Our leaf of a layer -> their name and how its matrix is turned.
LAYER = {
    "attn_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "moe_norm": "post_attention_layernorm",
    "mlp_gate": "mlp.gate_proj",
    "mlp_up": "mlp.up_proj",
    "mlp_down": "mlp.down_proj",
}
ROTATED = ("wq", "wk", "q_norm", "k_norm")


def halves(width):
    """Where each channel of a split-half head comes from in an interleaved one: 0, 2, 4, ... then 1, 3, 5, ..."""
    return np.arange(width).reshape(-1, 2).T.reshape(-1)


def as_theirs(params, head_width):
    """Their name -> array of every leaf: matrices [out, in], rotated channels by halves."""
    found = {"model.embed_tokens": params.embed, "model.norm": params.final_norm}
    if params.head is not None:
        found["lm_head"] = params.head.T
    order = halves(head_width)
    for name, theirs in LAYER.items():
        for i, array in enumerate(
            [] if getattr(params.layers, name) is None else np.asarray(getattr(params.layers, name))
        ):
            if name in ROTATED:
                array = array.reshape(*array.shape[:-1], -1, head_width)[..., order].reshape(array.shape)
            found[f"model.layers.{i}.{theirs}"] = array.T
    return {f"{name}.weight": np.array(array) for name, array in found.items()}


def their_model(family, config, params):
    settings = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.dense_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads_local,
        head_dim=config.head_width,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{family}ForCausalLM")(settings)
    arrays = {name: torch.tensor(array) for name, array in as_theirs(params, config.head_width).items()}
    missing, unexpected = model.load_state_dict(arrays, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    return model


def close(found, expected, name):
    error = np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max()
    assert error < BOUND, f"{name}: {error:.1e} of the largest"


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_theirs(case):
    family, config = CASES[case]
    params, rng = shaken_params(config), np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (2, config.sequence_length)).astype(np.int32)
    weights = rng.random(tokens.shape).astype(np.float32)
    weights[:, -1] = 0
    batch = Packed(*map(jax.numpy.asarray, (tokens, np.zeros_like(tokens), weights)))

    model = their_model(family, config, params)
    logits = model(input_ids=torch.tensor(tokens, dtype=torch.long)).logits
    lse = torch.logsumexp(logits, -1)
    targets = torch.tensor(np.roll(tokens, -1, axis=1), dtype=torch.long)
    each = lse - logits.gather(-1, targets[..., None])[..., 0] + config.z_loss_weight * lse**2
    loss = (each * torch.tensor(weights)).sum() / weights.sum()
    loss.backward()

    close(logits_of(config)(params, {}, batch.tokens, batch.segments), logits.detach().numpy(), "logits")
    (value, _), gradient = step_of(config)(params, {}, batch)
    close(value, loss.detach().numpy(), "loss")
    theirs = dict(model.named_parameters())
    for name, ours in as_theirs(gradient, config.head_width).items():
        close(ours, theirs[name].grad.numpy(), name)
