"""Transformers model of the Noonsight mixture-of-experts family, in plain torch (versions 4.57 and 5 of transformers).

Copied unchanged into every export, so it imports torch, transformers and its sibling only. One document per row:
`attention_mask` marks padding (left or right), which is kept out of attention and of the short convolutions. Cached
decoding needs the convolutions' last inputs beside keys and values; `NoonsightCache` holds both, `generate` makes one
by itself, and any other cache is refused. Beam search and batch repetition work, cropping (assisted decoding) does not.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_noonsight import NoonsightMoeConfig

# Transformers 5.2x renamed the argument; both names are accepted, and outputs use the one this version knows.
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NoonsightCache(DynamicCache):
    """Keys and values of all positions, plus the last `kernel - 1` inputs of every short convolution."""

    def __init__(self):
        super().__init__()
        self.convolutions = {}  # (layer, site) -> [B, kernel-1, C]

    def reset(self):
        super().reset()
        self.convolutions = {}

    def crop(self, *args, **kwargs):
        raise ValueError("NoonsightCache cannot be cropped: earlier inputs of the short convolutions are gone.")

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self._select(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self._select(lambda state: state[indices])

    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)
        self._select(lambda state: state.repeat_interleave(repeats, dim=0))

    def _select(self, function):
        self.convolutions = {place: function(state) for place, state in self.convolutions.items()}


class NoonsightRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32, cast back."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class NoonsightGatedNorm(nn.Module):
    """x * sigmoid(up(silu(down(x)))), after each full-width norm. Rank 0 means: no gate."""

    def __init__(self, config):
        super().__init__()
        self.rank = config.gated_norm_rank
        if self.rank:
            self.down_proj = nn.Linear(config.hidden_size, self.rank, bias=False)
            self.up_proj = nn.Linear(self.rank, config.hidden_size, bias=False)

    def forward(self, x):
        return x * torch.sigmoid(self.up_proj(F.silu(self.down_proj(x)))) if self.rank else x


class NoonsightShortConv(nn.Module):
    """Depthwise causal convolution: out[t] = sum_j weight[j] * x[t-j]; row j of `weight` is the weight of lag j."""

    def __init__(self, config, site, channels, layer_idx):
        super().__init__()
        self.place = (layer_idx, site)
        self.active = config.sconv and site in config.sconv_sites
        if self.active:
            self.weight = nn.Parameter(torch.zeros(config.sconv_kernel, channels))

    def forward(self, x, padding=None, cache=None):
        if not self.active:
            return x
        lags, length = self.weight.shape[0], x.shape[1]
        if padding is not None:
            x = x * padding[:, -length:, None].to(x.dtype)
        before = None if cache is None else cache.convolutions.get(self.place)
        if before is None:
            before = x.new_zeros(x.shape[0], lags - 1, x.shape[2])
        history = torch.cat([before, x], dim=1)
        if cache is not None:
            cache.convolutions[self.place] = history[:, length:]
        weight = self.weight.to(x.dtype)
        return sum(weight[lag] * history[:, lags - 1 - lag : lags - 1 - lag + length] for lag in range(lags))


class NoonsightAttention(nn.Module):
    """Grouped queries, unparametrised QK norm, half RoPE on local layers, exclusive self-attention, head gates.

    Key-value heads are stored for the widest kind of layer; each layer uses the first `local_kv_heads` or
    `global_kv_heads` of them. Local layers see `sliding_window` keys (their own included) and rotate; global layers
    see everything (or `global_window` keys) and have positions only when `rope_on_global`.
    """

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim, self.num_heads = config.head_dim, config.num_attention_heads
        is_local = config.layer_types[layer_idx] == "sliding_attention"
        self.kv_heads = config.local_kv_heads if is_local else config.global_kv_heads
        self.num_key_value_groups = self.num_heads // self.kv_heads
        self.scaling = self.head_dim**-0.5
        self.sliding_window = config.sliding_window if is_local else config.global_window
        self.rotates = is_local or config.rope_on_global
        stored = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, stored, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, stored, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.sconv_k = NoonsightShortConv(config, "k", stored, layer_idx)
        if config.head_gate:
            self.attn_gate = nn.Linear(config.hidden_size, self.num_heads, bias=False)

    def forward(self, hidden_states, rotation, attention_mask, padding=None, cache=None, **kwargs):
        batch, length, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch, length, self.num_heads, self.head_dim)
        key = self.sconv_k(self.k_proj(hidden_states), padding, cache).view(batch, length, -1, self.head_dim)
        value = self.v_proj(hidden_states).view(batch, length, -1, self.head_dim)
        key, value = key[:, :, : self.kv_heads], value[:, :, : self.kv_heads]
        if self.config.qk_norm == "free":
            query, key = _unit_rms(query), _unit_rms(key)
        if self.rotates:
            query, key = _rotate(query, *rotation, self.config), _rotate(key, *rotation, self.config)
        query = query * self.config.qk_mult
        own = value.repeat_interleave(self.num_key_value_groups, dim=2)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = _eager_attention
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, sliding_window=self.sliding_window,
            dropout=0.0, **kwargs,
        )  # fmt: skip
        mixed = mixed.reshape(batch, length, self.num_heads, self.head_dim)
        if self.config.attention_mode == "exclusive":
            overlap = (mixed * own).sum(-1, keepdim=True) / (own.pow(2).sum(-1, keepdim=True) + 1e-6)
            mixed = mixed - own * overlap
        if self.config.head_gate:
            mixed = mixed * (2 * torch.sigmoid(self.attn_gate(hidden_states)))[..., None]
        return self.o_proj(mixed.reshape(batch, length, -1)), weights


class NoonsightMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.shared_expert_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.shared_expert_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.shared_expert_intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class NoonsightRouter(nn.Module):
    """The bias chooses the experts, the unbiased sigmoids weigh them; weights sum to `router_combine_sum`."""

    def __init__(self, config):
        super().__init__()
        self.top_k, self.combine_sum = config.num_experts_per_tok, config.router_combine_sum
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)

    def forward(self, x):
        logits = F.linear(x.float(), self.weight.float())
        chosen = torch.topk(logits + self.bias.float(), self.top_k, dim=-1).indices
        weights = torch.sigmoid(logits.gather(-1, chosen))
        return chosen, weights * (self.combine_sum / (weights.sum(-1, keepdim=True) + 1e-9))


class NoonsightExperts(nn.Module):
    """Expert weights as two 3-D tensors; every routed token is computed, none is dropped."""

    def __init__(self, config):
        super().__init__()
        width = config.latent_dim or config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.zeros(config.num_experts, 2 * config.moe_intermediate_size, width))
        self.down_proj = nn.Parameter(torch.zeros(config.num_experts, width, config.moe_intermediate_size))

    def forward(self, x, top_k_index, top_k_weights):
        """x [T, Z], ids and weights [T, k] -> [T, Z]; sums in float32."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.down_proj[expert])
            total.index_add_(0, token, out.float() * top_k_weights[token, slot, None])
        return total.to(x.dtype)


