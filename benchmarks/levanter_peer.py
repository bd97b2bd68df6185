"""Levanter's Grug MoE: the public predecessor in JAX. Runs in its own environment, without ours.

The package publishes Grug's parts (attention, rotation, routed experts, fused cross-entropy, optimisers) and not the
model that joins them, which lives in experiment files. So the wiring here is ours: pre-norm blocks of Grug's
attention and Grug's experts beside one shared expert, without gates or exclusive attention, which would only cost it
time; the loss is Grug's, the optimiser Levanter's AdamConfig. Options: `numerics` float32 or bfloat16 (float32
weights, bfloat16 compute, Levanter's usual policy) and `remat`, a checkpoint around each block as Grug has it.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from levanter.grug.attention import AttentionMask, RotaryConfig, apply_rotary_embedding, attention
from levanter.grug.grug_moe import MoEExpertMlp
from levanter.grug.loss import fused_linear_softmax_cross_entropy_loss
from levanter.optim.config import AdamConfig

from benchmarks.worker import Built, serve

INITIAL_STD = 0.02
MANY_STEPS = 1000


class Block(eqx.Module):
    """One layer: x += Attention(RMS(x)); x += Experts(RMS(x)) + SharedExpert(RMS(x))."""

    wq: jax.Array
    wk: jax.Array
    wv: jax.Array
    wo: jax.Array
    router: jax.Array
    experts: MoEExpertMlp
    shared_gate: jax.Array
    shared_up: jax.Array
    shared_down: jax.Array
    attention_gain: jax.Array
    experts_gain: jax.Array
    num_chosen: int = eqx.field(static=True)
    head_width: int = eqx.field(static=True)

    @staticmethod
    def init(config: dict[str, Any], key: jax.Array) -> Block:
        """A block of the shape that the fields of our ModelConfig tell."""
        d, g, key_experts, key = config["width"], config["shared_width"], *jax.random.split(key)
        query, stored = (config[name] * config["head_width"] for name in ("num_heads", "num_kv_heads_local"))
        shapes = [(d, query), (d, stored), (d, stored), (query, d), (d, config["num_experts"]), (d, g), (d, g), (g, d)]
        wq, wk, wv, wo, router, gate, up, down = (
            INITIAL_STD * jax.random.normal(k, shape) for k, shape in zip(jax.random.split(key, len(shapes)), shapes)
        )
        experts = MoEExpertMlp.init(
            num_experts=config["num_experts"],
            hidden_dim=d,
            intermediate_dim=config["expert_width"],
            initializer_std=INITIAL_STD,
            key=key_experts,
            implementation="scatter",
        )
        gains = jnp.ones(d), jnp.ones(d)
        chosen, head = config["num_experts_per_token"], config["head_width"]
        return Block(wq, wk, wv, wo, router, experts, gate, up, down, *gains, chosen, head)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, D] -> [B, S, D]."""
        x = x + self._attend(_rms_norm(x) * self.attention_gain)
        rows = (_rms_norm(x) * self.experts_gain).reshape(-1, x.shape[-1])
        scores, chosen = jax.lax.top_k(jax.nn.sigmoid((rows @ self.router).astype(jnp.float32)), self.num_chosen)
        weights = (scores / scores.sum(-1, keepdims=True)).astype(x.dtype)
        shared = (jax.nn.silu(rows @ self.shared_gate) * (rows @ self.shared_up)) @ self.shared_down
        return x + (self.experts(rows, chosen, weights) + shared).reshape(x.shape)

    def _attend(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], -1, self.head_width)
        q, k, v = ((x @ w).reshape(heads) for w in (self.wq, self.wk, self.wv))
        q, k = _rms_norm(q), _rms_norm(k)
        q, k = apply_rotary_embedding(q, k, seq_len=x.shape[1], head_dim=self.head_width, rope=RotaryConfig())
        return attention(q, k, v, AttentionMask.causal()).reshape(*x.shape[:2], -1) @ self.wo


class Model(eqx.Module):
    """Embedding, blocks, final norm, head."""

    embed: jax.Array
    blocks: tuple[Block, ...]
    final_gain: jax.Array
    head: jax.Array
    remat: bool = eqx.field(static=True)

    @staticmethod
    def init(config: dict[str, Any], remat: bool, key: jax.Array) -> Model:
        """A model of the shape that the fields of our ModelConfig tell."""
        key_embed, key_head, *keys = jax.random.split(key, 2 + config["num_layers"])
        d, vocab = config["width"], config["vocab_size"]
        embed, head = (INITIAL_STD * jax.random.normal(k, (vocab, d)) for k in (key_embed, key_head))
        return Model(embed, tuple(Block.init(config, k) for k in keys), jnp.ones(d), head.T, remat)

    def loss(self, tokens: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats of the next token; the last position has none."""
        x = self.embed[tokens]
        for block in self.blocks:
            x = (eqx.filter_checkpoint(block) if self.remat else block)(x)
        labels, weights = jnp.roll(tokens, -1, axis=1), jnp.ones(tokens.shape).at[:, -1].set(0.0)
        x = _rms_norm(x) * self.final_gain
        return fused_linear_softmax_cross_entropy_loss(x, self.head, labels, weight=weights)


def build(job: dict[str, Any]) -> Built:
    """The contestant of `job`: {"config": fields of our ModelConfig, "options", "rate", "seed"}."""
    compute = jnp.dtype(job["options"]["numerics"])
    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=compute, output_dtype=compute)
    rules = AdamConfig(
        learning_rate=job["rate"], beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, max_grad_norm=None, warmup=0.0
    )
    optimizer = rules.build(MANY_STEPS)
    model = Model.init(job["config"], job["options"]["remat"], jax.random.key(job["seed"]))
    arrays, static = eqx.partition(model, eqx.is_array)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(arrays))

    def train_step(arrays: Any, moments: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(arrays: Any) -> jax.Array:
            return eqx.combine(policy.cast_to_compute(arrays), static).loss(tokens)

        value, grads = jax.value_and_grad(loss)(arrays)
        updates, moments = optimizer.update(grads, moments, arrays)
        return optax.apply_updates(arrays, updates), moments, value

    run, compiled = {"state": (arrays, optimizer.init(arrays))}, jax.jit(train_step, donate_argnums=(0, 1))
    del model, arrays  # donated

    def step(tokens: np.ndarray) -> float:
        *state, value = compiled(*run["state"], tokens)
        run["state"] = jax.block_until_ready(tuple(state))
        return float(value)

    versions = {"jax": jax.__version__, "marin-levanter": importlib.metadata.version("marin-levanter")}
    return Built(step, num_parameters, versions)


def _rms_norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


if __name__ == "__main__":
    serve(build)
