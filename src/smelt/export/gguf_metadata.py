"""GGUF metadata of a network and its tokenizer as key-value pairs, and errors for what GGUF cannot express.

Tokenizers are byte-level BPE (`gpt2`) or SentencePiece BPE with byte fallback (`llama`), the inverse of
`models/gguf/tokenizer.py`. GGUF names the pre-tokenizer but does not contain it, so it is recognized by its output on a
text on which the known ones differ.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from smelt.errors import FormatError
from smelt.models.artifact import layer_fields, plain_config
from smelt.models.gguf.llama import BLOCK_NAMES, LLAMA3, OUTER_NAMES
from smelt.models.gguf.tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, word_splits
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers

GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_BIASED = {"qwen2": ("q_proj", "k_proj", "v_proj")}  # the biases that an architecture has in GGUF
_UNUSED, _BYTE = 5, 6
_PRE_TOKENIZERS = ("smollm", "gpt-2", "qwen2", "llama-bpe")
_NO_TOKENIZER_HINT = "export with --no-tokenizer to leave it out, and keep the original beside the file"

# Digits, contractions in both cases, runs of spaces and newlines, punctuation, non-ASCII letters, a combining accent.
PROBE = (
    "Hello world! It's 12345 o'clock, I'LL see you'd\n\n  two  spaces\tTab \u00fcn\u00efc\u00f6d\u00e9 e\u0301 "
    "\u65e5\u672c\u8a9e \U0001f642 x = a_b[3] // 2.5e-10;\r\nEND   "
)


def validated_config(model: Model) -> dict[str, Any]:
    """Return the config of a network with its defaults filled in, or raise FormatError if GGUF cannot express it."""
    if model.task != "language":
        raise FormatError(f"GGUF export is for language models, and this is {model.task}; export an encoder to onnx.")
    fields = layer_fields(model.anatomy)
    config = {**plain_config(model.network), **fields}
    model_type = config["model_type"]
    if model_type not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
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
    config["max_position_embeddings"] = _context_length(config)
    _check_rope(config["rope_parameters"])
    return config


def mismatched_fields(config: dict[str, Any], read: PreTrainedConfig) -> list[str]:
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


def _check_layers(model: Model, model_type: str) -> None:
    for path, layer in quantized_layers(model.network).items():
        if layer.scheme.hadamard:
            raise FormatError(f"{path} rotates its inputs online, which GGUF cannot express; quantize without.")
        if layer.scheme.rank:
            raise FormatError(f"{path} has low-rank factors beside its codes, which GGUF cannot store.")
    known = {*OUTER_NAMES.values()}
    inner = {*BLOCK_NAMES.values()}
    for name in model.network.state_dict():
        path, _, part = name.rpartition(".")
        name_in_block = path.partition("layers.")[2].partition(".")[2]
        if not {name, f"{path}.weight"} & known and name_in_block not in inner:
            raise FormatError(f"GGUF's {model_type} has no tensor for {name}; keep the artifact.")
        if part == "bias" and not path.endswith(_BIASED.get(model_type, ())):
            raise FormatError(f"GGUF's {model_type} is read without the bias {name}; keep the artifact.")


def _context_length(config: dict[str, Any]) -> int:
    """Return the context length: with a sliding window at most the window, within which attention is the same."""
    longest, window = int(config["max_position_embeddings"]), config.get("sliding_window")
    return longest if window is None or not config.get("use_sliding_window", True) else min(longest, int(window))


def _check_rope(rope: dict[str, Any]) -> None:
    rope_type = rope.get("rope_type")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise FormatError("this model rotates only a part of each head, which GGUF readers ignore; keep the artifact.")
    known = rope_type in ("default", "linear", "yarn") or (rope_type == "llama3" and LLAMA3.items() <= rope.items())
    if not known:
        raise FormatError(f"RoPE of type {rope_type!r} with these values cannot be written as GGUF; keep the artifact.")


def network_metadata(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the metadata that describes the network."""
    architecture, rope = GGUF_ARCHITECTURES[config["model_type"]], config["rope_parameters"]
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
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": int(config["vocab_size"]),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        fields["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    name = source.rstrip("/").rpartition("/")[2] or "model"
    return {
        "general.architecture": architecture,
        "general.name": name,
        **{f"{architecture}.{key}": value for key, value in fields.items()},
    }


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer for a vocabulary of `size`, or raise FormatError if GGUF cannot express it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = json.loads(backend.to_str()) if backend is not None else {}
    model = plain.get("model", {})
    if model.get("type") != "BPE":
        raise FormatError(
            f"GGUF export supports BPE tokenizers, and this one is {model.get('type')}; {_NO_TOKENIZER_HINT}."
        )
    tokens, token_types = _tokens(tokenizer, size, bool(model.get("byte_fallback")))
    shared = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(token_types, dtype=np.int32),
        **_special_tokens(tokenizer),
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    if model.get("byte_fallback"):
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            **shared,
            **_sentencepiece_scores(tokens, merges, backend),
        }
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer_name(backend),
        **shared,
        "tokenizer.ggml.merges": merges,
    }


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int, has_unknown: bool) -> tuple[list[str], list[int]]:
    """Return every token and its type; ids beyond the tokenizer's vocabulary are marked unused."""
    tokens, token_types = [f"[PAD{token_id}]" for token_id in range(size)], [_UNUSED] * size
    added = tokenizer.added_tokens_decoder
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= size:
            raise FormatError(
                f"the tokenizer has a token id {token_id}, and the network only {size}; {_NO_TOKENIZER_HINT}."
            )
        tokens[token_id], token_types[token_id] = token, NORMAL
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            token_types[token_id] = _BYTE
        if token_id in added:
            token_types[token_id] = CONTROL if added[token_id].special else USER_DEFINED
        if has_unknown and token == tokenizer.unk_token:
            token_types[token_id] = UNKNOWN
    return tokens, token_types


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    roles = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
    ids = {role: getattr(tokenizer, name, None) for role, name in roles.items()}
    metadata: dict[str, Any] = {
        f"tokenizer.ggml.{role}_token_id": token_id for role, token_id in ids.items() if token_id is not None
    }
    example = tokenizer("a")["input_ids"]
    metadata["tokenizer.ggml.add_bos_token"] = ids["bos"] is not None and example[0] == ids["bos"]
    metadata["tokenizer.ggml.add_eos_token"] = ids["eos"] is not None and example[-1] == ids["eos"]
    if isinstance(tokenizer.chat_template, str):
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _pre_tokenizer_name(backend: Any) -> str:
    """Return the GGUF name of the tokenizer's pre-tokenizer."""
    words = _words(backend.pre_tokenizer) if backend.pre_tokenizer is not None else []
    for name in _PRE_TOKENIZERS:
        if _words(pre_tokenizers.Sequence(word_splits(name))) == words:
            return name
    raise FormatError(
        f"the tokenizer has a pre-tokenizer for which Smelt knows no name in GGUF (it knows "
        f"{', '.join(_PRE_TOKENIZERS)}); {_NO_TOKENIZER_HINT}."
    )


def _words(pre_tokenizer: Any) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(PROBE)]


def _sentencepiece_scores(tokens: list[str], merges: list[str], backend: Any) -> dict[str, Any]:
    """Return SentencePiece scores, which replace merges: the earlier a token is merged, the higher its score."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    scores = np.array([-float(rank.get(token, 0)) for token in tokens], dtype=np.float32)
    first = backend.encode("a", add_special_tokens=False).tokens[0]
    return {"tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": first.startswith("▁")}