class NoonsightMoE(nn.Module):
    """Router at full width; experts in a latent width between a down- and an up-projection (latent_dim 0: none)."""

    def __init__(self, config):
        super().__init__()
        self.router = NoonsightRouter(config)
        self.experts = NoonsightExperts(config)
        self.latent_dim = config.latent_dim
        if self.latent_dim:
            self.latent_down_proj = nn.Linear(config.hidden_size, self.latent_dim, bias=False)
            self.latent_norm = NoonsightRMSNorm(self.latent_dim, config.rms_norm_eps)
            self.latent_up_proj = nn.Linear(self.latent_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen, weights = self.router(flat)
        if not self.latent_dim:
            return self.experts(flat, chosen, weights).view(hidden_states.shape)
        latent = self.latent_norm(self.latent_down_proj(flat))
        return self.latent_up_proj(self.experts(latent, chosen, weights)).view(hidden_states.shape)


class NoonsightDecoderLayer(nn.Module):
    """Attention and experts, each behind norm, gate and short convolution. Shared experts stand beside `mlp`."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = NoonsightRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_gated_norm = NoonsightGatedNorm(config)
        self.self_attn = NoonsightAttention(config, layer_idx)
        self.sconv_attn = NoonsightShortConv(config, "attn", config.hidden_size, layer_idx)
        self.post_attention_layernorm = NoonsightRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_gated_norm = NoonsightGatedNorm(config)
        self.mlp = NoonsightMoE(config)
        if config.num_shared_experts == 1:
            self.shared_expert = NoonsightMLP(config)
        elif config.num_shared_experts > 1:
            self.shared_experts = nn.ModuleList(NoonsightMLP(config) for _ in range(config.num_shared_experts))
        self.sconv_moe = NoonsightShortConv(config, "moe", config.hidden_size, layer_idx)

    def forward(self, hidden_states, rotation, attention_mask, padding=None, cache=None, **kwargs):
        x = self.attn_gated_norm(self.input_layernorm(hidden_states))
        x, _ = self.self_attn(x, rotation, attention_mask, padding, cache, **kwargs)
        hidden_states = hidden_states + self.sconv_attn(x, padding, cache)
        x = self.mlp_gated_norm(self.post_attention_layernorm(hidden_states))
        out = self.mlp(x)
        for shared in self._shared():
            out = out + shared(x)
        return hidden_states + self.sconv_moe(out, padding, cache)

    def _shared(self):
        return [self.shared_expert] if hasattr(self, "shared_expert") else getattr(self, "shared_experts", ())


class NoonsightMoePreTrainedModel(PreTrainedModel):
    """What all classes of this family tell transformers about themselves."""

    config_class = NoonsightMoeConfig
    base_model_prefix = "model"
    _no_split_modules = ("NoonsightDecoderLayer",)
    _supports_attention_backend = True
    _supports_sdpa = True

    def post_init(self):
        """Router and gains stay float32 when the model is loaded in bfloat16, as they are in training.

        All but the final gain: the names are matched as substrings, and `norm` is one of `attn_gated_norm`, too.
        """
        precise = {"router", "input_layernorm", "post_attention_layernorm", "embed_norm", "latent_norm"}
        present = {name.rsplit(".", 1)[-1] for name, _ in self.named_modules()}
        self._keep_in_fp32_modules_strict = sorted(precise & present)
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """Normal(0, initializer_range) everywhere; gains 1, router bias and head gates 0, convolutions identity."""
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, NoonsightRMSNorm):
                weight.fill_(1.0)
            elif isinstance(module, NoonsightShortConv):
                weight.zero_()[0] = 1.0
            elif name == "bias":
                weight.zero_()
            else:
                weight.normal_(0.0, self.config.initializer_range)
        if isinstance(module, NoonsightAttention) and self.config.head_gate:
            module.attn_gate.weight.zero_()


class NoonsightMoeModel(NoonsightMoePreTrainedModel):
    """Embedding, layers, final norm."""

    def __init__(self, config):
        super().__init__(config)
        for field in ("sconv", "latent_dim"):
            if config._attn_implementation == "vllm" and getattr(config, field):
                raise ValueError(f"vLLM's Transformers backend cannot carry {field}={getattr(config, field)!r}.")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.gated_norm_rank:  # without gated norms the embedding is not normed at all
            self.embed_norm = NoonsightRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.embed_gated_norm = NoonsightGatedNorm(config)
        self.layers = nn.ModuleList(NoonsightDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = NoonsightRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.final_gated_norm = NoonsightGatedNorm(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        use_cache=None, cache=None, output_hidden_states=False, **kwargs,
    ):  # fmt: skip
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = _checked_cache(past_key_values if cache is None else cache, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        masks, padding = attention_mask, None
        if not isinstance(attention_mask, dict):
            padding = attention_mask
            masks = {
                "full_attention": _mask(x, past, padding, self.config.global_window),
                "sliding_attention": _mask(x, past, padding, self.config.sliding_window),
            }
        rotation = _angles(position_ids, self.config, x.dtype)
        kwargs.pop("return_dict", None)
        if self.config.gated_norm_rank:
            x = self.embed_gated_norm(self.embed_norm(x))
        states = [x]
        for kind, layer in zip(self.config.layer_types, self.layers):
            x = layer(x, rotation, masks[kind], padding, cache, **kwargs)
            states.append(x)
        x = self.final_gated_norm(self.norm(x))
        hidden = (*states[:-1], x) if output_hidden_states else None
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=hidden, **{CACHE_FIELD: cache})


class NoonsightMoeForCausalLM(NoonsightMoePreTrainedModel, GenerationMixin):
    """The model with its untied output matrix."""

    def __init__(self, config):
        super().__init__(config)
        self.model = NoonsightMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args, **kwargs):
        """As in transformers; makes the cache that also holds the state of the short convolutions."""
        given = {"cache", "past_key_values"} & {name for name, value in kwargs.items() if value is not None}
        if not given and kwargs.get("use_cache", True) is not False:
            kwargs[CACHE_FIELD] = NoonsightCache()
        return super().generate(*args, **kwargs)

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
        kwargs.pop("return_dict", None)
        output = self.model(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=output.hidden_states, **{CACHE_FIELD: getattr(output, CACHE_FIELD)}
        )


def _checked_cache(cache, use_cache):
    if cache is None:
        return NoonsightCache() if use_cache else None
    if not isinstance(cache, NoonsightCache):
        raise ValueError(f"{type(cache).__name__} has no room for the short convolutions; pass a NoonsightCache.")
    return cache


def _unit_rms(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _angles(position_ids, config, dtype):
    """cos and sin [B, S, 1, pairs]. In float64: at position 4095 a float32 angle is already off by 2e-4."""
    pairs = round(config.head_dim * config.rope_fraction) // 2
    inverse = config.rope_theta ** (-torch.arange(pairs, device=position_ids.device, dtype=torch.float64) / pairs)
    angle = position_ids[..., None].double() * inverse
    return angle.cos().to(dtype)[:, :, None], angle.sin().to(dtype)[:, :, None]


def _rotate(x, cos, sin, config):
    """Turn pairs of the first dims of each head: adjacent dims (2p, 2p+1) when `rope_fused`, else (p, p + pairs)."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if config.rope_fused:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def _mask(x, past, padding, window):
    """Additive mask [B or 1, 1, S, past + S]: 0 where key s <= query t (and t - s < window, and s is no padding)."""
    query = torch.arange(past, past + x.shape[1], device=x.device)[:, None]
    key = torch.arange(past + x.shape[1], device=x.device)[None]
    visible = key <= query
    if window is not None:
        visible = visible & (query - key < window)
    visible = visible[None, None]
    if padding is not None:
        visible = visible & padding[:, None, None, : key.shape[1]].bool()
    return torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill(~visible, torch.finfo(x.dtype).min)


def _eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
