"""Tokenize and detokenize with the model's tokenizer and chat template; long texts in a thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from smelt.errors import RequestError, is_panic
from smelt.models.chat_template import ChatTemplateRenderer, TemplateLimitError
from smelt.serve.engine.detokenizer import INCOMPLETE, Detokenizer
from smelt.serve.server.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
INLINE_CHARACTERS = 4096  # up to which a text is tokenized on the event loop
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        byte_level = inner is not None and "ByteLevel" in repr(inner.decoder)
        self._byte_of = {character: byte for byte, character in _byte_characters().items()} if byte_level else {}
        self.token = lru_cache(maxsize=65536)(self._token)

    async def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> list[int]:
        """Tokenize a text; refuse one that is certainly too long without tokenizing it."""
        if len(text) > self.max_tokens * self._max_token_length:
            message = f"{param} has {len(text):,} characters; the limit is {self.max_tokens:,} tokens."
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return await self._run(len(text), lambda: _ids(self.tokenizer(text, add_special_tokens=special)))

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Apply the chat template, with the generation prompt, and tokenize."""
        if not self.tokenizer.chat_template:
            raise ApiError(
                400, "the model has no chat template; use /v1/completions, or add a chat_template.jinja to it.",
                param="messages", code="no_chat_template",
            )  # fmt: skip
        text = await asyncio.get_running_loop().run_in_executor(self._thread, self._render, messages)
        return await self.encode(text, special=False, param="messages")

    async def decode(self, tokens: Sequence[int]) -> str:
        return await self._run(len(tokens), lambda: str(self.tokenizer.decode(list(tokens))))

    def detokenizer(self, prompt: Sequence[int], stop: Sequence[str], include_stop: bool = False) -> Detokenizer:
        return Detokenizer(self._decoder, prompt, stop, include_stop=include_stop)

    def close(self) -> None:
        self._template.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return self._template.render(messages)
        except TemplateLimitError as error:  # the model's fault, not the client's
            raise ApiError(500, str(error), code="chat_template") from error
        except RequestError as error:
            roles = ", ".join(message["role"] for message in messages[:8])
            message = f"the model's chat template does not accept messages in this order of roles: {roles}."
            raise ApiError(400, message, param="messages") from error

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARACTERS:
            return _without_panic(work)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _without_panic, work)

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


def _without_panic(work: Callable[[], T]) -> T:
    """Turn a panic of the tokenizers library, which would end the event loop, into an error response."""
    try:
        return work()
    except BaseException as error:
        if is_panic(error):
            raise ApiError(500, "the model's tokenizer cannot process this text.", code="tokenizer") from error
        raise


def _uses_standard_decode(tokenizer: Any) -> bool:
    """Return whether transformers' wrapper adds nothing of its own when it decodes."""
    modules = [getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")]
    return modules == ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]


def _ids(encoded: Any) -> list[int]:
    ids: list[int] = encoded["input_ids"]
    return ids


def _byte_characters() -> dict[int, str]:
    """Map each byte to its character in byte-level BPE: printable ones to themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
