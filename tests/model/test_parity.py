"""The model against the float64 NumPy reference: outputs, and the gradient of every array in every coordinate.

float32: the largest error is within 1e-5 of the largest entry. bfloat16, whose rounding is random: the root mean
square of the errors is within 2e-2 of that of the entries. Arrays of experts are compared expert by expert, so that a
small expert's error cannot hide behind a large one.

bfloat16 is judged with the arrays as the model rounds them, so only its computation is. Where a token's last chosen
expert is hardly better than the first one left out, rounding may choose the other, rightly. Such tokens are known from
the reference: in a block, the rows that they reach are not compared and carry no cotangent; for the whole model, the
pending quantiles fix the choice.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model import attention, elementary
from noonsight.model.exchange import EXCHANGES
from noonsight.model.families import delphi, marin_8b
from noonsight.model.transformer import prepare
from tests.model import reference, tape
from tests.model.setting import (
    attention_piece,
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
BOUNDS = {
    "float32": (1e-5, lambda x, axes: np.abs(x).max(axes)),
    "bfloat16": (2e-2, lambda x, axes: np.sqrt((x**2).mean(axes))),
}
DTYPES = tuple(BOUNDS)

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


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def close(found, expected, dtype, name="", lead=0, slack=1):
    """Compare arrays, along the first `lead` axes one by one."""
    found, expected = np.asarray(found, np.float64), np.asarray(tape.value(expected))
    axes = tuple(range(lead, expected.ndim))
    bound, size = BOUNDS[dtype]
    error, scale = size(found - expected, axes), size(expected, axes)
    assert (error <= slack * bound * scale).all(), f"{name}: error {(error / np.maximum(scale, 1e-30)).max():.1e}"


def all_close(found, expected, dtype, slack=1):
    """Compare trees leaf by leaf; `expected` has the gradients of traced arrays."""
    paths = jax.tree.leaves_with_path(found)
    traced = jax.tree.leaves(expected)
    assert len(paths) == len(traced)
    for (path, leaf), other in zip(paths, traced):
        name = jax.tree_util.keystr(path)
        lead = leaf.ndim - 2 if "expert" in name or "shared" in name else 0
        close(leaf, other.gradient, dtype, name, lead, slack)


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
        close(np.asarray(y, np.float64)[rows], expected.value[rows], config.compute_dtype, "output")
        all_close(gradients, traced, config.compute_dtype)


def piece_inputs(config):
    """A layer as the model rounds it, and rows and cotangents in the compute dtype."""
    params = prepare(shaken_params(config), shaken_extra(config), config)
    rng = np.random.default_rng(3)
    x, cotangent = (
        jnp.asarray(rng.standard_normal((*BATCH.tokens.shape, config.width)), config.compute_dtype) for _ in range(2)
    )
    return x, reference.layer_of(params.layers, 0), cotangent


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case):
    """Local and global layers, three documents, a window shorter than two of them, padding."""
    config = tiny_config(**ATTENTION[case])
    check_attention(config)


def test_attention_in_bfloat16():
    check_attention(replace(CONFIG, compute_dtype="bfloat16"))


def check_attention(config):
    segments = np.asarray(BATCH.segments)
    x, layer, cotangent = piece_inputs(config)
    names = ("wq", "wk", "wv", "wo", "q_norm", "k_norm", "head_gate", "sconv_k")
    layer = type(layer)(**{name: None for name in vars(layer)} | {name: getattr(layer, name) for name in names})
    compare_piece(
        attention_piece,
        lambda x, layer, is_global: reference.attention(x, layer, is_global, segments, config),
        config,
        x,
        layer,
        cotangent,
        is_global=[False, True],
    )


@pytest.mark.parametrize(
    ("case", "exchange", "dtype"),
    [(case, "einsum", "float32") for case in EXPERTS if case != "hero"]
    + [("hero", exchange, dtype) for exchange in EXCHANGES for dtype in DTYPES],
)
def test_moe(case, exchange, dtype):
    config = tiny_config(**EXPERTS[case], exchange=exchange, compute_dtype=dtype)
    valid = np.asarray(BATCH.segments).reshape(-1) >= 0
    x, layer, cotangent = piece_inputs(config)
    bias = np.asarray(layer.router_bias, np.float64)
    words = ("router", "latent", "expert", "shared")
    layer = type(layer)(**{name: leaf if name.startswith(words) else None for name, leaf in vars(layer).items()})

    def truth(x, layer, _):
        y, _, _ = reference.moe(x.reshape(-1, config.width), layer, bias, valid, config)
        return y.reshape(*x.shape)

    compare_piece(moe_piece, truth, config, x, layer, cotangent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_block(dtype):
    config = replace(CONFIG, compute_dtype=dtype)
    segments = np.asarray(BATCH.segments)
    x, layer, cotangent = piece_inputs(config)
    bias = np.asarray(layer.router_bias, np.float64)
    if dtype == "bfloat16":
        layer = replace(layer, router=layer.router * 4)  # clearer choices
        cotangent = jnp.where(unclear_rows(x, layer, bias, config)[..., None], 0, cotangent)
    compare_piece(
        block_piece,
        lambda x, layer, is_global: reference.block(x, layer, bias, is_global, segments, config)[0],
        config,
        x,
        layer,
        cotangent,
        is_global=[False, True],
    )


def unclear_rows(x, layer, bias, config):
    """Rows of a block's output that a token reaches, through the output convolution, whose choice may round away."""
    segments, unclear = np.asarray(BATCH.segments), False
    for is_global in (False, True):
        _, _, clearance = reference.block(wide(x), wide(layer), bias, is_global, segments, config)
        unclear = unclear | (clearance.reshape(segments.shape) < 0.05)
    found = unclear.copy()
    for lag in range(1, config.sconv_kernel):
        found[:, lag:] |= unclear[:, :-lag]
    assert found.mean() < 0.5
    return found


