"""Streamed text: the chunks add up to the full text, characters are never split, stop strings never shown."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from smelt.serve.engine.detokenizer import Detokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, so that most characters outside ASCII take several."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(sorted(letters))}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with byte-fallback tokens for unknown characters, as in SentencePiece models."""
    vocabulary = [(f"<0x{value:02X}>", 0.0) for value in range(256)] + [("<unk>", -9.0)]
    inner = Tokenizer(models.Unigram(vocabulary, unk_id=256, byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with a leading space, which is not shown at the start of a text."""
    inner = Tokenizer(models.WordLevel({"<s>": 0, "▁one": 1, "▁two": 2}, unk_token="<s>"))
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


class Spelled:
    """Tokens that are arbitrary bytes of a text."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.longest = tokens, 0

    def decode(self, tokens: list[int], **_: bool) -> str:
        self.longest = max(self.longest, len(tokens))
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")


TOKENIZER = byte_tokenizer()
FALLBACK = fallback_tokenizer()
TEXT = st.text(alphabet="ab .é語🙂\n", max_size=30)


def streamed(tokens: list[int], seed: int, stop: tuple[str, ...] = (), prompt: list[int] | None = None) -> list[str]:
    rng = random.Random(seed)
    stream, chunks, start = Detokenizer(TOKENIZER, prompt or [], stop), [], 0
    while start < len(tokens):
        count = rng.randrange(1, 4)
        chunks.append(stream.push(tokens[start : start + count]))
        start += count
    return [*chunks, stream.finish()]


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT, st.integers(0, 99))
def test_chunks_add_up_to_the_text_and_characters_are_complete(before: str, text: str, seed: int) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    chunks = streamed(tokens, seed, prompt=TOKENIZER(before)["input_ids"])
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


@settings(max_examples=300, deadline=None)
@given(TEXT, st.lists(st.text(alphabet="ab .é🙂", min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 99))
def test_no_part_of_a_stop_string_is_shown(text: str, stop: list[str], seed: int) -> None:
    chunks = streamed(TOKENIZER(text)["input_ids"], seed, tuple(stop))
    ends = [position for stop_string in stop if (position := text.find(stop_string)) >= 0]
    shown = "".join(chunks)
    if not ends:
        assert shown == text
    else:  # tokens that arrive together may contain a second stop string before the first match
        assert shown == text[: len(shown)] and not any(stop_string in shown for stop_string in stop)
        assert len(shown) <= max(ends)


def test_token_by_token_it_stops_at_the_first_stop_string() -> None:
    stream = Detokenizer(TOKENIZER, [], ("###", "##b"))
    chunks = [stream.push([token]) for token in TOKENIZER("a##c##bd###")["input_ids"]]
    assert "".join(chunks) == "a##c" and stream.stopped == "##b"
    assert stream.push(TOKENIZER("more")["input_ids"]) == "" and stream.finish() == ""


def test_a_possible_stop_string_is_held_back() -> None:
    stream = Detokenizer(TOKENIZER, [], ("<end>",))
    assert [stream.push(TOKENIZER(part)["input_ids"]) for part in ("hello <e", "n", "tity> <en")] == [
        "hello ",
        "",
        "<entity> ",
    ]
    assert stream.finish() == "<en"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_answer_that_ends_inside_a_character_is_flushed(cut: int) -> None:
    stream = Detokenizer(TOKENIZER, [], ())
    assert stream.push(TOKENIZER("ok🙂")["input_ids"][: 2 + cut]) in ("", "ok")
    assert stream.finish().endswith("\ufffd")


BYTES = st.lists(st.sampled_from([*range(256), *[0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F] * 20]), max_size=60)


@settings(max_examples=500, deadline=None)
@given(BYTES, st.integers(0, 99), st.integers(1, 30))
def test_invalid_bytes_are_not_held_back(tokens: list[int], seed: int, max_tokens: int) -> None:
    rng, stream, shown, start = random.Random(seed), Detokenizer(TOKENIZER, []), "", 0
    while start < len(tokens):
        count = rng.randrange(1, max_tokens + 1)
        shown += stream.push(tokens[start : start + count])
        start += count
        decoded = TOKENIZER.decode(tokens[:start])
        assert decoded.startswith(shown) and len(decoded) - len(shown) <= 3
    assert shown + stream.finish() == TOKENIZER.decode(tokens)


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT, st.integers(0, 99), st.integers(1, 12))
def test_multibyte_characters_are_emitted_complete(text: str, before: str, seed: int, max_tokens: int) -> None:
    tokens, rng = list(text.encode()), random.Random(seed)
    stream, chunks = Detokenizer(FALLBACK, list(before.encode())), []
    while tokens:
        count = rng.randrange(1, max_tokens + 1)
        chunks.append(stream.push(tokens[:count]))
        del tokens[:count]
    assert "".join([*chunks, stream.finish()]) == text and not any("\ufffd" in chunk for chunk in chunks)


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="a語🙂", max_size=12), st.integers(0, 999), st.integers(1, 9))
def test_tokens_may_contain_parts_of_two_characters(text: str, seed: int, max_tokens: int) -> None:
    rng, left, tokens = random.Random(seed), text.encode(), []
    while left:
        count = rng.randrange(1, 4)
        tokens.append(left[:count])
        left = left[count:]
    stream, chunks, start = Detokenizer(Spelled(tokens), []), [], 0  # type: ignore[arg-type]
    while start < len(tokens):
        count = min(rng.randrange(1, max_tokens + 1), len(tokens) - start)
        chunks.append(stream.push(range(start, start + count)))
        start += count
    assert "".join([*chunks, stream.finish()]) == text and not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("token", [b"a", b"\x80", b"\xf0"])
def test_a_long_text_is_not_decoded_from_the_start(token: bytes) -> None:
    tokenizer = Spelled([token])
    stream = Detokenizer(tokenizer, [])  # type: ignore[arg-type]
    assert len("".join(stream.push([0]) for _ in range(500))) >= 496
    assert tokenizer.longest <= 16


def test_a_space_is_shown_after_a_hidden_token() -> None:
    stream = Detokenizer(word_tokenizer(), [])
    assert [stream.push([token]) for token in (1, 0, 2, 0, 0, 1)] == ["one", "", " two", "", "", " one"]


def test_bytes_without_a_character_are_shown_as_they_arrive() -> None:
    stream = Detokenizer(FALLBACK, [])
    shown = [stream.push([0x80]) for _ in range(40)]
    assert "".join(shown) == "\ufffd" * 37 and stream.finish() == "\ufffd" * 3
