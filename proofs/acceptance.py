"""The acceptance checks of the hero model and its optimiser as numbers: `python -m proofs.acceptance NAME` prints JSON.

Each is measured in a process of its own, on arrays small enough for seconds. `proofs.model` gathers them and holds them
against their bounds; nothing here judges.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).resolve().parents[1]
NOON = str(Path(sys.executable).parent / "noon")
STEPS_OF_NORMS, STEPS_OF_BALANCE, STEPS_OF_BITS = 1000, 200, 30

# Marin, issue #8435: what a family counts, and the ladder's train FLOPs and rates as far as digits were published.
PUBLISHED_COUNTS: dict[str, dict[str, float]] = {
    "hero": {
        "total_parameters": 535_477_106_688,
        "active_parameters": 22_762_487_808,
        "touched_parameters": 24_510_216_192,
        "forward_flops_per_token": 49_912_086_528,
        "batch_tokens": 46_137_344,
        "steps": 390_251,
        "tokens": 18_005_144_633_344,
        "train_flops": 2.69602e24,
    },
    "ladder-768": {
        "active_parameters": 60_555_264,
        "total_parameters": 1_591_848_448,
        "forward_flops_per_token": 381_394_944,
        "steps": 11_420,
        "train_flops": 5.4805e19,
    },
    "ladder-1024": {
        "active_parameters": 162_004_992,
        "total_parameters": 3_980_116_480,
        "forward_flops_per_token": 711_671_808,
        "steps": 15_276,
        "train_flops": 2.7359e20,
    },
    "ladder-1536": {
        "active_parameters": 481_296_384,
        "total_parameters": 11_534_398_464,
        "forward_flops_per_token": 1_603_436_544,
        "steps": 15_128,
        "train_flops": 1.8313e21,
    },
    "ladder-2048": {
        "active_parameters": 1_170_735_104,
        "total_parameters": 27_742_902_528,
        "forward_flops_per_token": 3_326_738_432,
        "steps": 20_072,
        "train_flops": 9.2424e21,
    },
}
PUBLISHED_RATES = (
    (768, 0.0036505, 0.015819, 1.0340e-15, 0.96849),
    (1024, 0.0033257, 0.014411, 1.1959e-15, 0.95),
    (1536, 0.0034360, 0.014889, 1.1901e-15, 0.95),
    (2048, 0.0030973, 0.013422, 1.3709e-15, 0.95),
    (6144, 0.00075934, 0.0032905, 6.0446e-15, 0.95),
)


def counts() -> list[dict[str, Any]]:
    """`noon count FAMILY --json` beside the published figures; `error` is relative."""
    rows = []
    for family, published in PUBLISHED_COUNTS.items():
        found = _noon("count", family, "--json")
        for name, expected in published.items():
            error = abs(found[name] - expected) / expected
            rows.append({"family": family, "name": name, "value": found[name], "published": expected, "error": error})
    return rows


def rates() -> list[dict[str, Any]]:
    """`noon count hero --rates --json` beside the published table; `error` is relative."""
    rows = []
    by_width = {row["width"]: row for row in _noon("count", "hero", "--rates", "--json")["rates"]}
    for width, *published in PUBLISHED_RATES:
        for name, expected in zip(("adam_lr", "matrix_lr", "epsilon", "beta2"), published):
            found = by_width[width][name]
            error = abs(found - expected) / expected
            rows.append({"width": width, "name": name, "value": found, "published": expected, "error": error})
    return rows


def norms() -> dict[str, Any]:
    """How far the norm of a MuonH or AdamH matrix strays from its first value over a run, and that the rest moves."""
    import jax
    import numpy as np

    from noonsight.train.optim import by_path

    train_step, state, batch, groups = _training(num_steps=STEPS_OF_NORMS)

    def lengths(params: Any) -> dict[str, Any]:
        axes = {
            path: (-3, -2, -1) if path.startswith("layers.expert_") else (-2, -1)
            for path, group in groups.items()
            if group in ("muonh", "adamh")
        }
        leaves = by_path(jax.device_get(params))
        return {path: np.sqrt(np.square(leaves[path].astype(float)).sum(axis=at)) for path, at in axes.items()}

    first, before, drift = lengths(state.params), jax.device_get(state.params), {}
    for step in range(STEPS_OF_NORMS):
        state, _ = train_step(state, batch(step))
        if step % 50 == 49:
            for path, now in lengths(state.params).items():
                drift[path] = max(drift.get(path, 0.0), float(np.abs(now / first[path] - 1).max()))
    after = jax.device_get(state.params)
    turned = min(
        float(np.linalg.norm(by_path(after)[path] - by_path(before)[path]) / np.linalg.norm(by_path(before)[path]))
        for path in drift
    )
    return {
        "steps": STEPS_OF_NORMS,
        "matrices": len(drift),
        "drift": max(drift.values()),
        "worst": max(drift, key=drift.__getitem__),
        "least_turned": turned,
    }


def balance() -> dict[str, Any]:
    """Load of the fullest expert over the mean after pending quantiles alone acted on fresh random rows, step by step.

    The router is skewed, so that without a bias the load is far from even; the last step alone is reported.
    """
    import jax
    import jax.numpy as jnp

    from noonsight.model.families import miniature
    from noonsight.model.moe import effective_bias, histogram_beta, route

    config, rows = miniature(64, 2, 64), 1 << 15
    experts, chosen = config.num_experts, config.num_experts_per_token
    router = jax.random.normal(jax.random.key(1), (config.width, experts)) / 8
    router = jnp.concatenate([router, jnp.linspace(-1.5, 1.5, experts)[None]])
    rank = jnp.float32(rows * chosen / experts)

    def one_step(pending: Any, key: Any) -> tuple[Any, Any]:
        m = jnp.concatenate([jax.random.normal(key, (rows, config.width)), jnp.ones((rows, 1))], axis=1)
        routing = route(m, router, effective_bias(pending), config)
        margins = routing.scores - routing.threshold[:, None]
        load = jnp.bincount(routing.chosen.reshape(-1), length=experts)
        return histogram_beta(margins, jnp.ones(rows, bool), rank, config.balance_bins), load.max() / load.mean()

    keys = jax.random.split(jax.random.key(0), STEPS_OF_BALANCE)
    _, loads = jax.jit(lambda: jax.lax.scan(one_step, jnp.zeros(experts), keys))()
    return {"steps": STEPS_OF_BALANCE, "rows": rows, "first": float(loads[0]), "last": float(loads[-1])}


def histogram() -> dict[str, Any]:
    """Distance of the histogram's quantile from the exact one, in bins, over random margins with invalid rows."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from noonsight.model.moe import histogram_beta

    find, worst, cases = jax.jit(histogram_beta, static_argnums=3), 0.0, 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        margins = (rng.standard_normal((777, 5)) * rng.uniform(0.1, 9)).astype(np.float32)
        valid = rng.random(777) < 0.7
        rank = float(valid.sum() * 2 / 5)
        live = margins[valid].astype(float)
        exact = np.sort(live, axis=0)[::-1][int(np.ceil(rank)) - 1]
        for bins in (16, 1000, 10_000):
            found = np.asarray(find(jnp.asarray(margins), jnp.asarray(valid), jnp.float32(rank), bins), float)
            worst = max(worst, float(np.abs(found - exact).max() / ((live.max() - live.min()) / bins)))
            cases += 1
    return {"cases": cases, "bins_off": worst}


