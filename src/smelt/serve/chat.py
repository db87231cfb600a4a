"""A conversation with a model: its messages, and the answers of an engine to them, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from smelt.errors import ModelError, RequestError
from smelt.models.json_file import one_line
from smelt.serve.engine.detokenizer import Detokenizer
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """What one answer took."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt: those that were not computed again
    tokens: int
    seconds: float
    reason: str  # stop, length or abort

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Conversation:
    """Messages and answers. The engine's prefix cache keeps what was said, so that a turn computes what is new."""

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str = "") -> None:
        tokenizer, source = engine.model.tokenizer, engine.model.source or "this model"
        if tokenizer is None or not tokenizer.chat_template:
            raise ModelError(
                f"{source} has no chat template, so it was not made for talking; choose an instruct model."
            )
        self.engine, self.sampling, self.tokenizer = engine, sampling, tokenizer
        self.system = system
        self.messages: list[Message] = []
        self.turns: list[Turn] = []

    def reset(self, system: str | None = None) -> None:
        """Forget what was said; `system` is what the model is told before all else."""
        self.messages = []
        if system is not None:
            self.system = system

    def answer(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer as it comes. Whatever came is part of the conversation, even when it was stopped."""
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self.prompt()
            (request,) = self.engine.submit(prompt, self._sampling())
        except Exception:
            self.messages.pop()
            raise
        stream, said, begin = Detokenizer(self.tokenizer, prompt), "", time.perf_counter()
        try:
            while not request.reason:
                if stopped():
                    self.engine.abort(request)
                tokens = [event.token for event in self.engine.step() if event.request is request]
                piece = stream.update([token for token in tokens if token is not None], request.reason).text
                said += piece
                if piece:
                    yield piece
        finally:
            self.engine.abort(request)
            while self.engine.busy:  # nothing of it is left behind for the next turn
                self.engine.step()
            self.messages.append({"role": "assistant", "content": said})
            self.turns.append(
                Turn(
                    len(prompt),
                    request.num_cached_tokens,
                    len(request.output),
                    time.perf_counter() - begin,
                    request.reason,
                )
            )

    def trim(self, text: str) -> int:
        """Forget the oldest messages until what is said next fits with room for an answer; how many went."""
        gone = 0
        self.messages.append({"role": "user", "content": text})
        try:
            room = min(self.sampling.max_tokens or self.engine.max_model_len, self.engine.max_model_len // 2)
            while len(self.messages) > 1 and len(self.prompt()) + room > self.engine.max_model_len:
                count = 2 if len(self.messages) > 2 else 1  # a question goes with its answer
                del self.messages[:count]
                gone += count
        finally:
            self.messages.pop()
        return gone

    def prompt(self) -> list[int]:
        """The conversation as the model's own template writes it, up to where its answer begins."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            text = self.tokenizer.apply_chat_template(
                [*system, *self.messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is code of others, which raises what it likes
            raise RequestError(
                f"the model's chat template does not take this conversation ({one_line(error)})."
            ) from error
        return list(self.tokenizer(str(text), add_special_tokens=False)["input_ids"])

    def _sampling(self) -> SamplingParams:
        """A seed for each turn, and the tokenizer's end of text beside the model's."""
        end = self.tokenizer.eos_token_id
        seed = None if self.sampling.seed is None else self.sampling.seed + len(self.turns)
        return replace(self.sampling, seed=seed, stop_token_ids=() if end is None else (end,))
