"""What GGUF says of a network besides its tensors: the config as pairs, and the refusal of what has no key."""

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
    """The config of a network that GGUF can express, with what it leaves open filled in."""
    if model.task != "language":
        raise FormatError(f"GGUF is for language models here, and this is {model.task}; an encoder goes to onnx.")
    fields = layer_fields(model.anatomy)
    config = {**plain_config(model.network), **fields}
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise FormatError(f"Smelt writes {known} networks as GGUF, not {kind}; keep the artifact.")
    if "per_layer_config" in fields:
        raise FormatError(
            "the layers of this model have different widths or biases that a repair added, and GGUF is read with one "
            "width for all of them; keep the artifact."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise FormatError(f"GGUF's {kind} has the activation silu, not {config['hidden_act']}; keep the artifact.")
    _check_layers(model, kind)
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["max_position_embeddings"] = _context(config)
    _check_rotary(config["rope_parameters"])
    return config


def differing(config: dict[str, Any], read: PreTrainedConfig) -> list[str]:
    """The fields in which a config read from a file differs from that of the model; the file has float32 numbers."""
    whole = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "vocab_size", "tie_word_embeddings"),
    )
    wrong = [name for name in whole if getattr(read, name) != config[name]]
    pairs = [("rms_norm_eps", config["rms_norm_eps"], read.rms_norm_eps)]
    pairs += [(name, config["rope_parameters"].get(name), value) for name, value in read.rope_parameters.items()]
    for name, mine, other in pairs:
        same = mine == other if isinstance(mine, str) else bool(np.isclose(mine, other, rtol=1e-6, atol=0))
        wrong += [] if same else [name]
    return wrong


def _check_layers(model: Model, kind: str) -> None:
    for path, layer in quantized_layers(model.network).items():
        if layer.scheme.hadamard:
            raise FormatError(f"{path} rotates its inputs while it runs, which GGUF has no word for; quantize without.")
        if layer.scheme.rank:
            raise FormatError(f"{path} has low-rank factors beside its codes, for which GGUF has no place.")
    known = {*OUTER_NAMES.values()}
    inner = {*BLOCK_NAMES.values()}
    for name in distinct_tensors(model.network):
        path, _, part = name.rpartition(".")
        place = path.partition("layers.")[2].partition(".")[2]
        if not {name, f"{path}.weight"} & known and place not in inner:
            raise FormatError(f"GGUF's {kind} has no tensor for {name}; keep the artifact.")
        if part == "bias" and not path.endswith(_BIASED.get(kind, ())):
            raise FormatError(f"GGUF's {kind} is read without the bias {name}; keep the artifact.")


def _context(config: dict[str, Any]) -> int:
    """Within a sliding window attention is the same as without one, so the window is the context."""
    longest, window = int(config["max_position_embeddings"]), config.get("sliding_window")
    return longest if window is None or not config.get("use_sliding_window", True) else min(longest, int(window))


def _check_rotary(rotary: dict[str, Any]) -> None:
    kind = rotary.get("rope_type")
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise FormatError("only a part of each head is rotated, which GGUF is not read with here; keep the artifact.")
    known = kind in ("default", "linear", "yarn") or (kind == "llama3" and LLAMA3.items() <= rotary.items())
    if not known:
        raise FormatError(f"rotary positions of the kind {kind!r} with these values have no place in GGUF here.")


def network_metadata(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The pairs that describe the network."""
    kind, rotary = _ARCHITECTURES[config["model_type"]], config["rope_parameters"]
    head_dim = int(config["head_dim"])
    own = {
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
        own |= {"rope.scaling.type": rotary["rope_type"], "rope.scaling.factor": float(rotary["factor"])}
    if rotary["rope_type"] == "yarn":
        own["rope.scaling.original_context_length"] = int(rotary["original_max_position_embeddings"])
    name = source.rstrip("/").rpartition("/")[2] or "model"
    return {
        "general.architecture": kind,
        "general.name": name,
        **{f"{kind}.{key}": value for key, value in own.items()},
    }