def parity() -> dict[str, Any]:
    """Every comparison that `tests/model/test_parity.py` makes with the float64 reference, as numbers, by precision.

    `error` is that of `tests/model/nearness.py`: of largest entries in float32, root mean squares in bfloat16. What goes
    through two layers and the loss stands apart: its rounding adds up, and the tests give it slack.
    """
    import pytest

    from tests.model import nearness

    recorded: dict[str, list[tuple[float, str]]] = {}
    original = nearness.close

    def close(found: Any, expected: Any, dtype: str, name: str = "", lead: int = 0, slack: float = 1) -> None:
        kind = dtype if slack == 1 else f"{dtype}, whole model"
        recorded.setdefault(kind, []).append((nearness.relative_error(found, expected, dtype, lead), name))
        original(found, expected, dtype, name, lead, slack)

    class Recorder:
        """Stands between the tests and their `close`."""

        def pytest_runtest_setup(self, item: Any) -> None:
            if getattr(item.module, "close", None) is original:
                item.module.close = close

    nearness.close = close
    with contextlib.redirect_stdout(sys.stderr):
        tests = str(HOUSE / "tests" / "model" / "test_parity.py")
        code = pytest.main([tests, "-p", "no:cacheprovider"], plugins=[Recorder()])
    about = {
        kind: {"comparisons": len(errors), "error": max(errors)[0], "worst": max(errors)[1]}
        for kind, errors in sorted(recorded.items())
    }
    return {"exit_code": int(code), "precisions": about}


