"""Build a tokenizer from GGUF metadata: byte-level BPE (`gpt2`) or SentencePiece BPE with byte fallback (`llama`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from smelt.errors import ModelError, is_panic
from smelt.models.gguf.reader import GgufFile
from smelt.models.json_file import one_line

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_MAX_TOKEN_LENGTH = 256  # characters; SentencePiece tokens have a few dozen at most
_MAX_CHARACTERS = 2**22  # of all SentencePiece tokens, since each position is a possible split; Gemma has 1.7 million

# The pre-tokenization patterns of Llama 3 and Qwen 2, which differ only in the number of digits per token.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens, token types and metadata of a tokenizer."""

    tokens: list[str]
    token_types: list[int]
    metadata: dict[str, Any]

    def of_type(self, *types: int) -> list[str]:
        return [token for token, token_type in zip(self.tokens, self.token_types, strict=True) if token_type in types]

    def special(self, name: str) -> str | None:
        """Return the token that the metadata gives for a role: bos, eos, unknown, padding."""
        number = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return self.tokens[number] if type(number) is int and 0 <= number < len(self.tokens) else None


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase | None:
    """Build the file's tokenizer, or return None if it has none."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model in (None, "none"):
        return None
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{file.path} has a tokenizer of type {model!r:.40}; Smelt reads gpt2 and llama from GGUF.")
    vocabulary = _read_vocabulary(file)
    try:
        tokenizer = _byte_level(vocabulary) if model == "gpt2" else _sentence_piece(vocabulary)
        _add_special_tokens(tokenizer, vocabulary)
        return _to_transformers(tokenizer, vocabulary)
    except ModelError as error:
        raise ModelError(f"{file.path} {error}") from None
    except BaseException as error:  # the tokenizers library raises plain Exception, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(f"{file.path} has a tokenizer that cannot be built ({one_line(error)}).") from error


def _read_vocabulary(file: GgufFile) -> _Vocabulary:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{file.path} has a tokenizer without tokens.")
    token_types = _numbers(file, "tokenizer.ggml.token_type", len(tokens), default=NORMAL)
    return _Vocabulary(tokens, [int(token_type) for token_type in token_types], file.metadata)


def _numbers(file: GgufFile, key: str, length: int, default: float) -> Any:
    values = file.metadata.get(key)
    if values is None:
        return np.full(length, default)
    if not isinstance(values, np.ndarray) or len(values) != length:
        raise ModelError(f"{file.path} has a {key} that does not have one number per token.")
    return values


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    merges = vocabulary.metadata.get("tokenizer.ggml.merges", [])
    if not isinstance(merges, list):
        raise ModelError("has a tokenizer whose merges are not strings.")
    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(vocabulary.tokens)},
            merges=[_split_merge(merge) for merge in merges],
            ignore_merges=name == "llama-bpe",
        )
    )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(word_splits(name))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def word_splits(name: Any) -> list[Any]:
    """Return the named pre-tokenizer; raise for an unknown name, since another one would give other tokens."""
    if name in ("gpt-2", "default"):
        return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if name in ("qwen2", "llama-bpe"):
        words = Regex(_WORDS.replace("DIGITS", "" if name == "qwen2" else "{1,3}"))
        return [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    raise ModelError(f"has the pre-tokenizer {name!r:.40}; Smelt supports gpt-2, default, smollm, qwen2 and llama-bpe.")


def _sentence_piece(vocabulary: _Vocabulary) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(vocabulary.tokens)},
            merges=list(_merges_from_scores(vocabulary)),
            unk_token=vocabulary.special("unknown") or next(iter(vocabulary.of_type(UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    restore_spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        tokenizer.decoder = decoders.Sequence([*restore_spaces, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = replace
        tokenizer.decoder = decoders.Sequence(restore_spaces)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """Convert SentencePiece scores to BPE merges.

    SentencePiece merges the adjacent pair whose result has the best score. As an ordered list of merges, that is every
    split of a token into two known tokens, best token first.
    """
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocabulary.tokens):
        raise ModelError("has a tokenizer without one score per token.")
    if sum(map(len, vocabulary.tokens)) > _MAX_CHARACTERS:
        raise ModelError(f"has a vocabulary of more than {_MAX_CHARACTERS} characters.")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    normal = [index for index, token_type in enumerate(vocabulary.token_types) if token_type == NORMAL]
    for index in sorted(normal, key=lambda index: -scores[index]):
        token = vocabulary.tokens[index]
        if len(token) > _MAX_TOKEN_LENGTH:
            raise ModelError(f"has a token of {len(token)} characters; at most {_MAX_TOKEN_LENGTH} are accepted.")
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add control tokens, matched before any splitting, and the bos/eos tokens if the file enables them."""
    controls = vocabulary.of_type(CONTROL, UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    user_defined = vocabulary.of_type(USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])
    start = [token for token in [vocabulary.special("bos")] if token and _is_added(vocabulary, "bos")]
    end = [token for token in [vocabulary.special("eos")] if token and _is_added(vocabulary, "eos")]
    if start or end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*start, "$A", *end],
            pair=[*start, "$A", *end, *start, "$B", *end],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*start, *end}],
        )


def _is_added(vocabulary: _Vocabulary, name: str) -> bool:
    """Return whether a token is added to every text. Older files do not say; then the model family decides."""
    family = vocabulary.metadata.get("tokenizer.ggml.model"), vocabulary.metadata.get("tokenizer.ggml.pre")
    usual = name == "bos" and (family[0] == "llama" or family[1] == "llama-bpe")
    return bool(vocabulary.metadata.get(f"tokenizer.ggml.add_{name}_token", usual))


def _to_transformers(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> PreTrainedTokenizerBase:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    roles = {role: vocabulary.special(name) for role, name in names.items()}
    template = vocabulary.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **{role: token for role, token in roles.items() if token is not None},
    )
