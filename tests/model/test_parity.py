"""The model against the float64 NumPy reference: outputs, and the gradient of every array in every coordinate.

How near is near: `nearness`. bfloat16 is judged with the arrays as the model rounds them, so only its computation is. Where a token's last chosen
expert is hardly better than the first one left out, rounding may choose the other, rightly. Such tokens are known from
the reference: in a block, the rows that they reach are not compared and carry no cotangent; for the whole model, the
pending quantiles fix the choice.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model import attention
from noonsight.model.families import delphi, marin_8b
from noonsight.model.ready import prepare
from tests.model import reference, tape
from tests.model.nearness import SLACK, all_close, close, precision_of, wide
from tests.model.setting import (
    PRECISIONS,
    block_piece,
    compiled,
    dense_config,
    logits_of,
    moe_piece,
    packed_batch,
    shaken_extra,
    shaken_params,
    step_of,
    tiny_config,
)

CONFIG = tiny_config()
PARAMS, EXTRA, BATCH = shaken_params(CONFIG), shaken_extra(CONFIG), packed_batch(CONFIG)

ATTENTION = {
    "hero": {},  # 8 query heads over 2 local kv heads, of which global layers keep 1
    "heads of 128": {"num_heads": 2, "num_kv_heads_global": 1, "num_kv_heads_local": 2, "head_width": 128},
    "gains, rotation everywhere": {
        "qk_norm": "gain",
        "rope_fraction": 1.0,
        "rope_on_global": True,
        "global_window": 13,
        "sconv_kernel": 0,
    },
    "bare": {
        "qk_norm": "off",
        "rope_fraction": 0.0,
        "exclusive_attention": False,
        "head_gate": False,
        "num_kv_heads_local": 8,
        "num_kv_heads_global": 4,
        "qk_mult": 0.2,
    },
}
EXPERTS = {
    "hero": {},
    "full width, none shared, topk": {"latent_width": 0, "num_shared_experts": 0, "balance": "topk"},
    "one shared, three chosen": {"num_shared_experts": 1, "num_experts_per_token": 3},
}


def compare_piece(piece, truth, config, x, layer, cotangent, is_global=False):
    """Output and all gradients of piece(x, layer, is_global, segments, config); `truth(x, layer)` is the reference's."""

    @compiled
    def run(x, layer, is_global, cotangent):
        y, pull = jax.vjp(lambda x, layer: piece(x, layer, is_global, BATCH.segments, config), x, layer)
        return y, pull(cotangent)

    for kind in np.atleast_1d(is_global):
        traced = jax.tree.map(tape.Traced, (wide(x), wide(layer)))
        expected = truth(*traced, bool(kind))
        tape.backward(expected, np.asarray(cotangent, np.float64))
        y, gradients = run(x, layer, jnp.asarray(kind), cotangent)
        rows = np.abs(np.asarray(cotangent, np.float32)).max(-1) > 0
        close(np.asarray(y, np.float64)[rows], expected.value[rows], precision_of(config), "output")
        all_close(gradients, traced, precision_of(config))


def piece_inputs(config):
    """A layer as the model rounds it, and rows and cotangents in the compute dtype."""
    params = prepare(shaken_params(config), shaken_extra(config), config).everything()
    rng = np.random.default_rng(3)
    x, cotangent = (
        jnp.asarray(rng.standard_normal((*BATCH.tokens.shape, config.width)), config.compute_dtype) for _ in range(2)
    )
    return x, reference.layer_of(params.layers, 0), cotangent


@pytest.mark.parametrize(
    ("case", "precision"), [(case, "float32") for case in ATTENTION] + [("hero", name) for name in PRECISIONS][1:]
)
def test_attention(case, precision):
    """Norm, attention and its two convolutions: a dense block whose MLP gives 0. Local and global layers, three
    documents, a window shorter than two of them, padding.
    """
    config = tiny_config(num_experts=0, balance="none", dense_width=4, **ATTENTION[case], **PRECISIONS[precision])
    x, layer, cotangent = piece_inputs(config)
    layer = replace(layer, mlp_down=jnp.zeros_like(layer.mlp_down))
    compare_block(config, x, layer, cotangent)


@pytest.mark.parametrize(
    ("case", "exchange", "precision"),
    [(case, "einsum", "float32") for case in EXPERTS if case != "hero"]
    + [("hero", exchange, precision) for exchange in ("sorted", "einsum") for precision in PRECISIONS],
)
def test_moe(case, exchange, precision):
    config = tiny_config(**EXPERTS[case], exchange=exchange, **PRECISIONS[precision])
    valid = np.asarray(BATCH.segments).reshape(-1) >= 0
    x, layer, cotangent = piece_inputs(config)
    bias = bias_of(layer)
    words = ("router", "latent", "expert", "shared")
    layer = type(layer)(**{name: leaf if name.startswith(words) else None for name, leaf in vars(layer).items()})

    def truth(x, layer, _):
        y, _, _ = reference.moe(x.reshape(-1, config.width), layer, bias, valid, config)
        return y.reshape(*x.shape)

    compare_piece(moe_piece, truth, config, x, layer, cotangent)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_block(precision):
    config = tiny_config(**PRECISIONS[precision])
    x, layer, cotangent = piece_inputs(config)
    if precision != "float32":
        layer = replace(layer, router=layer.router * 4)  # clearer choices
        cotangent = jnp.where(unclear_rows(x, layer, config)[..., None], 0, cotangent)
    compare_block(config, x, layer, cotangent)