def exchange() -> dict[str, Any]:
    """Dropless exchanges against the dense oracle: outputs and all gradients, relative to the largest entry."""
    import jax.numpy as jnp
    import numpy as np

    from noonsight.model.exchange import EXCHANGES

    found: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16"):
        rng = np.random.default_rng(0)
        shapes = ((300, 16), (300, 2), (5, 16, 8), (5, 16, 8), (5, 8, 16))  # rows, weights, gate, up, down
        given = [jnp.asarray(0.5 * rng.standard_normal(shape), dtype) for shape in shapes]
        chosen = jnp.asarray(np.stack([rng.permutation(4)[:2] for _ in range(300)]), jnp.int32)  # expert 4 is idle
        valid = jnp.asarray(rng.random(300) < 0.8)
        oracle = _exchanged("einsum", [each.astype(jnp.float32) for each in given], chosen, valid)
        for name in EXCHANGES:
            if name == "einsum":
                continue
            ways = {dtype: given}
            if (
                dtype == "bfloat16"
            ):  # float32 arrays, rounded where they are multiplied: the C++ kernels if there are any
                ways["bfloat16 products"] = [each.astype(jnp.float32) for each in given]
            for way, arrays in ways.items():
                pairs = zip(_exchanged(name, arrays, chosen, valid, dtype), oracle)
                found.setdefault(name, {})[way] = max(_error(one, other, 0) for one, other in pairs)
    return found


def _exchanged(name: str, given: list[Any], chosen: Any, valid: Any, dtype: str = "float32") -> list[Any]:
    """Output and gradients of the named exchange."""
    import jax
    import jax.numpy as jnp

    from noonsight.model.exchange import EXCHANGES, Way

    # the same for all: a slope that came from y itself, like cos(y), would add y's own error to every gradient
    slope = jax.random.normal(jax.random.key(1), given[0].shape)

    def total(rows: Any, weights: Any, *experts: Any) -> Any:
        y, _ = EXCHANGES[name](rows, chosen, weights, valid, *experts, Way(dtype=dtype))
        return jnp.sum(slope * y.astype(jnp.float32)), y

    (_, y), slopes = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4), has_aux=True))(*given)
    return [y, *slopes]


def segments() -> dict[str, Any]:
    """Another document's tokens: the largest change of a document's logits, and of those of the changed document."""
    import numpy as np

    from tests.model.setting import logits_of, packed_batch, shaken_extra, shaken_params, tiny_config

    config = tiny_config()
    params, extra, batch = shaken_params(config), shaken_extra(config), packed_batch(config)
    changed = batch.tokens.at[:, 7:23].set((batch.tokens[:, 7:23] + 1) % config.vocab_size)
    one, two = (
        np.asarray(logits_of(config)(params, extra, tokens, batch.segments)) for tokens in (batch.tokens, changed)
    )
    moved = np.abs(one - two).max(axis=(0, 2))
    return {"others": float(np.delete(moved, slice(7, 23)).max()), "itself": float(moved[7:23].min())}


