"""Text as it streams: the pieces together are the whole, characters are never cut, stop texts never shown."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from smelt.serve.engine.text import TextStream


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, so that most characters outside ASCII take several."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    inner = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(sorted(letters))}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TOKENIZER = byte_tokenizer()
TEXT = st.text(alphabet="ab .é語🙂\n", max_size=30)


def streamed(tokens: list[int], seed: int, stop: tuple[str, ...] = (), prompt: list[int] | None = None) -> list[str]:
    chance = random.Random(seed)
    stream, pieces, at = TextStream(TOKENIZER, prompt or [], stop), [], 0
    while at < len(tokens):
        count = chance.randrange(1, 4)
        pieces.append(stream.push(tokens[at : at + count]))
        at += count
    return [*pieces, stream.finish()]


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT, st.integers(0, 99))
def test_the_pieces_are_the_whole_and_characters_are_whole(before: str, text: str, seed: int) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    pieces = streamed(tokens, seed, prompt=TOKENIZER(before)["input_ids"])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(TEXT, st.lists(st.text(alphabet="ab .é🙂", min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 99))
def test_nothing_of_a_stop_text_is_shown(text: str, stop: list[str], seed: int) -> None:
    pieces = streamed(TOKENIZER(text)["input_ids"], seed, tuple(stop))
    ends = [place for each in stop if (place := text.find(each)) >= 0]
    shown = "".join(pieces)
    if not ends:
        assert shown == text
    else:  # tokens that come together may hold a second stop text before the first one found
        assert shown == text[: len(shown)] and not any(each in shown for each in stop)
        assert len(shown) <= max(ends)


def test_one_token_at_a_time_stops_at_the_first_stop_text() -> None:
    stream = TextStream(TOKENIZER, [], ("###", "##b"))
    pieces = [stream.push([token]) for token in TOKENIZER("a##c##bd###")["input_ids"]]
    assert "".join(pieces) == "a##c" and stream.stopped == "##b"
    assert stream.push(TOKENIZER("more")["input_ids"]) == "" and stream.finish() == ""


def test_what_may_become_a_stop_text_waits() -> None:
    stream = TextStream(TOKENIZER, [], ("<end>",))
    assert [stream.push(TOKENIZER(part)["input_ids"]) for part in ("hello <e", "n", "tity> <en")] == [
        "hello ",
        "",
        "<entity> ",
    ]
    assert stream.finish() == "<en"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_answer_that_ends_inside_a_character_shows_what_there_is(cut: int) -> None:
    stream = TextStream(TOKENIZER, [], ())
    assert stream.push(TOKENIZER("ok🙂")["input_ids"][: 2 + cut]) in ("", "ok")
    assert stream.finish().endswith("\ufffd")
