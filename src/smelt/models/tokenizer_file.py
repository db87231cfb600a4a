"""Check the files of a tokenizer before the tokenizers library reads them.

The library trusts them: a charsmap may make it allocate gigabytes and abort, a rule may multiply a text, a regular
expression may take exponential time, and inconsistent parts end in a panic. So tokenizer.json may contain only known
components, with parameters in bounds.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from smelt.errors import ModelError
from smelt.models.json_file import read_limited, read_object
from smelt.models.tokenizer_regex import check_regex

_MAX_VALUES = 3 * 2**20  # Gemma has 1.8 million: 262 thousand tokens and 514 thousand merges
_MAX_COMPONENTS = 64
_MAX_GROWTH = 64  # how many times longer the rules of a normalizer or decoder may make a text
_MAX_AFFIX = 64  # characters that a rule adds once
_MAX_CHARSMAP_TEXT = 128  # bytes that replace one character; Unicode's own NFKC needs up to 33
_MAX_WORD = 1_000  # characters per word of WordPiece, whose time is quadratic in it
_MAX_PADDING = 2**20
_MAX_ADDED_TOKENS, _MAX_ADDED_LENGTH = 2**17, 4096
_MAX_LINES, _MAX_BYTES, _MAX_TEMPLATE_BYTES = 2**20, 64 * 2**20, 2**20

_OBJECT_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_LINE_FILES = ("vocab.txt", "merges.txt")
_BINARY_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json")


def check_tokenizer_files(folder: Path) -> None:
    """Raise a ModelError if a tokenizer file of the folder is invalid or could take unbounded time or memory."""
    for name in _OBJECT_FILES:
        if (folder / name).is_file():
            content = read_object(folder / name)
            if content.get("fast_tokenizer_files"):
                raise ModelError(f"{folder / name} names other tokenizer files; only tokenizer.json is read.")
    for name in (*_LINE_FILES, *_BINARY_FILES):
        if (folder / name).is_file():
            raw = read_limited(folder / name, _MAX_BYTES)
            if name in _LINE_FILES and raw.count(b"\n") > _MAX_LINES:
                raise ModelError(f"{folder / name} has more than {_MAX_LINES} lines.")
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))[:1000]):
        if path.is_file():
            read_limited(path, _MAX_TEMPLATE_BYTES)
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            _check_tokenizer(read_object(path, _MAX_VALUES))
        except _InvalidTokenizerError as error:
            raise ModelError(f"{path} is not a usable tokenizer: {error}.") from None


class _InvalidTokenizerError(Exception):
    """The tokenizer is invalid; `check_tokenizer_files` adds its name."""


def _check_tokenizer(content: dict[str, Any]) -> None:
    for section, known in _COMPONENTS.items():
        growth = 1.0
        components = _flatten(content.get(section), section)
        if len(components) > _MAX_COMPONENTS:
            raise _InvalidTokenizerError(f"its {section} has more than {_MAX_COMPONENTS} parts")
        for component in components:
            name = component.get("type")
            if not isinstance(name, str) or name not in known:
                raise _InvalidTokenizerError(f"its {section} has a part of the unknown type {name!r:.40}")
            check = _CHECKS.get(name)
            growth *= check(component) if check else 1.0
        if growth > _MAX_GROWTH:
            raise _InvalidTokenizerError(f"its {section} can make a text {growth:.3g} times longer")
    _check_model(_mapping(content.get("model"), "model"))
    _check_unknown_token(content)
    _check_added_tokens(content.get("added_tokens") or [])
    _check_padding(content.get("padding"))


def _flatten(component: Any, section: str) -> list[dict[str, Any]]:
    """Return the parts of a component: itself, or those of a sequence, which may be nested."""
    if component is None:
        return []
    component = _mapping(component, section)
    if component.get("type") != "Sequence":
        return [component]
    parts = next((component[key] for key in _SEQUENCE_KEYS if key in component), None)
    if not isinstance(parts, list) or len(parts) > _MAX_COMPONENTS:
        raise _InvalidTokenizerError(f"its {section} has a sequence that is no list of up to {_MAX_COMPONENTS} parts")
    return [leaf for part in parts for leaf in _flatten(part, section)]


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _InvalidTokenizerError(f"its {what} is not an object")
    return value


def _text(component: dict[str, Any], key: str, limit: int = _MAX_AFFIX) -> str:
    value = component.get(key, "")
    if not isinstance(value, str) or len(value) > limit:
        raise _InvalidTokenizerError(f"the {key} of a {component['type']} is not a text of up to {limit} characters")
    return value


def _check_replace(component: dict[str, Any]) -> float:
    """Return how many times longer a replacement can make a text."""
    content = _text(component, "content")
    literal = _check_pattern(component)
    return max(1.0, len(content) / len(literal)) if literal else 1.0 + len(content)


def _check_pattern(component: dict[str, Any]) -> str | None:
    """Return the literal text that a component searches for; None for a regular expression, which is checked."""
    pattern = component.get("pattern")
    if isinstance(pattern, dict) and len(pattern) == 1:
        ((kind, value),) = pattern.items()
        if kind == "String" and isinstance(value, str):
            return value
        if kind == "Regex" and isinstance(value, str):
            problem = check_regex(value)
            if problem:
                raise _InvalidTokenizerError(f"the regular expression of a {component['type']} {problem}")
            return None
    raise _InvalidTokenizerError(f"the pattern of a {component['type']} is neither a String nor a Regex")


def _check_split(component: dict[str, Any]) -> float:
    _check_pattern(component)
    return 1.0


def _check_prepend(component: dict[str, Any]) -> float:
    _text(component, "prepend")
    return 1.0


def _check_charsmap(component: dict[str, Any]) -> float:
    """Check the size of the trie, and the texts that replace characters: after the trie, each ended by a zero."""
    encoded = component.get("precompiled_charsmap")
    try:
        raw = base64.b64decode(encoded or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        raw = b""
    size = int.from_bytes(raw[:4], "little")
    if len(raw) < 8 or size % 4 or not 4 <= size <= len(raw) - 4:
        raise _InvalidTokenizerError("its precompiled_charsmap is damaged")
    if max(map(len, raw[4 + size :].split(b"\0"))) > _MAX_CHARSMAP_TEXT:
        raise _InvalidTokenizerError(f"its precompiled_charsmap has texts of more than {_MAX_CHARSMAP_TEXT} bytes")
    return 1.0


def _check_fixed_length(component: dict[str, Any]) -> float:
    if type(component.get("length")) is not int or component["length"] < 1:
        raise _InvalidTokenizerError("the length of a FixedLength is not a positive number")
    return 1.0


def _check_template(component: dict[str, Any]) -> float:
    """Check that a template names each sequence once and only special tokens that it defines."""
    special = _mapping(component.get("special_tokens", {}), "TemplateProcessing")
    for key in ("single", "pair"):
        pieces = component.get(key, [])
        if not isinstance(pieces, list) or len(pieces) > _MAX_COMPONENTS:
            raise _InvalidTokenizerError("a TemplateProcessing is not a list of pieces")
        sequences = []
        for piece in pieces:
            ((kind, value),) = piece.items() if isinstance(piece, dict) and len(piece) == 1 else (("", {}),)
            name = value.get("id") if isinstance(value, dict) else None
            if kind == "Sequence" and name in ("A", "B") and name not in sequences:
                sequences.append(name)
            elif kind != "SpecialToken" or not isinstance(name, str) or name not in special:
                raise _InvalidTokenizerError("a TemplateProcessing names a token that it does not define")
    return 1.0


def _check_model(model: dict[str, Any]) -> None:
    name = model.get("type")
    if name not in (None, "BPE", "WordPiece", "WordLevel", "Unigram"):
        raise _InvalidTokenizerError(f"its model has the unknown type {name!r:.40}")
    if not isinstance(model.get("vocab"), dict | list) or not model["vocab"]:
        raise _InvalidTokenizerError("its model has no vocabulary")
    word = model.get("max_input_chars_per_word", 100)
    if type(word) is not int or not 0 <= word <= _MAX_WORD:
        raise _InvalidTokenizerError(f"its max_input_chars_per_word is not a number up to {_MAX_WORD}")


def _check_unknown_token(content: dict[str, Any]) -> None:
    """Check that the model has a token for text outside of its vocabulary, or that no text is outside of it.

    Otherwise the tokenizer loads and fails later, at the first such text.
    """
    model = content["model"]
    vocab, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocab, dict):
        missing = isinstance(unknown, str) and unknown not in vocab
        pieces, has_all_bytes = set(vocab), model.get("byte_fallback") is True and set(vocab) >= _BYTE_TOKENS
    else:  # Unigram, whose byte fallback needs an unknown token
        missing, has_all_bytes = model.get("unk_id") is None, False
        pieces = {entry[0] for entry in vocab if isinstance(entry, list) and entry and isinstance(entry[0], str)}
    if not missing:
        return
    parts = [part for section in ("normalizer", "pre_tokenizer") for part in _flatten(content.get(section), section)]
    if any(part.get("type") == "ByteLevel" for part in parts):
        has_all_bytes = has_all_bytes or pieces >= _BYTE_CHARACTERS
    if model.get("type") in ("WordPiece", "WordLevel") or not has_all_bytes:
        raise _InvalidTokenizerError("its model has no token for text outside of its vocabulary")


def _check_added_tokens(tokens: Any) -> None:
    if not isinstance(tokens, list) or len(tokens) > _MAX_ADDED_TOKENS:
        raise _InvalidTokenizerError(f"its added_tokens are not a list of up to {_MAX_ADDED_TOKENS} tokens")
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or len(content) > _MAX_ADDED_LENGTH:
            raise _InvalidTokenizerError(f"an added token is not a text of up to {_MAX_ADDED_LENGTH} characters")


def _check_padding(padding: Any) -> None:
    if padding is None:
        return
    strategy = _mapping(padding, "padding").get("strategy")
    lengths = [padding.get("pad_to_multiple_of"), strategy.get("Fixed") if isinstance(strategy, dict) else None]
    if any(length is not None and not (type(length) is int and 0 < length <= _MAX_PADDING) for length in lengths):
        raise _InvalidTokenizerError(f"its padding has a length that is not a number up to {_MAX_PADDING}")


_NO_BYTES = {0xC0, 0xC1, *range(0xF5, 0x100)}  # occur in no UTF-8 text
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(0x100) if byte not in _NO_BYTES}
_BYTE_CHARACTERS = {*ByteLevel.alphabet()} - {chr(byte) for byte in _NO_BYTES}
_SEQUENCE_KEYS = ("normalizers", "pretokenizers", "processors", "decoders")
_COMPONENTS = {
    "normalizer": {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt", "BertNormalizer", "Prepend"),
        *("Replace", "Precompiled", "ByteLevel"),
    },
    "pre_tokenizer": {
        *("ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Metaspace", "Punctuation", "Digits"),
        *("Split", "CharDelimiterSplit", "UnicodeScripts", "FixedLength"),
    },
    "post_processor": {"BertProcessing", "RobertaProcessing", "ByteLevel", "TemplateProcessing"},
    "decoder": {
        *("ByteLevel", "WordPiece", "Metaspace", "BPEDecoder", "CTC", "Fuse", "Strip", "Replace", "ByteFallback"),
    },
}
_CHECKS: dict[str, Callable[[dict[str, Any]], float]] = {
    "Replace": _check_replace,
    "Split": _check_split,
    "Prepend": _check_prepend,
    "Precompiled": _check_charsmap,
    "FixedLength": _check_fixed_length,
    "TemplateProcessing": _check_template,
}
