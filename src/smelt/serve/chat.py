"""A conversation with a model: its messages, and an engine's streamed answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from smelt.errors import ModelError
from smelt.models.chat_template import ChatTemplateRenderer
from smelt.serve.engine.detokenizer import Detokenizer
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """Token counts and time of one answer."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens from the prefix cache
    tokens: int
    seconds: float
    reason: str  # stop, length or abort

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Conversation:
    """Messages and answers. Thanks to the engine's prefix cache a turn computes only what is new."""

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str = "") -> None:
        tokenizer, source = engine.model.tokenizer, engine.model.source or "this model"
        if tokenizer is None or not tokenizer.chat_template:
            raise ModelError(f"{source} has no chat template, so it is not a chat model; choose an instruct model.")
        self.engine, self.sampling, self.tokenizer = engine, sampling, tokenizer
        self.template = ChatTemplateRenderer(tokenizer)
        self.system = system
        self.messages: list[Message] = []
        self.turns: list[Turn] = []

    def reset(self, system: str | None = None) -> None:
        """Clear the messages; `system` replaces the system prompt."""
        self.messages = []
        if system is not None:
            self.system = system

    def answer(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Stream the answer to a user message. Even a stopped answer becomes part of the conversation."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self.prompt()
            (request,) = self.engine.submit(prompt, self._sampling())
        except Exception:
            self.messages.pop()
            raise
        stream, text_so_far, started = Detokenizer(self.tokenizer, prompt), "", time.perf_counter()
        try:
            while not request.reason:
                if stopped():
                    self.engine.abort(request)
                tokens = [event.token for event in self.engine.step() if event.request is request]
                delta = stream.update([token for token in tokens if token is not None], request.reason).text
                text_so_far += delta
                if delta:
                    yield delta
        finally:
            self.engine.abort(request)
            while self.engine.busy:  # leave nothing in flight for the next turn
                self.engine.step()
            self.messages.append({"role": "assistant", "content": text_so_far})
            self.turns.append(
                Turn(
                    len(prompt),
                    request.num_cached_tokens,
                    len(request.output),
                    time.perf_counter() - started,
                    request.reason,
                )
            )

    def trim(self, text: str) -> int:
        """Drop the oldest messages until the next message and its answer fit; return how many were dropped."""
        dropped = 0
        self.messages.append({"role": "user", "content": text})
        try:
            reserved = min(self.sampling.max_tokens or self.engine.max_model_len, self.engine.max_model_len // 2)
            while len(self.messages) > 1 and len(self.prompt()) + reserved > self.engine.max_model_len:
                count = 2 if len(self.messages) > 2 else 1  # a question goes with its answer
                del self.messages[:count]
                dropped += count
        finally:
            self.messages.pop()
        return dropped

    def prompt(self) -> list[int]:
        """Return the conversation as token ids by the model's chat template, with the generation prompt."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        text = self.template.render([*system, *self.messages])
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _sampling(self) -> SamplingParams:
        """Use a new seed for each turn, and the tokenizer's EOS token in addition to the model's."""
        end = self.tokenizer.eos_token_id
        seed = None if self.sampling.seed is None else self.sampling.seed + len(self.turns)
        return replace(self.sampling, seed=seed, stop_token_ids=() if end is None else (end,))
