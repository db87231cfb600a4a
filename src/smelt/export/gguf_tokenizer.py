"""Fast tokenizers as GGUF metadata: byte-level BPE (`gpt2`) or SentencePiece BPE with byte fallback (`llama`).

The inverse of `models/gguf/tokenizer.py`. GGUF names the pre-tokenizer but does not contain it, so it is recognized by
its output on a text on which the known ones differ.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from smelt.errors import FormatError
from smelt.models.gguf.tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, word_splits

_UNUSED, _BYTE = 5, 6
_RULES = ("smollm", "gpt-2", "qwen2", "llama-bpe")
_INSTEAD = "export with --no-tokenizer to leave it out, and keep the original beside the file"

# Digits, contractions in both cases, runs of spaces and newlines, punctuation, non-ASCII letters, a combining accent.
PROBE = (
    "Hello world! It's 12345 o'clock, I'LL see you'd\n\n  two  spaces\tTab \u00fcn\u00efc\u00f6d\u00e9 e\u0301 "
    "\u65e5\u672c\u8a9e \U0001f642 x = a_b[3] // 2.5e-10;\r\nEND   "
)


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer for a vocabulary of `size`, or raise FormatError if GGUF cannot express it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = json.loads(backend.to_str()) if backend is not None else {}
    model = plain.get("model", {})
    if model.get("type") != "BPE":
        raise FormatError(f"GGUF export supports BPE tokenizers, and this one is {model.get('type')}; {_INSTEAD}.")
    tokens, token_types = _tokens(tokenizer, size, bool(model.get("byte_fallback")))
    shared = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(token_types, dtype=np.int32),
        **_special(tokenizer),
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    if model.get("byte_fallback"):
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            **shared,
            **_pieces(tokens, merges, backend),
        }
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _rule(backend),
        **shared,
        "tokenizer.ggml.merges": merges,
    }


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int, pieces: bool) -> tuple[list[str], list[int]]:
    """Return every token and its type; ids beyond the tokenizer's vocabulary are marked unused."""
    tokens, token_types = [f"[PAD{token_id}]" for token_id in range(size)], [_UNUSED] * size
    added = tokenizer.added_tokens_decoder
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= size:
            raise FormatError(f"the tokenizer has a token id {token_id}, and the network only {size}; {_INSTEAD}.")
        tokens[token_id], token_types[token_id] = token, NORMAL
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            token_types[token_id] = _BYTE
        if token_id in added:
            token_types[token_id] = CONTROL if added[token_id].special else USER_DEFINED
        if pieces and token == tokenizer.unk_token:
            token_types[token_id] = UNKNOWN
    return tokens, token_types


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
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


def _rule(backend: Any) -> str:
    """Return the GGUF name of the tokenizer's pre-tokenizer."""
    words = _words(backend.pre_tokenizer) if backend.pre_tokenizer is not None else []
    for name in _RULES:
        if _words(pre_tokenizers.Sequence(word_splits(name))) == words:
            return name
    raise FormatError(
        f"the tokenizer has a pre-tokenizer for which Smelt knows no name in GGUF (it knows "
        f"{', '.join(_RULES)}); {_INSTEAD}."
    )


def _words(rule: Any) -> list[str]:
    return [word for word, _ in rule.pre_tokenize_str(PROBE)]


def _pieces(tokens: list[str], merges: list[str], backend: Any) -> dict[str, Any]:
    """Return SentencePiece scores, which replace merges: the earlier a token is merged, the higher its score."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    scores = np.array([-float(rank.get(token, 0)) for token in tokens], dtype=np.float32)
    first = backend.encode("a", add_special_tokens=False).tokens[0]
    return {"tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": first.startswith("▁")}
