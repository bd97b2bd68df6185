"""Parameters in closed form: every array of the tree that `params.py` makes, by part.

Active parameters follow Marin's rule (#8435): the matrices a token passes outside embedding, head and gated norms.
Touched parameters are all that a token passes, whatever the part; other public summaries call those active.
"""

from __future__ import annotations

from noonsight.model.config import ModelConfig

MatrixStacks = dict[str, tuple[int, int, int]]  # name -> (how many matrices, rows, columns)


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Parameters of each part, summing to all of them."""
    d, layers = config.width, config.num_layers
    stored = config.num_kv_heads_local * config.head_width
    experts = config.num_experts
    qk_gains = 2 * config.head_width if config.qk_norm == "gain" else 0
    num_norms = 2 * layers + (2 if config.gated_norm_rank else 1)  # the embedding's norm exists only with its gate
    matrices = {name: number * rows * columns for name, (number, rows, columns) in matrix_stacks(config).items()}

    def of(*names: str) -> int:
        return sum(matrices.get(name, 0) for name in names)

    return {
        "embedding": config.vocab_size * d,
        "head": 0 if config.tie_embeddings else config.vocab_size * d,
        "attention": of("query", "key", "value", "output"),
        "head_gates": layers * d * config.num_heads if config.head_gate else 0,
        "gated_norms": of("norm_down", "norm_up"),
        "convolutions": layers * config.sconv_kernel * (stored + 2 * d),
        "router": layers * (d * experts + experts),
        "latent": of("latent_down", "latent_up"),
        "experts": of("expert_gate", "expert_up", "expert_down"),
        "shared_experts": of("shared_gate", "shared_up", "shared_down"),
        "dense": of("mlp_gate", "mlp_up", "mlp_down"),
        "gains": num_norms * d + layers * (config.latent_width if config.is_moe else 0) + layers * qk_gains,
    }


def matrix_stacks(config: ModelConfig) -> MatrixStacks:
    """The matrices that MuonH turns: all but embedding, head, router and head gates (Marin, #8435)."""
    d, layers = config.width, config.num_layers
    query, stored = config.num_heads * config.head_width, config.num_kv_heads_local * config.head_width
    found = {
        "query": (layers, d, query),
        "key": (layers, d, stored),
        "value": (layers, d, stored),
        "output": (layers, query, d),
    }
    if rank := config.gated_norm_rank:
        found |= {"norm_down": (2 * layers + 2, d, rank), "norm_up": (2 * layers + 2, rank, d)}
    if not config.is_moe:
        return found | _swiglu("mlp", layers, d, config.dense_width)
    if latent := config.latent_width:
        found |= {"latent_down": (layers, d, latent), "latent_up": (layers, latent, d)}
    found |= _swiglu("expert", layers * config.num_experts, config.expert_input_width, config.expert_width)
    if config.num_shared_experts:
        found |= _swiglu("shared", layers * config.num_shared_experts, d, config.shared_width)
    return found


def active_parameters(config: ModelConfig) -> int:
    """Attention and MLP matrices that one token passes, the router included."""
    parts = parameters_by_part(config)
    matrices = sum(parts[name] for name in ("attention", "latent", "shared_experts", "dense"))
    router = config.num_layers * config.width * config.num_experts
    chosen = config.num_layers * config.num_experts_per_token * expert_parameters(config) if config.is_moe else 0
    return matrices + router + chosen


def idle_parameters(config: ModelConfig) -> int:
    """Parameters of the experts that a token does not take."""
    idle = config.num_experts - config.num_experts_per_token if config.is_moe else 0
    return config.num_layers * idle * expert_parameters(config)


def expert_parameters(config: ModelConfig) -> int:
    """The three matrices of one routed expert."""
    return 3 * config.expert_input_width * config.expert_width


def _swiglu(name: str, number: int, width: int, inner: int) -> MatrixStacks:
    return {
        f"{name}_gate": (number, width, inner),
        f"{name}_up": (number, width, inner),
        f"{name}_down": (number, inner, width),
    }
