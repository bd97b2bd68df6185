"""Proof that an export is the model it was made from: one battery, one receipt.

The folder is imported again and run by the NumPy reference in float64; an engine (JAX on the training parameters, the
transformers library on the folder, or the reference on the training parameters) must agree with it on log-probabilities
at every length, on the chosen experts and on greedy tokens, whatever else is in the batch. A choice between two
near-equal experts or tokens may fall either way, and only then: the gap must be smaller than the bound (near-tie rule).
A row is not judged from an expert that fell the other way onwards, and the share of such positions has a bound as well.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from noonsight.logbook.record import Check, Receipt, now
from noonsight.model import attention, moe, transformer
from noonsight.model.config import ModelConfig
from noonsight.model.elementary import gated_norm, rotation, short_convolution
from noonsight.model.ready import prepare
from noonsight.serve import engine as decoding
from noonsight.serve import hf, reference

NUM_ROWS = 3
NUM_GREEDY = 32
MAX_LENGTH = 512  # positions compared; more only where the window is longer
# Largest and mean error of a log-probability, by the precision of engine and folder, whichever is coarser.
BOUNDS = {"float32": (1e-5, 1e-5), "bfloat16": (0.2, 0.02)}
NEAR_TIE_SHARE = 0.5
LOGIT_SCALE = 2.0  # float32 rounds in proportion: the bound holds up to this logit and grows with the largest one


class Engine(NamedTuple):
    """What is held against the reference."""

    logits: Callable[[NDArray], NDArray]  # tokens [B, S] -> [B, S, V]
    routed: Callable[[NDArray], NDArray]  # tokens [B, S] -> ids [L, B, S, k]
    greedy: Callable[[NDArray, int], NDArray]  # prompts [B, S], n -> new ids [B, n]
    versions: dict[str, str]


def check_export(
    folder: Path,
    params: Any,
    extra: dict[str, Any],
    config: ModelConfig,
    *,
    engine: str = "jax",
    seed: int,
) -> Receipt:
    """Compare `folder` with the training state it was exported from. The receipt holds each value beside its bound.

    Raises ValueError when the folder cannot be imported (damaged, incomplete, other config) or the engine is unknown;
    a model that merely differs gives a receipt that did not pass. `hf` needs torch and transformers installed.
    """
    if engine not in ENGINES:
        raise ValueError(f"check_export: engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}.")
    digest = hf.check_digest(folder)
    imported, state, read = hf.import_model(folder)
    subject = ENGINES[engine](folder, params, extra, config)
    tokens = _tokens(config, seed)
    truth = reference.trace(imported, state, read, tokens)
    # transformers computes in float32 what the folder holds; the others hold the parameters before they were stored
    precisions = {"float32"} if engine == "hf" else {config.compute_dtype, hf.stored_dtype(folder)}
    largest, mean = _bounds(truth.logits, precisions)
    checks = [
        _check("config differs", float(read != config), 0),
        _check("tensors differ", _different(params, extra, config, imported, state), 0),
        *_engine_checks(subject, tokens, truth, config, largest, mean),
        _check("greedy tokens differ", _greedy_errors(subject, tokens, imported, state, read, largest), 0),
    ]
    return Receipt(
        kind="export",
        subject=folder.name,
        subject_digest=digest,
        against=f"training state under {engine}" if engine != "hf" else "folder under transformers",
        against_digest=_digest_of(params, extra),
        engine=engine,
        versions={"numpy": np.__version__, "jax": jax.__version__, **subject.versions},
        checks=tuple(checks),
        passed=all(check.passed for check in checks),
        seed=seed,
        at=now(),
    )


def _engine_checks(
    subject: Engine, tokens: NDArray, truth: reference.Trace, config: ModelConfig, largest: float, mean: float
) -> list[Check]:
    """Experts; largest error by position (across the window's edge), mean error, and the first row in other company."""
    found = subject.logits(tokens)
    wrong, judged = _routing(subject.routed(tokens), truth, largest)
    errors = np.abs(reference.log_softmax(found) - reference.log_softmax(truth.logits)) * judged[..., None]
    error = errors.max(-1)
    length = tokens.shape[1]
    edges = sorted({1, *(n for n in (config.window // 2, config.window, config.window + 1) if n < length), length})
    checks = [
        _check(f"log-probability, positions {start}-{end - 1}, largest error", error[:, start:end].max(), largest)
        for start, end in zip([0, *edges], edges)
    ]
    others = np.concatenate([tokens[:1], (tokens[1:] + 1) % config.vocab_size])
    company = np.abs(reference.log_softmax(subject.logits(others)[0]) - reference.log_softmax(found[0])).max()
    return [
        _check("experts differ", wrong, 0),
        _check("share of positions behind a near tie of experts", 1 - judged.mean(), NEAR_TIE_SHARE),
        *checks,
        _check("log-probability, mean error", errors.mean(), mean),
        _check("log-probability of a row in other company", company, largest),
    ]


def _routing(found: NDArray, truth: reference.Trace, bound: float) -> tuple[float, NDArray[np.bool_]]:
    """(choices that differ without excuse, positions [B, S] to be judged).

    The excuse is a near tie: the last expert taken led the first one left by at most `bound`, here or, since everything
    after it follows, at an earlier position of the row.
    """
    differs = (np.sort(found, axis=-1) != np.sort(truth.routed, axis=-1)).any(-1)
    judged = ~np.logical_or.accumulate((differs & (truth.margins <= bound)).any(0), axis=-1)
    return float((differs & judged).sum()), judged


def _greedy_errors(
    subject: Engine, tokens: NDArray, params: Any, extra: Any, config: ModelConfig, bound: float
) -> float:
    """Greedy tokens that the reference, given the same prefix, finds worse than its best by more than the bounds."""
    start = max(1, min(config.window - NUM_GREEDY // 2, tokens.shape[1] - NUM_GREEDY))
    count = min(NUM_GREEDY, tokens.shape[1] - start)
    prompts = tokens[:, :start]
    new = subject.greedy(prompts, count)
    rows = np.concatenate([prompts, new], axis=1)
    truth = reference.trace(params, extra, config, rows)
    logprobs = reference.log_softmax(truth.logits[:, start - 1 : -1])
    settled = ~np.logical_or.accumulate((truth.margins <= bound).any(0), axis=-1)[:, start - 1 : -1]
    gap = logprobs.max(-1) - np.take_along_axis(logprobs, new[..., None], axis=-1)[..., 0]
    return float((settled & (gap > 2 * bound)).sum())  # two log-probabilities, each off by at most the bound


def _different(params: Any, extra: Any, config: ModelConfig, imported: Any, state: Any) -> float:
    """Effective tensors that are not bit-equal after a round trip, in the dtype in which they are stored."""
    ours, theirs = _prepared(params, extra), _prepared(imported, state)
    flags = jax.tree.map(lambda a, b: not np.array_equal(np.asarray(a).astype(np.asarray(b).dtype), b), ours, theirs)
    return float(sum(jax.tree.leaves(flags)))


def _prepared(params: Any, extra: dict[str, Any]) -> dict[str, Any]:
    tree = reference.as_tree(params, None)
    if "pending_beta" in extra:
        bias = hf.effective_bias(np.asarray(extra["pending_beta"], np.float32))
        tree["layers"]["router_bias"] = np.asarray(bias)
    return tree


def _jax_engine(folder: Path, params: Any, extra: dict[str, Any], config: ModelConfig) -> Engine:
    """The training model itself; experts are read from its router, greedy tokens from the cached engine."""
    run = jax.jit(lambda p, e, tokens: transformer.logits(p, e, tokens, tokens * 0, config))
    route = jax.jit(lambda p, e, tokens: _jax_routed(p, e, tokens, config))

    def greedy(prompts: NDArray, count: int) -> NDArray:
        options: dict[str, Any] = {"max_tokens": count, "temperature": 0.0, "seeds": [0] * len(prompts), "eos": None}
        return np.array(decoding.generate_batch(params, extra, config, prompts.tolist(), **options))

    return Engine(
        logits=lambda tokens: np.asarray(run(params, extra, tokens)),
        routed=lambda tokens: np.asarray(route(params, extra, tokens)),
        greedy=greedy,
        versions={},
    )


def _jax_routed(params: Any, extra: dict[str, Any], tokens: Any, config: ModelConfig) -> Any:
    """Experts chosen in every layer [L, B, S, k]: the model's own block in a scan, its router asked beside it."""
    ready, segments = prepare(params, extra, transformer.dropless(config)), tokens * 0
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    angles = rotation(positions, config.rotated_width, config.rope_theta)
    local = attention.lower_bounds(segments, config.window)
    wide = attention.lower_bounds(segments, config.global_window or tokens.shape[1])

    def one_layer(x: Any, layer: Any, kind: Any) -> Any:
        seen = {}

        def convolve(site: str, given: Any, taps: Any) -> Any:
            seen[site] = given if taps is None else short_convolution(given, taps, segments)
            return seen[site]

        lower = jnp.where(kind.is_global, wide, local)
        reach = transformer.Reach(convolve, lambda q, k, v: attention.attend(q, k, v, lower, config.matmul_dtype))
        after, _, _ = transformer.block(x, layer, kind, reach, angles, segments >= 0, ready.config)
        m = gated_norm(x + seen["attn"], layer.moe_norm, layer.moe_gate, config)
        chosen = moe.route(m.reshape(-1, config.width), layer.router, layer.router_bias, config).chosen
        return after, chosen.reshape(*tokens.shape, -1)

    return ready.scan(one_layer, transformer.embed(ready, tokens), transformer.kinds(config))[1]


def _reference_engine(folder: Path, params: Any, extra: dict[str, Any], config: ModelConfig) -> Engine:
    """The reference on the training parameters: shows what the folder changed, apart from any engine."""

    def logits(tokens: NDArray) -> NDArray:
        return reference.forward(params, extra, config, tokens)

    return Engine(
        logits=logits,
        routed=lambda tokens: reference.trace(params, extra, config, tokens).routed,
        greedy=lambda prompts, count: _greedy(logits, prompts, count),
        versions={},
    )


def _hf_engine(folder: Path, params: Any, extra: dict[str, Any], config: ModelConfig) -> Engine:
    """The transformers library on the folder, in float32, with the modelling files that lie in it."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    model.eval()
    chosen: list[NDArray] = []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(lambda module, given, out: chosen.append(out[0].numpy()))

    def logits(tokens: NDArray) -> NDArray:
        chosen.clear()
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(tokens.astype(np.int64))).logits.double().numpy()

    def routed(tokens: NDArray) -> NDArray:
        logits(tokens)
        return np.stack([ids.reshape(*tokens.shape, -1) for ids in chosen])

    def greedy(prompts: NDArray, count: int) -> NDArray:
        given = torch.from_numpy(prompts.astype(np.int64))
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "eos_token_id": None}
        return model.generate(given, attention_mask=torch.ones_like(given), **options)[:, given.shape[1] :].numpy()

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Engine(logits=logits, routed=routed, greedy=greedy, versions=versions)


ENGINES = {"jax": _jax_engine, "hf": _hf_engine, "reference": _reference_engine}


def _greedy(logits: Callable[[NDArray], NDArray], prompts: NDArray, count: int) -> NDArray:
    """Greedy tokens without a cache."""
    rows = prompts
    for _ in range(count):
        rows = np.concatenate([rows, logits(rows)[:, -1:].argmax(-1)], axis=1)
    return rows[:, prompts.shape[1] :]


def _digest_of(params: Any, extra: dict[str, Any]) -> str:
    """SHA-256 over the names and bytes of the training state, leaf by leaf."""
    found = hashlib.sha256()
    for path, leaf in jax.tree.flatten_with_path((params, extra))[0]:
        found.update(jax.tree_util.keystr(path).encode() + np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return found.hexdigest()


def _tokens(config: ModelConfig, seed: int) -> NDArray:
    """Random rows, long enough to leave the window behind where the context allows."""
    length = min(config.sequence_length, max(MAX_LENGTH, config.window + config.window // 4))
    return np.random.default_rng(seed).integers(0, config.vocab_size, (NUM_ROWS, length), dtype=np.int32)


def _bounds(logits: NDArray, precisions: set[str]) -> tuple[float, float]:
    if "bfloat16" in precisions:
        return BOUNDS["bfloat16"]
    scale = max(1.0, float(np.abs(logits).max()) / LOGIT_SCALE)
    return tuple(bound * scale for bound in BOUNDS["float32"])


def _check(name: str, value: Any, bound: float) -> Check:
    return Check(name=name, value=float(value), bound=float(bound), passed=bool(value <= bound))
