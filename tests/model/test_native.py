"""The C++ kernels against plain formulas on inputs rounded to bfloat16; and what happens where they cannot be built."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noonsight.model import attention, native
from noonsight.model.exchange.dense import einsum
from noonsight.model.loss import weighted_loss
from noonsight.model.native import build

needs_kernels = pytest.mark.skipif(not native.is_available(), reason=native.description())
RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def rounded(x):
    return np.asarray(x.astype(jnp.bfloat16), np.float64)


def near(found, expected, bound=1e-2):
    """Largest error as a share of the largest value."""
    scale = max(float(jnp.abs(expected).max()), 1e-6)
    assert float(jnp.abs(found - expected).max()) <= bound * scale


@needs_kernels
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (5, 7, 3), (37, 96, 40), (100, 33, 70), (200, 64, 257)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_is_exact_up_to_the_rounding_of_its_inputs(m, k, n, dtype):
    """Every transposition, sizes that are no multiple of any tile; what remains is float32 summation."""
    a, b = normal(m, k).astype(dtype), normal(k, n).astype(dtype)
    expected = rounded(a) @ rounded(b)
    bound = 1e-6 * np.abs(rounded(a)).sum(axis=1).max() * np.abs(rounded(b)).max()
    for a_turned in (False, True):
        for b_turned in (False, True):
            found = jax.jit(native.product, static_argnames=("a_transposed", "b_transposed"))(
                a.T if a_turned else a, b.T if b_turned else b, a_transposed=a_turned, b_transposed=b_turned
            )
            assert np.abs(np.asarray(found, np.float64) - expected).max() <= bound


@needs_kernels
@pytest.mark.parametrize(
    ("tokens", "per_token", "rows", "inner", "num_experts", "valid_share"),
    [(300, 2, 12, 7, 5, 0.9), (257, 3, 64, 48, 4, 1.0), (500, 2, 64, 96, 9, 0.5), (9, 1, 33, 17, 3, 0.0)],
)
def test_experts_and_all_slopes(tokens, per_token, rows, inner, num_experts, valid_share):
    """Against the einsum oracle in float32; the last expert is never chosen and must get exact zeros (F4, F5)."""
    x, gate, up = (
        normal(tokens, rows),
        normal(num_experts, rows, inner, scale=0.3),
        normal(num_experts, rows, inner, scale=0.2),
    )
    down = normal(num_experts, inner, rows, scale=0.3)
    chosen = np.stack(
        [
            RNG.permutation(num_experts - 1)[:per_token] if num_experts > per_token + 1 else np.arange(per_token)
            for _ in range(tokens)
        ]
    )
    weights, valid = (
        jnp.asarray(RNG.random((tokens, per_token)), jnp.float32),
        jnp.asarray(RNG.random(tokens) < valid_share),
    )

    def slopes(exchange):
        def total(x, weights, gate, up, down):
            y = exchange(x, jnp.asarray(chosen, jnp.int32), weights, valid, gate, up, down)
            return jnp.sum(y * normal(*y.shape)), y

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4), has_aux=True))(x, weights, gate, up, down)

    (_, y), found = slopes(native.experts)
    (_, expected_y), expected = slopes(lambda *inputs: einsum(*inputs)[0])
    near(y, expected_y, 2e-2)
    for one, other in zip(found, expected):
        near(one, other, 2e-2)
    assert (np.asarray(y)[~np.asarray(valid)] == 0).all()
    if num_experts > per_token + 1:
        assert all((slope[-1] == 0).all() for slope in found[2:])


@needs_kernels
def test_nothing_is_left_to_chance():
    """Poison: calls that write other values into the same memory before do not change a bit (F5)."""
    x, bank = normal(64, 32), normal(4, 32, 32)
    chosen, valid = jnp.zeros((64, 1), jnp.int32), jnp.arange(64) < 40
    weights = jnp.ones((64, 1))

    def once(x):
        run = jax.jit(jax.grad(lambda bank: jnp.sum(native.experts(x, chosen, weights, valid, bank, bank, bank))))
        return np.asarray(run(bank))

    first = once(x)
    once(x * jnp.nan)
    np.testing.assert_array_equal(first, once(x))


@needs_kernels
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "width", "window"),
    [(5, 2, 1, 8, 99), (130, 6, 2, 8, 70), (300, 4, 4, 64, 1000), (600, 12, 3, 128, 90)],
)
def test_attention_and_all_slopes(length, heads, kv_heads, width, window):
    q, k, v = (
        normal(2, length, heads, width, scale=width**-0.5),
        normal(2, length, kv_heads, width),
        normal(2, length, kv_heads, width, scale=2),
    )
    segments = jnp.asarray(np.sort(RNG.integers(0, 3, (2, length)), axis=1), jnp.int32)
    lower = attention.lower_bounds(segments, window)

    def slopes(attend):
        def total(q, k, v):
            y = attend(q, k, v, lower)
            return jnp.sum(y * normal(*y.shape)), y

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    (_, y), found = slopes(native.attend)
    (_, expected_y), expected = slopes(attention.attend)
    near(y, expected_y, 2e-2)
    for one, other in zip(found, expected):
        near(one, other, 2e-2)


@needs_kernels
@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [(37, 16, 50), (500, 64, 1000)])
def test_cross_entropy_and_its_slopes(tokens, width, vocabulary):
    h, head = normal(tokens, width), normal(width, vocabulary, scale=width**-0.5)
    targets = jnp.asarray(RNG.integers(0, vocabulary, tokens), jnp.int32)
    weights = jnp.asarray(RNG.random(tokens) < 0.9, jnp.float32)

    def slopes(dtype):
        def total(h, head):
            parts = weighted_loss(h, head, targets, weights, 0.01, dtype)
            return parts.total, parts

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(h, head)

    for one, other in zip(jax.tree.leaves(slopes("bfloat16")), jax.tree.leaves(slopes("float32"))):
        near(one, other)


@needs_kernels
def test_forward_and_backward_read_the_same_logits():
    """F3: the slope is that of the loss the kernel itself computes, not of a float32 one."""
    h, head = normal(96, 32), normal(32, 200, scale=0.5)
    targets, weights = jnp.asarray(RNG.integers(0, 200, 96), jnp.int32), jnp.ones(96)
    found = native.cross_entropy(h, head, targets, weights, 1e-2)
    logits = jnp.asarray(rounded(h) @ rounded(head), jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    near(found[1], lse, 1e-5)
    d_logits = jax.nn.softmax(logits) * (1 + 2e-2 * lse[:, None]) - jax.nn.one_hot(targets, 200)
    near(found[2], jnp.asarray(rounded(d_logits) @ rounded(head).T, jnp.float32), 1e-3)
    near(found[3], jnp.asarray(rounded(h).T @ rounded(d_logits), jnp.float32), 1e-3)


def test_where_no_compiler_is_everything_goes_through_xla(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build._load.cache_clear()
    try:
        assert not native.is_available()
        assert native.description().startswith("xla (")
        monkeypatch.setenv(build.SETTING, "native")
        with pytest.raises(RuntimeError, match="no native kernels here"):
            native.is_available()
        monkeypatch.setenv(build.SETTING, "fast")
        with pytest.raises(ValueError, match="auto, xla or native"):
            native.is_available()
    finally:
        build._load.cache_clear()


@needs_kernels
def test_a_failing_build_is_a_warning_that_says_why(monkeypatch):
    def fails(*_, **__):
        raise subprocess.CalledProcessError(1, "g++", stderr="kernels.cc:1: error: no room\nmore")

    monkeypatch.setattr(build, "_built", fails)
    build._load.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no room"):
            assert not native.is_available()
    finally:
        build._load.cache_clear()


def test_both_ways_train_alike():
    """One step of a small model through XLA and through the kernels: losses within bfloat16's rounding."""
    code = (
        "import jax\nfrom tests.model.setting import *\n"
        "config = tiny_config(matmul_dtype='bfloat16')\n"
        "(loss, _), slope = step_of(config)(shaken_params(config), shaken_extra(config), packed_batch(config))\n"
        "print(float(loss), float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(slope)))))"
    )

    def run(setting):
        environment = {**os.environ, "NOONSIGHT_KERNELS": setting}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        return np.array(done.stdout.split(), float)

    np.testing.assert_allclose(run("auto"), run("xla"), rtol=2e-2)


