"""Tokenizer files that would multiply a text, take exponential time, abort the process or panic."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from smelt.errors import ModelError, is_panic
from smelt.models.load import load
from smelt.models.tokenizer_file import check_tokenizer_files
from smelt.models.tokenizer_regex import check_regex
from tests.security.limits import refused, write_model

_VOCAB = {"?": 0, "a": 1, "b": 2}
_BASE: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": _VOCAB, "unk_token": "?"},
}


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _sequence(parts: list[Any], key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: parts}


def _split(regex: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _charsmap(raw: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


def _nested(depth: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        part = _sequence([part])
    return part


def _template(*pieces: Any) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": {}}


def _padding(length: Any) -> dict[str, Any]:
    return {
        "strategy": {"Fixed": length}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "?",
    }  # fmt: skip


def _all_bytes(*without: int) -> dict[str, int]:
    return {f"<0x{byte:02X}>": byte for byte in range(256) if byte not in without}


_A = {"Sequence": {"id": "A", "type_id": 0}}
_WORD_PIECE = {"type": "WordPiece", "vocab": _VOCAB, "unk_token": "?", "continuing_subword_prefix": "##"}
_UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "byte_fallback": False}
_BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}
_BYTES = {"type": "BPE", "vocab": _all_bytes(), "merges": [], "unk_token": "<unk>", "byte_fallback": True}
_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "replacement that multiplies": ({"normalizer": _replace("a", "a" * 10**6)}, "up to 64 characters"),
    "replacements that multiply together": ({"normalizer": _sequence([_replace("a", "aa")] * 30)}, "times longer"),
    "replacement of nothing": ({"normalizer": _sequence([_replace("", "xxxx")] * 9)}, "times longer"),
    "replacement of an empty match": ({"normalizer": _sequence([_replace("", "xx", "Regex")] * 9)}, "times longer"),
    "multiplying decoder": ({"decoder": _sequence([_replace("a", "a" * 60)] * 4, "decoders")}, "times longer"),
    "prepended book": ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "up to 64 characters"),
    "exponential split": ({"pre_tokenizer": _split("(a+)+$")}, "in several ways"),
    "exponential replacement": ({"normalizer": _replace("(a|a)*b", "", "Regex")}, "in several ways"),
    "polynomial split": ({"pre_tokenizer": _split(r"\s*\s*\s*\s*x")}, "in a row"),
    "recursive split": ({"pre_tokenizer": _split(r"(?<x>a|\(\g<x>\))")}, "refers to its own groups"),
    "invalid regex": ({"pre_tokenizer": _split("((((")}, "unmatched parenthesis"),
    "regex of a megabyte": ({"pre_tokenizer": _split("a?" * 500_000)}, "characters"),
    "regex of another type": ({"pre_tokenizer": _split(7)}, "neither a String nor a Regex"),
    "charsmap of 4 GiB": ({"normalizer": _charsmap(b"\xff" * 80)}, "damaged"),
    "charsmap of a byte": ({"normalizer": _charsmap(b"\x01")}, "damaged"),
    "charsmap that is not base64": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "é"}}, "damaged"),
    "charsmap that multiplies": ({"normalizer": _charsmap(b"\x04\0\0\0" + bytes(4) + b"a" * 10**6)}, "texts of more"),
    "thousand normalizers": ({"normalizer": _sequence([{"type": "NFC"}] * 1000)}, "up to 64 parts"),
    "deep sequence": ({"normalizer": _nested(300)}, "nested more than"),
    "unknown normalizer": ({"normalizer": {"type": "Evil"}}, "unknown type 'Evil'"),
    "unknown pre-tokenizer": ({"pre_tokenizer": {"type": ["Split"]}}, "unknown type"),
    "unknown decoder": ({"decoder": {}}, "unknown type None"),
    "normalizer that is a list": ({"normalizer": [1]}, "not an object"),
    "chunks of no length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "positive"),
    "undefined template token": (
        {"post_processor": _template({"SpecialToken": {"id": "X", "type_id": 0}}, _A)}, "does not define"),
    "template that repeats": ({"post_processor": _template(*[_A] * 40)}, "does not define"),
    "padding to a billion": ({"padding": _padding(10**9)}, "its padding"),
    "padding to a negative length": ({"padding": _padding(-1)}, "its padding"),
    "word of any length": ({"model": {**_WORD_PIECE, "max_input_chars_per_word": 10**9}}, "max_input_chars_per_word"),
    "merge of unknown tokens": ({"model": _BPE}, "cannot be loaded"),
    "no unknown token": ({"model": _UNIGRAM}, "no token for text outside"),
    "unknown token that is not there": ({"model": {**_WORD_PIECE, "unk_token": "[UNK]"}}, "no token for text outside"),
    "unknown byte": ({"model": {**_BYTES, "vocab": _all_bytes(0xE0)}}, "no token for text outside"),
    "bytes without fallback": ({"model": {**_BYTES, "byte_fallback": False}}, "no token for text outside"),
    "no vocabulary": ({"model": {**_UNIGRAM, "vocab": []}}, "no vocabulary"),
    "vocabulary of another type": ({"model": {**_BPE, "vocab": 5}}, "no vocabulary"),
    "unknown model": ({"model": {"type": "Evil"}}, "unknown type 'Evil'"),
    "model that is a text": ({"model": "BPE"}, "not an object"),
    "added tokens that are numbers": ({"added_tokens": [1, 2]}, "an added token"),
    "added token of a megabyte": ({"added_tokens": [{"content": "a" * 10**6, "id": 0}]}, "an added token"),
    "vocabulary of lists": ({"model": {**_BPE, "vocab": {"a": 0}, "merges": [[]] * (3 * 2**20)}}, "JSON values"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("tokenizers") / "model")
    (folder / "tokenizer.json").write_text(json.dumps(_BASE))
    tokenizer = load(folder).tokenizer
    assert tokenizer is not None and tokenizer("a")["input_ids"] == [1]
    return folder


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_tokenizer_is_refused(name: str, folder: Path) -> None:
    changes, cause = _BAD[name]
    (folder / "tokenizer.json").write_text(json.dumps({**_BASE, **changes}))
    assert cause in refused(lambda: load(folder))


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("vocab.txt", b"a\n" * (2**20 + 2)),
        ("merges.txt", b"a b\n" * (2**20 + 2)),
        ("vocab.json", b'{"a":[' + b"[]," * 2**21 + b"[]]}"),
        ("special_tokens_map.json", b"[1]"),
        ("added_tokens.json", b"{" * 5000),
        ("tokenizer_config.json", b'{"fast_tokenizer_files": ["tokenizer.1.0.json"]}'),
        ("chat_template.jinja", b"a" * (2**20 + 1)),
        ("tokenizer.model", bytes(64 * 2**20 + 1)),
    ],
)
def test_other_files_of_a_tokenizer_are_bounded(name: str, raw: bytes, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(_BASE))
    (folder / name).write_bytes(raw)
    assert name in refused(lambda: load(folder))


# Of published tokenizers: GPT-2, Llama 3, o200k (two of its branches), Qwen 2, BLOOM, XLM-R and DeepSeek.
_PUBLISHED = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t)?| ?[^\s]+[\r\n/]*",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    " {2,}",
    "[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"(?<=\d)(?=(?:\d{3})+\b)|\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    r"[]a]+[^]\]b]*(?:\r\n){1,2}",
]


@pytest.mark.parametrize("pattern", _PUBLISHED)
def test_published_expressions_are_accepted(pattern: str) -> None:
    assert check_regex(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*", "(?:a|ab)+", "((a+)b?)*", "(a?){1,99}", "([ab]+,)+", "(?>a+)+", "(?i:a|b)*", "(a{1,9}){9}", r"(a)\1",
     "(?(1)a|b)", "(?~a)", "a)", "(a", "((a|b)c)+", "a*b*c*d*", "(a*b*)(c*d*)", "(?:(?:a+))+"],
)  # fmt: skip
def test_expressions_of_unbounded_time_are_refused(pattern: str) -> None:
    assert check_regex(pattern)


def test_a_panic_while_loading_is_one_sentence(folder: Path) -> None:
    """A trie whose nodes point outside of it: the library indexes out of bounds, which is no `Exception`."""
    trie = _charsmap((64).to_bytes(4, "little") + b"\xff" * 64 + b"a\0")
    (folder / "tokenizer.json").write_text(json.dumps({**_BASE, "normalizer": trie}))
    try:
        load(folder)
    except ModelError as error:
        assert "\n" not in str(error)


def test_panics_are_recognized() -> None:
    tokenizer = Tokenizer.from_str(
        json.dumps({**_BASE, "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
                    "decoder": None, "pre_tokenizer": {"type": "FixedLength", "length": 0}})
    )  # fmt: skip
    with pytest.raises(BaseException, match="non-zero") as caught:
        tokenizer.encode("a")
    assert is_panic(caught.value) and not isinstance(caught.value, Exception)
    assert not is_panic(KeyboardInterrupt())


def test_a_panic_on_the_command_line_is_one_sentence() -> None:
    code = (
        "import smelt.cli.main as m\n"
        "class PanicException(BaseException): pass\n"
        "def fail(arguments): raise PanicException('index out\\nof bounds')\n"
        "m._call = fail\n"
        "m.main([])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert ran.returncode == 2
    assert "a library gave up on this input (index out of bounds)" in ran.stderr and "Traceback" not in ran.stderr


_GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "bert": lambda: {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {**_WORD_PIECE, "max_input_chars_per_word": 100},
    },
    "sentencepiece": lambda: {
        "normalizer": _sequence(
            [{"type": "Prepend", "prepend": "▁"}, _replace(" ", "▁"), _replace(" {2,}", " ", "Regex")]
        ),
        "decoder": _sequence([_replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}], "decoders"),
    },
    "byte level": lambda: {
        "pre_tokenizer": _sequence([_split(_PUBLISHED[1]), {"type": "ByteLevel", "add_prefix_space": False,
                                    "trim_offsets": True, "use_regex": False}], "pretokenizers"),
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "?", "type_id": 0}}, _A],
                           "pair": [_A, {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"?": {"id": "?", "ids": [0], "tokens": ["?"]}}},
    },
    "byte level without an unknown token": lambda: {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "Unigram", "unk_id": None, "vocab": [[c, -1.0] for c in sorted(ByteLevel.alphabet())]},
    },
    "byte fallback without an unknown token": lambda: {"model": {**_BYTES, "vocab": _all_bytes(0xC0, 0xFF)}},
}  # fmt: skip


@pytest.mark.parametrize("name", _GOOD)
def test_usual_tokenizers_are_accepted(name: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({**_BASE, **_GOOD[name]()}))
    check_tokenizer_files(folder)
    tokenizer = load(folder).tokenizer
    assert tokenizer is not None and tokenizer("Z\0ß 語😀")["input_ids"]
