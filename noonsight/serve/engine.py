"""Text from a model: prefill once, then one compiled step per token, sampling included.

`generate` and `generate_batch` are pure functions of their arguments: a seed gives the same tokens on the same machine,
and a row does not depend on the rows beside it. The cache, the key and the position of every row live on the device;
the host only looks at the finished tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from noonsight.model.config import ModelConfig
from noonsight.model.decode import Cache, decode_step, init_cache, prefill

BUCKET = 32  # prompts and caches are padded to multiples of this, so that few shapes are compiled
LOOK_EVERY = 16  # steps between two looks at whether all rows have ended


def generate(
    params: Any,
    extra: dict[str, Array],
    config: ModelConfig,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float,
    top_k: int = 0,
    seed: int,
    eos: int | None,
) -> list[int]:
    """The tokens that follow one prompt; as `generate_batch` of one row."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "eos": eos}
    return generate_batch(params, extra, config, [prompt_ids], seeds=[seed], **options)[0]


def generate_batch(
    params: Any,
    extra: dict[str, Array],
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float,
    top_k: int = 0,
    seeds: Sequence[int],
    eos: int | None,
) -> list[list[int]]:
    """For each prompt at most `max_tokens` new ids, ending before the first `eos` (None: never ends early).

    `temperature` 0 takes the most probable token; `top_k` 0 keeps the whole vocabulary. Raises ValueError for an empty
    prompt, an id outside the vocabulary, or a prompt that with `max_tokens` exceeds the model's context.
    """
    _check(config, prompts, max_tokens, temperature, top_k, seeds)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), _bucketed(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    cache = init_cache(config, len(prompts), tokens.shape[1] + _bucketed(max_tokens))
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    sample = partial(_sample, temperature=jnp.float32(temperature), top_k=top_k, greedy=temperature == 0)
    logits, cache = _prefill(params, extra, cache, jnp.asarray(tokens), jnp.asarray(lengths), config)
    found = [sample(logits, keys, 0)]
    ended = np.zeros(len(prompts), bool)
    for step in range(1, max_tokens):
        if step % LOOK_EVERY == 0 and eos is not None:
            ended |= (np.stack(found[-LOOK_EVERY:]) == eos).any(axis=0)
            if ended.all():
                break
        logits, cache = _step(params, extra, cache, found[-1], config)
        found.append(sample(logits, keys, step))
    return [_until(column, eos) for column in np.stack(found).T.tolist()]


@partial(jax.jit, static_argnames=("top_k", "greedy"))
def _sample(
    logits: Float[Array, "B V"], keys: Array, step: int, temperature: Float[Array, ""], top_k: int, greedy: bool
) -> Int[Array, " B"]:
    """One token per row: the key of a row and the number of the step decide, so rows are independent."""
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    draw = jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, step), row))
    return draw(keys, logits / temperature).astype(jnp.int32)


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _prefill(
    params: Any, extra: Any, cache: Cache, tokens: Int[Array, "B S"], lengths: Int[Array, " B"], config: ModelConfig
) -> tuple[Float[Array, "B V"], Cache]:
    return prefill(params, extra, cache, tokens, lengths, config)


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _step(
    params: Any, extra: Any, cache: Cache, tokens: Int[Array, " B"], config: ModelConfig
) -> tuple[Float[Array, "B V"], Cache]:
    return decode_step(params, extra, cache, tokens, config)


def _bucketed(length: int) -> int:
    return -(-length // BUCKET) * BUCKET


def _until(ids: list[int], eos: int | None) -> list[int]:
    return ids[: ids.index(eos)] if eos in ids else ids


def _check(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    top_k: int,
    seeds: Sequence[int],
) -> None:
    if max_tokens < 1 or temperature < 0 or top_k < 0 or len(seeds) != len(prompts):
        raise ValueError(
            f"generate: max_tokens {max_tokens} must be positive, temperature {temperature} and top_k {top_k} not "
            f"negative, and {len(prompts)} prompts need as many seeds (given {len(seeds)})."
        )
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"generate: prompt {number} is empty; begin a document with the token that ends one.")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ValueError(f"generate: prompt {number} has an id outside the vocabulary of {config.vocab_size}.")
        if len(prompt) + max_tokens > config.sequence_length:
            raise ValueError(
                f"generate: prompt {number} has {len(prompt)} tokens and max_tokens is {max_tokens}, together more "
                f"than the context of {config.sequence_length}; shorten one of them."
            )