def pending() -> dict[str, Any]:
    """Evaluation under the pending bias against the next step's training forward, relative; and without the bias."""
    import numpy as np

    from tests.model.setting import packed_batch, shaken_extra, shaken_params, step_of, tiny_config, token_losses_of

    config = tiny_config()
    params, batch = shaken_params(config), packed_batch(config)
    (_, first), _ = step_of(config)(params, shaken_extra(config), batch)
    after = {"pending_beta": first["next"]["pending_beta"]}
    (_, following), _ = step_of(config)(params, after, batch)
    weights = np.asarray(batch.weights, float)

    def evaluated(extra: dict[str, Any]) -> float:
        losses = np.asarray(token_losses_of(config)(params, extra, batch), float)
        return float((losses * weights).sum() / weights.sum())

    trained = float(following["metrics"]["cross_entropy"])
    without = evaluated({"pending_beta": after["pending_beta"] * 0})
    return {"error": abs(evaluated(after) / trained - 1), "error_without_bias": abs(without / trained - 1)}


def bits() -> dict[str, Any]:
    """Final parameters and losses of the same short training in two processes that share nothing."""
    environment = {name: text for name, text in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-m", "proofs.acceptance", "one_training"]
    one, two = (
        json.loads(subprocess.run(command, cwd=HOUSE, env=environment, capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    return {"steps": STEPS_OF_BITS, "hashes": [one["hash"], two["hash"]], "same_losses": one["losses"] == two["losses"]}


def one_training() -> dict[str, Any]:
    """A short training of the miniature's shape: hash of the parameters, losses as exact text."""
    from noonsight.train.step import params_hash

    train_step, state, batch, _ = _training(num_steps=STEPS_OF_BITS, width=48, rows=4, length=64)
    losses = []
    for step in range(STEPS_OF_BITS):
        state, measured = train_step(state, batch(step))
        losses.append(float(measured["loss"]).hex())
    return {"hash": params_hash(state.params), "losses": losses}


def _training(
    *, num_steps: int, width: int = 16, rows: int = 2, length: int = 32
) -> tuple[Callable[..., Any], Any, Callable[[int], Any], dict[str, str]]:
    """(train step, state, batch, groups) of a small hero under MuonH on random tokens in documents of 17."""
    import jax
    import numpy as np

    from noonsight.model.families import miniature
    from noonsight.model.transformer import make_program
    from noonsight.tokens.batches import Batch
    from noonsight.train.config import OptimizerConfig
    from noonsight.train.optim import make_optimizer
    from noonsight.train.step import init_state, make_train_step

    vocabulary, key = 256, jax.random.key(7)
    program = make_program(replace(miniature(width, 2, vocabulary), matmul_dtype="bfloat16"))  # as the hero multiplies
    config = OptimizerConfig(adam_lr=4e-3, matrix_lr=0.02, beta2=0.98, epsilon=3e-16)
    optimizer = make_optimizer(config, jax.eval_shape(program.init, key)[0], num_steps=num_steps)

    def batch(step: int) -> Batch:
        tokens = np.random.default_rng(step).integers(1, vocabulary, (rows, length)).astype(np.int32)
        tokens[:, ::17] = 0
        weights = np.ones((rows, length), np.float32)
        weights[:, -1] = 0
        return Batch(tokens, (np.cumsum(tokens == 0, axis=1) - (tokens == 0)).astype(np.int32), weights)

    state = jax.jit(lambda: init_state(program, optimizer, key))()
    return make_train_step(program, optimizer), state, batch, optimizer.groups


def _error(found: Any, expected: Any, lead: int) -> float:
    """Largest difference over the largest entry, array by array along the first `lead` axes; inf where anything is NaN."""
    import numpy as np

    found, expected = np.asarray(found, np.float64), np.asarray(getattr(expected, "value", expected), np.float64)
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("inf")
    axes = tuple(range(lead, expected.ndim))
    scale = np.maximum(np.abs(expected).max(axes), 1e-30)
    return float((np.abs(found - expected).max(axes) / scale).max())


def _noon(*words: str) -> Any:
    environment = os.environ | {"PYTHONPATH": str(HOUSE)}
    done = subprocess.run([NOON, *words], cwd=HOUSE, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


MEASUREMENTS: tuple[Callable[[], Any], ...] = (
    counts,
    rates,
    norms,
    balance,
    histogram,
    parity,
    exchange,
    segments,
    pending,
    bits,
)

if __name__ == "__main__":
    named = {each.__name__: each for each in (*MEASUREMENTS, one_training)}
    print(json.dumps(named[sys.argv[1]]()))
