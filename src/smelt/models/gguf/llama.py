"""Convert GGUF metadata and tensors of Llama-like networks to transformers' config and names.

These are llama, qwen2, qwen3 and gemma3, the last one as its text model (`gemma3_text`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from smelt.errors import ModelError
from smelt.models.config import config_from
from smelt.models.gguf.blocks import Floats
from smelt.models.gguf.reader import GgufFile

Number = TypeVar("Number", bound=np.generic)

GEMMA3 = "gemma3"
_CLASS_OF_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    GEMMA3: "Gemma3ForCausalLM",
}

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_BLOCK_NAMES = {
    **BLOCK_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3_LAYERS_OF_27B = 62  # the one size whose attention scale is not that of its head dimension
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"

# Llama 3.x files contain only the factors; these published constants are the same for all of them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """Build the transformers config from the file's metadata and tensors."""
    architecture = _architecture(file)
    heads = _positive_int(file, f"{architecture}.attention.head_count")
    width = _positive_int(file, f"{architecture}.embedding_length")
    head_dim = _positive_int(file, f"{architecture}.attention.key_length", default=width // heads)
    values = {
        "model_type": architecture,
        "architectures": [_CLASS_OF_ARCHITECTURE[architecture]],
        "hidden_size": width,
        "intermediate_size": _positive_int(file, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": _positive_int(file, f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _positive_int(file, f"{architecture}.attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": _positive_int(file, f"{architecture}.context_length"),
        "rms_norm_eps": _positive_float(file, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary_size(file),
        "tie_word_embeddings": "output.weight" not in file.entries,
        "rope_parameters": _rope_parameters(file, architecture, head_dim),
        **_special_tokens(file),
    }
    return config_from({**values, **_gemma3_values(file, values)}, str(file.path))


def _gemma3_values(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config that only Gemma 3 has: two rotary embeddings, windows, the attention scale."""
    if _architecture(file) != GEMMA3:
        return {}
    local_theta = _positive_float(file, f"{GEMMA3}.rope.freq_base_swa", default=10000.0)
    mean_head = values["hidden_size"] // values["num_attention_heads"]
    is_27b = values["num_hidden_layers"] == _GEMMA3_LAYERS_OF_27B
    return {
        "model_type": "gemma3_text",
        "sliding_window": _positive_int(file, f"{GEMMA3}.attention.sliding_window"),
        "query_pre_attn_scalar": mean_head if is_27b else values["head_dim"],
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_theta": local_theta, "rope_type": "default"},
        },
    }


def gguf_shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its transformers name."""
    return {name: file.entries[source].shape for source, name in gguf_names(file)}


def gguf_tensors(file: GgufFile, config: PreTrainedConfig, exclude: Container[str] = ()) -> dict[str, Tensor]:
    """Return the tensors, dequantized to float32, by their transformers names."""
    return {
        name: torch.from_numpy(to_transformers_order(_norm_offset(file, name, file.tensor(source)), name, file, config))
        for source, name in gguf_names(file)
        if name not in exclude
    }


def _norm_offset(file: GgufFile, name: str, weights: Floats) -> Floats:
    """Subtract what llama.cpp adds: the norms of Gemma 3 multiply by 1 + weight, and GGUF stores the sum."""
    return weights - 1 if _architecture(file) == GEMMA3 and name.endswith("norm.weight") else weights


def to_transformers_order(
    rows: NDArray[Number], name: str, file: GgufFile, config: PreTrainedConfig
) -> NDArray[Number]:
    """Reorder the rows of a tensor (or per-row data) from GGUF's order to transformers'."""
    if _architecture(file) == "llama" and ".q_proj." in name:
        rows = _deinterleave_rope(rows, config.num_attention_heads)
    if _architecture(file) == "llama" and ".k_proj." in name:
        rows = _deinterleave_rope(rows, config.num_key_value_heads)
    return np.ascontiguousarray(rows)


def gguf_names(file: GgufFile) -> Iterator[tuple[str, str]]:
    """Yield each tensor's name in the file and in transformers."""
    block_names = GEMMA3_BLOCK_NAMES if _architecture(file) == GEMMA3 else BLOCK_NAMES
    for source in file.entries:
        match = _BLOCK.fullmatch(source)
        if source in OUTER_NAMES:
            yield source, OUTER_NAMES[source]
        elif match and match[2] in block_names:
            yield source, f"model.layers.{int(match[1])}.{block_names[match[2]]}.{match[3]}"
        elif source != ROPE_FACTORS:
            raise ModelError(f"{file.path} holds the tensor {source!r:.80}, which Smelt does not support.")


def _deinterleave_rope(weights: NDArray[Number], heads: int) -> NDArray[Number]:
    """Reorder the rows of q or k from interleaved RoPE pairs to two halves per head."""
    if len(weights) % (2 * heads):
        return weights  # wrong shape: the comparison with the config reports it
    paired = weights.reshape(heads, -1, 2, *weights.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return paired.swapaxes(1, 2).reshape(weights.shape)


def _architecture(file: GgufFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _CLASS_OF_ARCHITECTURE:
        known = ", ".join(_CLASS_OF_ARCHITECTURE)
        raise ModelError(f"{file.path} has the architecture {architecture!r:.80}; Smelt reads {known} from GGUF.")
    return architecture


def _vocabulary_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.entries:
        raise ModelError(f"{file.path} has no token_embd.weight; a split GGUF must be joined into one file first.")
    return file.entries["token_embd.weight"].shape[0]


def _special_tokens(file: GgufFile) -> dict[str, int]:
    """Return the ids of the special tokens that the file gives and that exist."""
    sources = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {field: file.metadata.get(f"tokenizer.ggml.{source}_token_id") for field, source in sources.items()}
    size = _vocabulary_size(file)
    return {field: number for field, number in ids.items() if type(number) is int and 0 <= number < size}


def _rope_parameters(file: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    if _positive_int(file, f"{architecture}.rope.dimension_count", default=head_dim) != head_dim:
        raise ModelError(f"{file.path} applies RoPE to only a part of each head, which Smelt does not read from GGUF.")
    theta = _positive_float(file, f"{architecture}.rope.freq_base", default=10000.0)
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.entries:
        return {"rope_theta": theta, **_llama3_scaling(file, theta, head_dim)}
    if scaling == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    factor = _positive_float(file, f"{architecture}.rope.scaling.factor")
    if scaling == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        original = _positive_int(file, f"{architecture}.rope.scaling.original_context_length")
        return {
            "rope_theta": theta,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ModelError(f"{file.path} has the RoPE scaling {scaling!r:.40}, which Smelt does not support.")


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Infer Llama 3's RoPE scaling from the factors in the file; raise unless it reproduces them."""
    factors = file.tensor(ROPE_FACTORS).ravel()
    factor = float(factors.max())
    expected = llama3_factors(factor, theta, head_dim) if factor > 0 else None
    if expected is None or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{file.path} has rotary factors that Smelt does not support.")
    return {"rope_type": "llama3", "factor": round(factor, 3), **LLAMA3}


def llama3_factors(factor: float, theta: float, head_dim: int) -> Floats:
    """Return Llama 3's divisor of each RoPE frequency: 1 for short wavelengths, `factor` for long, a ramp between."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    weight = np.clip((LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    factors: Floats = (1 / ((1 - weight) / factor + weight)).astype(np.float32)
    return factors


def _positive_int(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or value < 1:
        raise ModelError(f"{file.path} has {key} = {value!r:.40}; a positive whole number is expected.")
    return value


def _positive_float(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    # The file stores a float32; its shortest decimal is the original value (1e-05, not 9.999999747378752e-06).
    number = float(str(np.float32(value))) if isinstance(value, float) else math.nan
    if not 0 < number < math.inf:
        raise ModelError(f"{file.path} has {key} = {value!r:.40}; a positive number is expected.")
    return number
