"""Tokenize and detokenize with the model's tokenizer and chat template.

All but short texts go to threads, so that no request delays others. The threads take turns: of a request with many
prompts, one at a time waits for them. How much text may wait is limited.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from smelt.errors import RequestError, is_panic
from smelt.models.chat_template import ChatTemplateRenderer, TemplateLimitError
from smelt.serve.engine.detokenizer import INCOMPLETE, Detokenizer
from smelt.serve.priorities import yield_to_others
from smelt.serve.server.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
INLINE_CHARACTERS = 1024  # of a request, up to which it is tokenized on the event loop
MAX_WAITING_CHARACTERS = 64 << 20  # of all requests, for a thread
MAX_WAITING_CHATS = 64  # for the process that renders chat templates
_SPACE = "\u2581"  # of SentencePiece, which decoding strips from the beginning of a text
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class AsyncTokenizer:
    """The server's tokenizer. Prompts have at most `max_tokens` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is not None:  # set once: changing it later would not be safe between threads
            inner.no_truncation()
            inner.no_padding()
        self._max_token_length = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._decoder: Any = _FastDecoder(inner) if _uses_standard_decode(tokenizer) else tokenizer
        self._template = ChatTemplateRenderer(tokenizer)
        fast = _uses_standard_encode(tokenizer)
        self._encode = _fast_encode(inner) if fast else _wrapped_encode(tokenizer)
        threads = min(4, os.cpu_count() or 1) if fast else 1  # wrappers may keep settings between calls
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer", initializer=yield_to_others)
        self._template_thread = ThreadPoolExecutor(1, thread_name_prefix="template", initializer=yield_to_others)
        self._waiting_characters = self._waiting_chats = 0
        byte_level = inner is not None and "ByteLevel" in repr(inner.decoder)
        self._byte_of = {character: byte for byte, character in _byte_characters().items()} if byte_level else {}
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.token = lru_cache(maxsize=65536)(self._token)

    async def encode(self, text: str, *, special: bool = True, param: str = "prompt", inline: bool = True) -> list[int]:
        """Tokenize a text, on the event loop if it is short and `inline`; refuse one that is certainly too long without
        tokenizing it."""
        if len(text) > self.max_tokens * self._max_token_length:
            message = f"{param} has {len(text):,} characters; the limit is {self.max_tokens:,} tokens."
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return await self._run(len(text), lambda: self._encode(text, special), inline=inline)

    def shorten(self, text: str) -> str:
        """Return the beginning of a text, with as many characters as `max_tokens` tokens can have."""
        return text[: self.max_tokens * self._max_token_length]

    async def render_chat(self, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> str:
        """Apply the chat template, with the generation prompt; `tools` and `variables` are further variables of it."""
        if not self.tokenizer.chat_template:
            raise ApiError(
                400, "the model has no chat template; use /v1/completions, or add a chat_template.jinja to it.",
                param="messages", code="no_chat_template",
            )  # fmt: skip
        if self._waiting_chats >= MAX_WAITING_CHATS:
            raise _overloaded("too many conversations wait to be rendered; try again later.")
        self._waiting_chats += 1
        try:
            render = partial(self._render, messages, tools, variables)
            return await asyncio.get_running_loop().run_in_executor(self._template_thread, render)
        finally:
            self._waiting_chats -= 1

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at the beginning of a text and after a space, as vLLM does."""

        def encode() -> tuple[tuple[int, ...], ...]:
            found: list[tuple[int, ...]] = []
            for word in words:
                first, spaced = (tuple(self._encode(prefix + word.lstrip(), False)) for prefix in ("", " "))
                found.append(first)
                if spaced and spaced[0] != first[0] and len(spaced) == len(first):
                    found.append(spaced)
            return tuple(found)

        return await self._run(2 * sum(map(len, words)), encode)

    async def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return await self._run(len(tokens), lambda: self.tokenizer.convert_ids_to_tokens(list(tokens)))

    async def pieces(self, tokens: Sequence[int]) -> list[str | list[int]]:
        """Return the text of each token alone, or its bytes where they are a part of a character."""

        def piece(token: int) -> str | list[int]:
            text, content = self.token(token)
            if INCOMPLETE in text:
                return list(content)
            return text or str(self.tokenizer.convert_ids_to_tokens(token)).replace(_SPACE, " ")

        return await self._run(len(tokens), lambda: [piece(token) for token in tokens])

    async def decode(self, tokens: Sequence[int]) -> str:
        return await self._run(len(tokens), lambda: str(self.tokenizer.decode(list(tokens))))

    def detokenizer(
        self, prompt: Sequence[int], stop: Sequence[str], include_stop: bool = False, markers: Collection[int] = ()
    ) -> Detokenizer:
        """Return a detokenizer of one answer. `markers` are special tokens that are part of its text all the same."""
        decoder = self._decoder
        if not self.special_ids.isdisjoint(markers):
            decoder = _MarkerDecoder(decoder, self.special_ids.difference(markers))
        return Detokenizer(decoder, prompt, stop, include_stop=include_stop)

    def close(self) -> None:
        self._template.close()
        for threads in (self._threads, self._template_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def template(self) -> str:
        """The chat template for requests with tools; empty if there is none."""
        with suppress(ValueError):  # several templates and none of them the default
            return self._template.source([{}]) if self.tokenizer.chat_template else ""
        return ""

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of tokens beside the vocabulary of texts, special ones and others."""
        return {token.content: index for index, token in self.tokenizer.added_tokens_decoder.items()}

    def _render(self, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(messages, tools, **variables)
        except TemplateLimitError as error:  # the model's fault, not the client's
            raise ApiError(500, str(error), code="chat_template") from error
        except RequestError as error:
            roles = ", ".join(message["role"] for message in messages[:8])
            message = f"the model's chat template does not accept messages in this order of roles: {roles}."
            raise ApiError(400, message, param="messages") from error

    async def _run(self, size: int, work: Callable[[], T], *, inline: bool = True) -> T:
        if inline and size <= INLINE_CHARACTERS:
            return _without_panic(work)
        if self._waiting_characters and self._waiting_characters + size > MAX_WAITING_CHARACTERS:
            raise _overloaded("too much text waits to be tokenized; try again later.")
        self._waiting_characters += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _without_panic, work)
        finally:
            self._waiting_characters -= size

    def _token(self, token: int) -> tuple[str, bytes]:
        """Return the text and the bytes of one token; the bytes may be part of a character."""
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        token_string = str(self.tokenizer.convert_ids_to_tokens(token))
        if INCOMPLETE in text:
            if self._byte_of and all(character in self._byte_of for character in token_string):
                return text, bytes(self._byte_of[character] for character in token_string)
            if match := _BYTE.fullmatch(token_string):
                return text, bytes([int(match[1], 16)])
        return text, text.encode("utf-8", "replace")


class _FastDecoder:
    """The Rust tokenizer alone: every token is decoded, and transformers' wrapper would take most of the time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return str(self._inner.decode(tokens, skip_special_tokens))


class _MarkerDecoder:
    """Decode some special tokens as text, and skip the others."""

    def __init__(self, decoder: Any, skipped: frozenset[int]) -> None:
        self._decoder, self._skipped = decoder, skipped

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        text = [token for token in tokens if token not in self._skipped]
        return str(
            self._decoder.decode(
                text, skip_special_tokens=False, clean_up_tokenization_spaces=clean_up_tokenization_spaces
            )
        )


def _without_panic(work: Callable[[], T]) -> T:
    """Turn a panic of the tokenizers library, which would end the event loop, into an error response."""
    try:
        return work()
    except BaseException as error:
        if is_panic(error):
            raise ApiError(500, "the model's tokenizer cannot process this text.", code="tokenizer") from error
        raise


def _fast_encode(inner: Any) -> Callable[[str, bool], list[int]]:
    """Encode with the Rust tokenizer alone, which computes no offsets and, for batches only, releases the GIL."""
    return lambda text, special: inner.encode_batch_fast([text], add_special_tokens=special)[0].ids


def _wrapped_encode(tokenizer: Any) -> Callable[[str, bool], list[int]]:
    return lambda text, special: tokenizer(text, add_special_tokens=special)["input_ids"]


def _overloaded(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})


def _uses_standard_encode(tokenizer: Any) -> bool:
    """Return whether transformers' wrapper adds nothing of its own when it encodes one text."""
    modules = [getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("__call__", "_encode_plus")]
    standard = modules == ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]
    return standard and not getattr(tokenizer, "split_special_tokens", False)


def _uses_standard_decode(tokenizer: Any) -> bool:
    """Return whether transformers' wrapper adds nothing of its own when it decodes."""
    modules = [getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")]
    return modules == ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]


def _byte_characters() -> dict[int, str]:
    """Map each byte to its character in byte-level BPE: printable ones to themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
