"""transformers' Qwen3-MoE on torch: the peer most people would use. Runs in its own environment, without ours.

Options: `numerics` float32, bfloat16 (autocast: float32 weights, as in mixed-precision training), bfloat16-matmul
(float32 everywhere, oneDNN may round the inputs of matrix products) or bfloat16-weights (weights and moments rounded
too, which is another training); `experts`, one of transformers' implementations; `compiled`, a mode of torch.compile
or "".
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.worker import Built, serve


def build(job: dict[str, Any]) -> Built:
    """The contestant of `job`: {"config": fields of our ModelConfig, "options", "rate", "seed"}."""
    options = job["options"]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_float32_matmul_precision("medium" if options["numerics"] == "bfloat16-matmul" else "highest")
    torch.manual_seed(job["seed"])
    model = Qwen3MoeForCausalLM(_config(job["config"])).train()
    if options["numerics"] == "bfloat16-weights":
        model.bfloat16()
    model.set_experts_implementation(options["experts"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    forward = torch.compile(model, mode=options["compiled"]) if options["compiled"] else model

    def step(tokens: np.ndarray) -> float:
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16) if options["numerics"] == "bfloat16" else contextlib.nullcontext():
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Built(step, sum(parameter.numel() for parameter in model.parameters()), versions)


def _config(ours: dict[str, Any]) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=ours["vocab_size"],
        hidden_size=ours["width"],
        intermediate_size=ours["width"],  # of dense layers, of which there are none
        num_hidden_layers=ours["num_layers"],
        num_attention_heads=ours["num_heads"],
        num_key_value_heads=ours["num_kv_heads_local"],
        head_dim=ours["head_width"],
        max_position_embeddings=ours["sequence_length"],
        decoder_sparse_step=1,
        moe_intermediate_size=ours["expert_width"],
        num_experts=ours["num_experts"],
        num_experts_per_tok=ours["num_experts_per_token"],
        norm_topk_prob=True,
        tie_word_embeddings=False,
        output_router_logits=False,  # no balancing loss: work that ours does and this peer is spared
        use_cache=False,
        attn_implementation="sdpa",
    )


if __name__ == "__main__":
    serve(build)