WHOLE = {
    "hero": CONFIG,
    "hero, choice fixed, bfloat16": replace(CONFIG, compute_dtype="bfloat16"),
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
        extra = {"pending_beta": extra["pending_beta"] + 50.0 * (jnp.arange(config.num_experts) > 1)}
    pending = np.asarray(extra["pending_beta"], np.float64) if extra else None
    traced = jax.tree.map(tape.Traced, wide(prepare(params, {}, config)))
    tokens, segments, weights = (np.asarray(x) for x in BATCH)
    logits, margins = reference.forward(traced, pending, tokens, segments, config)
    expected = reference.loss(logits, tokens, weights, config.z_loss_weight)
    tape.backward(expected)

    dtype, slack = config.compute_dtype, 2 if config.compute_dtype == "bfloat16" else 1
    (value, aux), gradient = step_of(config)(params, extra, BATCH)
    close(value, expected, dtype, "loss")
    close(aux["metrics"]["cross_entropy"], reference.loss(logits.value, tokens, weights, 0.0), dtype, "cross-entropy")
    all_close(gradient, traced, dtype, slack)
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


def test_logits():
    tokens, segments, _ = (np.asarray(x) for x in BATCH)
    expected, _ = reference.forward(wide(PARAMS), np.asarray(EXTRA["pending_beta"], float), tokens, segments, CONFIG)
    close(logits_of(CONFIG)(PARAMS, EXTRA, BATCH.tokens, BATCH.segments), expected, "float32", "logits")


def test_logits_in_bfloat16():
    config = replace(CONFIG, compute_dtype="bfloat16")
    extra = {"pending_beta": EXTRA["pending_beta"] + 50.0 * (jnp.arange(config.num_experts) > 1)}
    tokens, segments, _ = (np.asarray(x) for x in BATCH)
    rounded = wide(prepare(PARAMS, {}, config))
    expected, _ = reference.forward(rounded, np.asarray(extra["pending_beta"], float), tokens, segments, config)
    close(logits_of(config)(PARAMS, extra, BATCH.tokens, BATCH.segments), expected, "bfloat16", "logits")


@pytest.mark.parametrize("length", [5, 130])
def test_attend_at_any_length(length):
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
        y, pull = jax.vjp(lambda q, k, v: attention.attend(q, k, v, lower), *inputs)
        return y, pull(cotangent)

    y, gradients = run(*(jnp.asarray(x, jnp.float32) for x in (cotangent, q, k, v)))
    close(y, expected, "float32", "output")
    all_close(gradients, traced, "float32")


def test_rotation_is_interleaved():
    """Golden: position 1 turns the pair (1, 0) by one radian, the pair (0, 1) of the slowest frequency by
    theta^(-1/2).
    """
    angles = elementary.rotation(jnp.array([1]), 4, 10_000.0)
    turned = np.asarray(elementary.rotate(jnp.array([[[1.0, 0.0, 0.0, 1.0, 5.0, 6.0]]]), angles))[0, 0]
    np.testing.assert_allclose(turned, [0.540302, 0.841471, -0.0099998, 0.99995, 5.0, 6.0], rtol=1e-5)