@needs_kernels
def test_what_is_not_finite_stays_so():
    """One NaN key reaches every query that sees it, and no other; a NaN in the head reaches the loss."""
    q, k, v = normal(1, 12, 2, 8), normal(1, 12, 1, 8), normal(1, 12, 1, 8, scale=2)
    lower = jnp.zeros((1, 12), jnp.int32)
    y = np.asarray(native.attend(q, k.at[0, 5, 0, 0].set(jnp.nan), v, lower))
    assert np.isfinite(y[:, :5]).all() and np.isnan(y[:, 5:]).all()
    head = normal(8, 40).at[:, 3].set(jnp.nan)
    ce, lse, *_ = native.cross_entropy(normal(5, 8), head, jnp.zeros(5, jnp.int32), jnp.ones(5), 0.0)
    assert np.isnan(ce).all() and np.isnan(lse).all()


@needs_kernels
def test_a_target_outside_the_vocabulary_is_an_error_and_no_memory_is_touched():
    for target in (40, -1):
        with pytest.raises(Exception, match=f"target {target} at token 2 is outside the vocabulary of 40"):
            targets = jnp.array([0, 1, target], jnp.int32)
            jax.block_until_ready(native.cross_entropy(normal(3, 8), normal(8, 40), targets, jnp.ones(3), 0.0))


@needs_kernels
def test_no_tokens_and_mapped_calls():
    _, _, dh, d_head = native.cross_entropy(
        jnp.zeros((0, 8)), normal(8, 40), jnp.zeros(0, jnp.int32), jnp.zeros(0), 0.0
    )
    assert dh.shape == (0, 8) and (d_head == 0).all()
    a, b = normal(3, 5, 4), normal(3, 4, 6)
    mapped = jax.vmap(native.product)(a, b)
    np.testing.assert_array_equal(mapped, jnp.stack([native.product(x, y) for x, y in zip(a, b)]))


@needs_kernels
def test_a_damaged_library_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))  # two builds in a quarter of the time
    library = build._built()
    library.write_bytes(b"not a library")
    assert build._opened(library).noon_unit() > 0
