"""Text to tokens and back, with the model's own tokenizer and chat template. Long texts are read in a thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from smelt.serve.engine.detokenizer import INCOMPLETE, Detokenizer
from smelt.serve.server.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
QUICK = 4096  # characters that are read on the spot
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Texts:
    """A tokenizer as the server uses it. `most` tokens is the longest prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self.tokenizer, self.most = tokenizer, most
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is not None:  # set once: changing it later would not be safe between threads
            inner.no_truncation()
            inner.no_padding()
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._decoder: Any = _Decoder(inner) if _decodes_plainly(tokenizer) else tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        byte_level = inner is not None and "ByteLevel" in repr(inner.decoder)
        self._bytes_of = {letter: byte for byte, letter in _byte_letters().items()} if byte_level else {}
        self.token = lru_cache(maxsize=65536)(self._token)

    async def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> list[int]:
        """Refuses what is surely too long before reading it."""
        if len(text) > self.most * self._longest:
            told = f"{param} has {len(text):,} characters; more than {self.most:,} tokens cannot be served."
            raise ApiError(400, told, param=param, code="context_length_exceeded")
        return await self._run(len(text), lambda: _ids(self.tokenizer(text, add_special_tokens=special)))

    async def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The messages in the form that the model was trained on, up to where its answer begins."""
        if not self.tokenizer.chat_template:
            raise ApiError(
                400, "this model has no chat template; use /v1/completions, or put a chat_template.jinja beside it.",
                param="messages", code="no_chat_template",
            )  # fmt: skip
        size = sum(len(message["content"]) for message in messages)
        text = await self._run(QUICK + size, lambda: self._rendered(messages))
        return await self.encode(text, special=False, param="messages")

    async def decode(self, tokens: Sequence[int]) -> str:
        return await self._run(len(tokens), lambda: str(self.tokenizer.decode(list(tokens))))

    def stream(self, prompt: Sequence[int], stop: Sequence[str], include_stop: bool = False) -> Detokenizer:
        return Detokenizer(self._decoder, prompt, stop, include_stop=include_stop)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        """By transformers, whose environment for templates is a sandbox."""
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template may raise anything, with any text
            roles = ", ".join(message["role"] for message in messages[:8])
            told = f"the model's chat template does not accept messages in this order of roles: {roles}."
            raise ApiError(400, told, param="messages") from error

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= QUICK:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _token(self, token: int) -> tuple[str, bytes]:
        """What one token says, and its bytes, which may be a part of a character."""
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        if INCOMPLETE in text:
            if self._bytes_of and all(letter in self._bytes_of for letter in piece):
                return text, bytes(self._bytes_of[letter] for letter in piece)
            if found := _BYTE.fullmatch(piece):
                return text, bytes([int(found[1], 16)])
        return text, text.encode("utf-8", "replace")


class _Decoder:
    """The tokenizer's inner part alone: every token of every answer is decoded, and the outer part takes most of the
    time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return str(self._inner.decode(tokens, skip_special_tokens))


def _decodes_plainly(tokenizer: Any) -> bool:
    """Whether the outer part adds nothing of its own when it decodes."""
    places = [getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")]
    return places == ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]


def _ids(encoded: Any) -> list[int]:
    found: list[int] = encoded["input_ids"]
    return found


def _byte_letters() -> dict[int, str]:
    """The letters that byte-level tokenizers write bytes with: printable ones as themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
