"""A checkpoint as a Hugging Face folder, and back: the public form of a model.

`export_model` writes safetensors parts tensor by tensor, a config.json in which no field that changes the function is
left to a default, the tokenizer, the two modelling files and a digest of everything. `import_model` is its inverse, bit
for bit in the stored dtype. Names are those of Marin's published models; linear maps are stored as torch has them,
(out, in); convolution taps stay [lag, channel].

Invariant: the stored router bias is the one the next training step would use. A balanced model trains with a pending
quantile that becomes the bias one step later; a folder that forgot it would be a slightly older, unbalanced model
(Marin, issues #9352 and #9039). The quantile itself is kept beside, in `training_state.safetensors`, so that import
gives back the exact training state.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save

from noonsight.model.config import ModelConfig
from noonsight.model.moe import effective_bias
from noonsight.model.params import Params, shapes
from noonsight.serve.schema import config_of, describe
from noonsight.tokens import tokenizer as tokenizers

PART_BYTES = 2 << 30
MODELLING_FILES = ("configuration_noonsight.py", "modeling_noonsight.py")
DTYPES = {"float32": ("F32", np.dtype(np.float32)), "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16))}
PRECISE = ("norm", "sconv", "router_bias")  # leaves with this in their name are stored in float32, as they are trained

# Our leaf -> published name. `{i}` is the layer, `{j}` the shared expert. The marks: "" as it is, "T" transposed.
OUTSIDE = {
    "embed": ("model.embed_tokens.weight", ""),
    "embed_norm": ("model.embed_norm.weight", ""),
    "embed_gate.down": ("model.embed_gated_norm.down_proj.weight", "T"),
    "embed_gate.up": ("model.embed_gated_norm.up_proj.weight", "T"),
    "final_norm": ("model.norm.weight", ""),
    "final_gate.down": ("model.final_gated_norm.down_proj.weight", "T"),
    "final_gate.up": ("model.final_gated_norm.up_proj.weight", "T"),
    "head": ("lm_head.weight", "T"),
}
INSIDE = {
    "attn_norm": ("input_layernorm.weight", ""),
    "attn_gate.down": ("attn_gated_norm.down_proj.weight", "T"),
    "attn_gate.up": ("attn_gated_norm.up_proj.weight", "T"),
    "wq": ("self_attn.q_proj.weight", "T"),
    "wk": ("self_attn.k_proj.weight", "T"),
    "wv": ("self_attn.v_proj.weight", "T"),
    "wo": ("self_attn.o_proj.weight", "T"),
    "head_gate": ("self_attn.attn_gate.weight", "T"),
    "sconv_k": ("self_attn.sconv_k.weight", ""),
    "sconv_attn": ("sconv_attn.weight", ""),
    "sconv_moe": ("sconv_moe.weight", ""),
    "moe_norm": ("post_attention_layernorm.weight", ""),
    "moe_gate.down": ("mlp_gated_norm.down_proj.weight", "T"),
    "moe_gate.up": ("mlp_gated_norm.up_proj.weight", "T"),
    "router": ("mlp.router.weight", "T"),
    "router_bias": ("mlp.router.bias", ""),
    "latent_down": ("mlp.latent_down_proj.weight", "T"),
    "latent_norm": ("mlp.latent_norm.weight", ""),
    "latent_up": ("mlp.latent_up_proj.weight", "T"),
    "expert_gate": ("mlp.experts.gate_up_proj", "T first half"),
    "expert_up": ("mlp.experts.gate_up_proj", "T second half"),
    "expert_down": ("mlp.experts.down_proj", "T"),
    "shared_gate": ("{shared}.gate_proj.weight", "T"),
    "shared_up": ("{shared}.up_proj.weight", "T"),
    "shared_down": ("{shared}.down_proj.weight", "T"),
}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One stored tensor and where it comes from: `sources` are (leaf, index into it), joined along the rows."""

    name: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    transposed: bool
    shape: tuple[int, ...]  # as stored
    dtype: str  # of DTYPES

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPES[self.dtype][1].itemsize


