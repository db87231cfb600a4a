"""GGUF metadata of a network: the config as key-value pairs, and errors for what GGUF cannot express."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from smelt.errors import FormatError
from smelt.models.artifact import distinct_tensors, layer_fields, plain_config
from smelt.models.gguf.llama import BLOCK_NAMES, LLAMA3, OUTER_NAMES
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_BIASED = {"qwen2": ("q_proj", "k_proj", "v_proj")}  # the biases that an architecture has in GGUF


def checked_config(model: Model) -> dict[str, Any]:
    """Return the config of a network with its defaults filled in, or raise FormatError if GGUF cannot express it."""
    if model.task != "language":
        raise FormatError(f"GGUF export is for language models, and this is {model.task}; export an encoder to onnx.")
    fields = layer_fields(model.anatomy)
    config = {**plain_config(model.network), **fields}
    model_type = config["model_type"]
    if model_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise FormatError(f"Smelt writes {known} networks as GGUF, not {model_type}; keep the artifact.")
    if "per_layer_config" in fields:
        raise FormatError(
            "the layers of this model have different widths or biases that a repair added, and GGUF is read with one "
            "width for all of them; keep the artifact."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise FormatError(
            f"GGUF's {model_type} has the activation silu, not {config['hidden_act']}; keep the artifact."
        )
    _check_layers(model, model_type)
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["max_position_embeddings"] = _context(config)
    _check_rotary(config["rope_parameters"])
    return config


def differing(config: dict[str, Any], read: PreTrainedConfig) -> list[str]:
    """Return the fields in which a config read from a file differs from the model's; the file has float32 numbers."""
    exact_fields = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "vocab_size", "tie_word_embeddings"),
    )
    mismatched = [name for name in exact_fields if getattr(read, name) != config[name]]
    pairs = [("rms_norm_eps", config["rms_norm_eps"], read.rms_norm_eps)]
    pairs += [(name, config["rope_parameters"].get(name), value) for name, value in read.rope_parameters.items()]
    for name, expected, actual in pairs:
        same = (
            expected == actual if isinstance(expected, str) else bool(np.isclose(expected, actual, rtol=1e-6, atol=0))
        )
        mismatched += [] if same else [name]
    return mismatched


def _check_layers(model: Model, kind: str) -> None:
    for path, layer in quantized_layers(model.network).items():
        if layer.scheme.hadamard:
            raise FormatError(f"{path} rotates its inputs online, which GGUF cannot express; quantize without.")
        if layer.scheme.rank:
            raise FormatError(f"{path} has low-rank factors beside its codes, which GGUF cannot store.")
    known = {*OUTER_NAMES.values()}
    inner = {*BLOCK_NAMES.values()}
    for name in distinct_tensors(model.network):
        path, _, part = name.rpartition(".")
        name_in_block = path.partition("layers.")[2].partition(".")[2]
        if not {name, f"{path}.weight"} & known and name_in_block not in inner:
            raise FormatError(f"GGUF's {kind} has no tensor for {name}; keep the artifact.")
        if part == "bias" and not path.endswith(_BIASED.get(kind, ())):
            raise FormatError(f"GGUF's {kind} is read without the bias {name}; keep the artifact.")


def _context(config: dict[str, Any]) -> int:
    """Return the context length: with a sliding window at most the window, within which attention is the same."""
    longest, window = int(config["max_position_embeddings"]), config.get("sliding_window")
    return longest if window is None or not config.get("use_sliding_window", True) else min(longest, int(window))


def _check_rotary(rotary: dict[str, Any]) -> None:
    rope_type = rotary.get("rope_type")
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise FormatError("this model rotates only a part of each head, which GGUF readers ignore; keep the artifact.")
    known = rope_type in ("default", "linear", "yarn") or (rope_type == "llama3" and LLAMA3.items() <= rotary.items())
    if not known:
        raise FormatError(f"RoPE of type {rope_type!r} with these values cannot be written as GGUF; keep the artifact.")


def network_metadata(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the metadata that describes the network."""
    architecture, rotary = _ARCHITECTURES[config["model_type"]], config["rope_parameters"]
    head_dim = int(config["head_dim"])
    fields = {
        "context_length": int(config["max_position_embeddings"]),
        "embedding_length": int(config["hidden_size"]),
        "block_count": int(config["num_hidden_layers"]),
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": int(config["num_attention_heads"]),
        "attention.head_count_kv": int(config["num_key_value_heads"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rotary["rope_theta"]),
        "vocab_size": int(config["vocab_size"]),
    }
    if rotary["rope_type"] in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rotary["rope_type"], "rope.scaling.factor": float(rotary["factor"])}
    if rotary["rope_type"] == "yarn":
        fields["rope.scaling.original_context_length"] = int(rotary["original_max_position_embeddings"])
    name = source.rstrip("/").rpartition("/")[2] or "model"
    return {
        "general.architecture": architecture,
        "general.name": name,
        **{f"{architecture}.{key}": value for key, value in fields.items()},
    }