def compare_block(config, x, layer, cotangent):
    segments, bias = np.asarray(BATCH.segments), bias_of(layer)

    def truth(x, layer, is_global):
        return reference.block(x, layer, bias, is_global, segments, config)[0]

    compare_piece(block_piece, truth, config, x, layer, cotangent, is_global=[False, True])


def bias_of(layer):
    return None if layer.router_bias is None else np.asarray(layer.router_bias, np.float64)


def unclear_rows(x, layer, config):
    """Rows of a block's output that a token reaches, through the output convolution, whose choice may round away."""
    segments, unclear = np.asarray(BATCH.segments), False
    for is_global in (False, True):
        _, _, clearance = reference.block(wide(x), wide(layer), bias_of(layer), is_global, segments, config)
        unclear = unclear | (clearance.reshape(segments.shape) < 0.05)
    found = unclear.copy()
    for lag in range(1, config.sconv_kernel):
        found[:, lag:] |= unclear[:, :-lag]
    assert found.mean() < 0.5
    return found


WHOLE = {
    "hero": CONFIG,
    **{f"hero, choice fixed, {name}": tiny_config(**PRECISIONS[name]) for name in PRECISIONS if name != "float32"},
    "llama": dense_config(marin_8b()),
    "delphi, tied": dense_config(delphi(512), tie_embeddings=True, z_loss_weight=0.1),
}


@pytest.mark.parametrize("case", WHOLE)
def test_whole(case):
    """Loss, cross-entropy, every gradient, and the next pending quantiles. In bfloat16 two layers and the loss add up
    their rounding: the bound is twice that of one block.
    """
    config = WHOLE[case]
    params, extra = shaken_params(config), shaken_extra(config)
    if "fixed" in case:
        extra = fixed_choice(config)
    pending = np.asarray(extra["pending_beta"], np.float64) if extra else None
    traced = jax.tree.map(tape.Traced, wide(prepare(params, {}, config).everything()))
    tokens, segments, weights = (np.asarray(x) for x in BATCH)
    logits, margins = reference.forward(traced, pending, tokens, segments, config)
    expected = reference.loss(logits, tokens, weights, config.z_loss_weight)
    tape.backward(expected)

    dtype = precision_of(config)
    (value, aux), gradient = step_of(config)(params, extra, BATCH)
    close(value, expected, dtype, "loss")
    close(aux["metrics"]["cross_entropy"], reference.loss(logits.value, tokens, weights, 0.0), dtype, "cross-entropy")
    all_close(gradient, traced, dtype, SLACK[dtype])
    if case == "hero":
        check_pending(aux["next"]["pending_beta"], margins)


def check_pending(found, margins):
    """The next bias is the reference's quantile to one bin (the acceptance check of quantile balancing)."""
    valid = np.asarray(BATCH.segments).reshape(-1) >= 0
    rank = valid.sum() * CONFIG.num_experts_per_token / CONFIG.num_experts
    for layer, each in enumerate(margins):
        live = each[valid]
        one_bin = (live.max() - live.min()) / CONFIG.balance_bins
        exact = np.sort(live, axis=0)[::-1][int(np.ceil(rank)) - 1]
        assert np.abs(np.asarray(found[layer]) - exact).max() <= one_bin + 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits(precision):
    config = tiny_config(**PRECISIONS[precision])
    tokens, segments, _ = (np.asarray(x) for x in BATCH)
    extra = EXTRA if precision == "float32" else fixed_choice(config)
    pending = np.asarray(extra["pending_beta"], np.float64)
    expected, _ = reference.forward(wide(prepare(PARAMS, {}, config).everything()), pending, tokens, segments, config)
    close(logits_of(config)(PARAMS, extra, BATCH.tokens, BATCH.segments), expected, precision_of(config), "logits")


def fixed_choice(config):
    """Pending quantiles so far apart that every token chooses the first two experts, whatever rounds."""
    far = 50.0 * (np.arange(config.num_experts) > 1)
    return {"pending_beta": shaken_extra(config)["pending_beta"] + jnp.asarray(far, jnp.float32)}


JUDGED_ATTENTION = {
    "float32": attention.attend,
    "bfloat16": partial(attention.attend, dtype="bfloat16"),
}  # by the bound in `nearness`


@pytest.mark.parametrize("precision", JUDGED_ATTENTION)
@pytest.mark.parametrize("length", [5, 130])
def test_attend_at_any_length(length, precision):
    """Blocks of keys are skipped, partly visible or whole; the gradient is that of plain softmax."""
    rng = np.random.default_rng(length)
    q, k, v, cotangent = (rng.standard_normal((2, length, n, 8)) for n in (6, 2, 2, 6))
    segments = np.sort(rng.integers(0, 3, (2, length)), axis=1)
    traced = [tape.Traced(np.asarray(x, np.float32)) for x in (q, k, v)]
    seen = reference.visible(segments, 70)[:, None]
    own = np.arange(6) // 3
    scores = tape.einsum("btnh,bsnh->bnts", traced[0], traced[1][:, :, own])
    p = tape.exp(scores - np.where(seen, scores.value, -np.inf).max(-1, keepdims=True)) * seen
    expected = tape.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), traced[2][:, :, own])
    tape.backward(expected, np.asarray(cotangent, np.float32))
    lower = attention.lower_bounds(jnp.asarray(segments, jnp.int32), 70)

    @compiled
    def run(cotangent, *inputs):
        y, pull = jax.vjp(lambda q, k, v: JUDGED_ATTENTION[precision](q, k, v, lower), *inputs)
        return y, pull(cotangent)

    y, gradients = run(*(jnp.asarray(x, jnp.float32) for x in (cotangent, q, k, v)))
    close(y, expected, precision, "output")
    all_close(gradients, traced, precision)