def export_model(
    params: Params,
    extra: dict[str, Any],
    config: ModelConfig,
    tokenizer_path: Path,
    out: Path,
    *,
    dtype: str = "float32",
    part_bytes: int = PART_BYTES,
) -> dict[str, Any]:
    """Write the folder `out` and return its facts (digests, counts, bytes).

    `params` and `extra` as the model room has them (any array type); one tensor at a time is brought to the host.
    Raises ValueError for a config that this form cannot express, a tokenizer larger than the vocabulary, a dtype that
    is not in DTYPES, or a tensor whose shape is not the config's.
    """
    if dtype not in DTYPES:
        raise ValueError(f"export dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    tokenizer = tokenizers.load(tokenizer_path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{tokenizer_path}: {tokenizer.vocab_size} tokens, but the model's vocab_size is {config.vocab_size}; "
            "this is not the tokenizer the model was trained with."
        )
    described = describe(config, dtype=dtype, eos=tokenizer.eos)
    out.mkdir(parents=True, exist_ok=True)
    tree = {**_leaves(params), **_effective(params, extra)}
    tensors = list(_tensors(config, dtype))
    parts = _write_parts(tree, tensors, out, part_bytes)
    if "pending_beta" in extra:
        state = save({"pending_beta": np.asarray(extra["pending_beta"])})
        (out / "training_state.safetensors").write_bytes(state)
    _write_json(out / "config.json", described)
    _write_json(out / "generation_config.json", {"eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.eos})
    _write_tokenizer(tokenizer_path, config, out)
    for name in MODELLING_FILES:
        shutil.copyfile(Path(__file__).with_name(name), out / name)
    digest = write_digest(out)
    return {
        "digest": digest,
        "tokenizer_digest": tokenizer.digest,
        "dtype": dtype,
        "num_parts": parts,
        "num_tensors": len(tensors),
        "num_parameters": sum(int(np.prod(tensor.shape)) for tensor in tensors),
        "num_bytes": sum(tensor.num_bytes for tensor in tensors),
    }


def import_model(folder: Path) -> tuple[Params, dict[str, NDArray], ModelConfig]:
    """Read an exported folder: (params, extra, config), NumPy leaves in the stored dtype, router bias as stored.

    `extra["pending_beta"]` is the training run's own when the folder carries it, else minus the bias, so that the next
    training step starts from the same bias. Raises ValueError, naming the file, field or tensor, when a file differs
    from its digest, the config has an unknown or a missing field, or a tensor is missing, unexpected or misshapen.
    """
    check_digest(folder)
    described = _read_json(folder / "config.json")
    config = config_of(described)
    tensors = list(_tensors(config, described["dtype"]))
    leaves = _read_parts(folder, tensors, config)
    extra: dict[str, NDArray] = {}
    if config.is_moe and config.balance != "none":
        extra["pending_beta"] = _pending(folder, leaves["layers.router_bias"])
    params = jax.tree.map_with_path(lambda path, _: leaves[_dotted(path)], shapes(config), is_leaf=_is_shape)
    return params, extra, config


def stored_dtype(folder: Path) -> str:
    """The dtype of the folder's matrices, of DTYPES."""
    return _read_json(folder / "config.json")["dtype"]


def write_digest(folder: Path) -> str:
    """Write digest.json: SHA-256 of every file and of the sorted list of them. Returns the latter."""
    files = _hashes(folder)
    tree = _tree_hash(files)
    _write_json(folder / "digest.json", {"schema": 1, "tree": tree, "files": files})
    return tree


def check_digest(folder: Path) -> str:
    """The folder's digest, after hashing every file again. Raises ValueError naming the files that differ."""
    if not (folder / "digest.json").is_file():
        raise ValueError(f"{folder}: no digest.json; this is no finished export. Export again.")
    recorded = _read_json(folder / "digest.json")
    found = _hashes(folder)
    names = sorted(recorded["files"].keys() | found.keys())
    wrong = [name for name in names if recorded["files"].get(name) != found.get(name)]
    if wrong:
        raise ValueError(f"{folder}: differs from its digest in {', '.join(wrong)}; the copy is damaged or was edited.")
    return _tree_hash(found)


def _tensors(config: ModelConfig, dtype: str) -> Iterator[Tensor]:
    """Every stored tensor in the order of the files: outside the stack first, then layer by layer."""
    ours = _leaves(shapes(config))
    for leaf, (name, mark) in OUTSIDE.items():
        if leaf in ours:
            yield _tensor(name, [(leaf, ())], mark, ours[leaf], leaf, dtype)
    for i in range(config.num_layers):
        for short, (name, mark) in INSIDE.items():
            leaf = f"layers.{short}"
            if leaf not in ours or short == "expert_up":
                continue
            prefix = f"model.layers.{i}."
            if "{shared}" not in name:
                sources = [(leaf, (i,)), ("layers.expert_up", (i,))] if short == "expert_gate" else [(leaf, (i,))]
                yield _tensor(prefix + name, sources, mark, ours[leaf][1:], short, dtype)
                continue
            for j in range(config.num_shared_experts):
                shared = "shared_expert" if config.num_shared_experts == 1 else f"shared_experts.{j}"
                yield _tensor(prefix + name.format(shared=shared), [(leaf, (i, j))], mark, ours[leaf][2:], short, dtype)


def _tensor(
    name: str, sources: list[tuple[str, tuple[int, ...]]], mark: str, shape: tuple[int, ...], leaf: str, dtype: str
) -> Tensor:
    transposed = mark.startswith("T")
    if transposed:
        *lead, rows, columns = shape
        shape = (*lead, columns * len(sources), rows)
    precise = any(word in leaf for word in PRECISE)
    stored = "float32" if precise else dtype
    return Tensor(name=name, sources=tuple(sources), transposed=transposed, shape=shape, dtype=stored)


def _write_parts(tree: dict[str, Any], tensors: list[Tensor], out: Path, part_bytes: int) -> int:
    """Stream the tensors into parts of at most `part_bytes` (a larger tensor gets its own). Returns their number."""
    parts: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if parts[-1] and sum(other.num_bytes for other in parts[-1]) + tensor.num_bytes > part_bytes:
            parts.append([])
        parts[-1].append(tensor)
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write_part(tree, part, out / name)
        weight_map |= {tensor.name: name for tensor in part}
    total = sum(tensor.num_bytes for tensor in tensors)
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(parts)


def _write_part(tree: dict[str, Any], part: list[Tensor], path: Path) -> None:
    """The safetensors form: length of the header, JSON header, then the bytes, one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in part:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": DTYPES[tensor.dtype][0], "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in part:
            pieces = [_stored(tree[leaf], index, tensor) for leaf, index in tensor.sources]
            array = np.concatenate(pieces, axis=-2) if len(pieces) > 1 else pieces[0]
            if array.shape != tensor.shape:
                raise ValueError(
                    f"{tensor.name}: the parameters have shape {array.shape}, the config says {tensor.shape}."
                )
            file.write(np.ascontiguousarray(array).tobytes())


def _stored(leaf: Any, index: tuple[int, ...], tensor: Tensor) -> NDArray:
    array = np.asarray(leaf[index] if index else leaf).astype(DTYPES[tensor.dtype][1])
    return array.swapaxes(-1, -2) if tensor.transposed else array


def _read_parts(folder: Path, tensors: list[Tensor], config: ModelConfig) -> dict[str, NDArray]:
    """Leaves of our tree, filled tensor by tensor. Complete both ways: nothing missing, nothing unexpected."""
    weight_map = _read_json(folder / "model.safetensors.index.json")["weight_map"]
    expected = {tensor.name for tensor in tensors}
    present = {}
    for part in sorted(set(weight_map.values())):
        with safe_open(folder / part, "numpy") as file:
            present |= dict.fromkeys(file.keys(), part)
    missing, unexpected = sorted(expected - present.keys()), sorted(present.keys() - expected)
    if missing or unexpected or present != weight_map:
        raise ValueError(
            f"{folder}: missing tensors {missing[:5]} ({len(missing)}), unexpected {unexpected[:5]} "
            f"({len(unexpected)}), index {'agrees' if present == weight_map else 'disagrees'} with the parts; "
            "the folder is incomplete or belongs to another config."
        )
    ours = _leaves(shapes(config))
    leaves: dict[str, NDArray] = {}
    for tensor in tensors:
        with safe_open(folder / present[tensor.name], "numpy") as file:
            array = file.get_tensor(tensor.name)
        wanted = DTYPES[tensor.dtype][1]
        if array.shape != tensor.shape or array.dtype != wanted:
            raise ValueError(
                f"{folder}: {tensor.name} is {array.dtype}{list(array.shape)}, "
                f"the config says {wanted}{list(tensor.shape)}."
            )
        pieces = [array] if len(tensor.sources) == 1 else np.split(array, len(tensor.sources), axis=-2)
        for (leaf, index), piece in zip(tensor.sources, pieces):
            target = leaves.setdefault(leaf, np.empty(ours[leaf], wanted))
            target[index] = piece.swapaxes(-1, -2) if tensor.transposed else piece
    return leaves


def _effective(params: Params, extra: dict[str, Any]) -> dict[str, NDArray]:
    """The router bias to store, as `model.ready.prepare` applies it: the pending quantile's, else the leaf's."""
    if "pending_beta" not in extra:
        return {}
    return {"layers.router_bias": np.asarray(effective_bias(np.asarray(extra["pending_beta"], np.float32)))}


def _pending(folder: Path, bias: NDArray) -> NDArray:
    path = folder / "training_state.safetensors"
    if not path.is_file():
        return -bias
    pending = load_file(path)["pending_beta"]
    if not np.allclose(np.asarray(effective_bias(pending)), bias, rtol=0, atol=1e-5):
        raise ValueError(
            f"{path}: its pending quantile does not give the stored router bias; delete it to use the bias."
        )
    return pending


def _leaves(tree: Params) -> dict[str, Any]:
    """The tree, flat: {"layers.attn_gate.down": leaf}, without the components that are switched off."""
    flat, _ = jax.tree.flatten_with_path(tree, is_leaf=_is_shape)
    return {_dotted(path): leaf for path, leaf in flat}


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(key.name for key in path)


def _write_tokenizer(tokenizer_path: Path, config: ModelConfig, out: Path) -> None:
    """The tokenizer file, and what transformers must know: nothing is added, control tokens are never parsed."""
    file = tokenizer_path / "tokenizer.json" if tokenizer_path.is_dir() else tokenizer_path
    shutil.copyfile(file, out / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizers.END,
        "pad_token": tokenizers.END,
        "model_max_length": config.sequence_length,
        "add_bos_token": False,
        "add_eos_token": False,
        "split_special_tokens": True,  # the text "<|end|>" is text
        "clean_up_tokenization_spaces": False,
    }
    _write_json(out / "tokenizer_config.json", settings)


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "digest.json")
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in files if "__pycache__" not in path.parts}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tree_hash(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes(json.dumps(value, indent=2, sort_keys=True).encode() + b"\n")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; this is no complete export.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no valid JSON ({error}); the copy is damaged.") from None
