"""Prompts to answers: what both generating routes do between reading a request and writing its answer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smelt.errors import RequestError
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.errors import ApiError, ClientGoneError
from smelt.serve.server.schemas import Generation as Asked
from smelt.serve.server.service import Service
from smelt.serve.server.structured import structured_output_of
from smelt.serve.worker.client import Stream, TokenEvent, WorkerDiedError

PING_SECONDS = 15.0  # of silence, after which a streaming client is told that we are still here


@dataclass(frozen=True)
class Logprob:
    """Of one token of an answer: its own log-probability, and the most likely tokens with theirs."""

    token: int
    own: float
    top: list[tuple[int, float]]


@dataclass
class Delta:
    """What is new in one answer. All deltas of an answer together are the answer."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    reason: str = ""

    def extend(self, other: Delta) -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.reason = other.reason


class Answer:
    """One answer on its way: its text so far, and its times."""

    def __init__(
        self, index: int, prompt: list[int], service: Service, sampling: SamplingParams, keep_stop: bool
    ) -> None:
        self.index, self.meters = index, service.meters
        self.text = service.texts.stream(prompt, sampling.stop, keep_stop)
        self.count, self.cached, self.reason = 0, 0, ""
        self.started = self.first = self.last = 0.0

    def take(self, events: Sequence[TokenEvent], arrival: float) -> Delta:
        """All that came since, as one piece of text; what comes after a stop text is left out."""
        now = time.monotonic()
        new = [(event.token, event) for event in events if event.token is not None]
        update = self.text.update([token for token, _ in new], events[-1].reason)
        delta = Delta(self.index, update.text, reason=update.reason)
        for token, event in new[: update.num_tokens]:
            self._time(event, now, arrival)
            self.count += 1
            delta.tokens.append(token)
            if event.logprobs is not None:
                delta.logprobs.append(Logprob(token, *event.logprobs))
        if delta.reason:
            self.end(delta.reason, now, arrival)
        return delta

    def end(self, reason: str, now: float, arrival: float) -> None:
        self.reason = reason
        meters = self.meters
        meters.ended.add(label=reason)
        if reason in ("stop", "length"):
            meters.whole.observe(now - arrival)
            meters.computing.observe(now - self.started)
            meters.decode.observe(now - self.first)
            meters.answer_length.observe(self.count)
            if self.count > 1:
                meters.per_token.observe((now - self.first) / (self.count - 1))

    def _time(self, event: TokenEvent, now: float, arrival: float) -> None:
        self.meters.generated_tokens.add()
        if self.count:
            self.meters.between.observe(now - self.last)
        else:
            self.cached, self.first = event.cached, now
            self.started = max(event.started, arrival)
            self.meters.first_token.observe(now - arrival)
            self.meters.queued.observe(self.started - arrival)
            self.meters.prefill.observe(now - self.started)
        self.last = now


class Generation:
    """One request under way. `start` refuses what cannot be served; afterwards it must be closed."""

    def __init__(
        self, service: Service, prompts: list[list[int]], asked: Asked, sampling: SamplingParams, key: bytes
    ) -> None:
        self.service, self.prompts, self.sampling = service, prompts, sampling
        self.arrival = time.monotonic()
        self.priority = asked.priority or 0
        self.adapter = service.adapter_of(asked.model)
        self.salt = hashlib.sha256(key + b"\0" + (asked.cache_salt or "").encode()).digest()
        keep_stop = bool(asked.include_stop_str_in_output)
        n = sampling.n
        self.answers = [
            Answer(place * n + sample, prompt, service, sampling, keep_stop)
            for place, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        self._stream: Stream | None = None

    def start(self) -> None:
        limit = self.service.limits.max_sequences
        if len(self.answers) > limit:
            message = f"prompts times n is {len(self.answers):,}; a request may ask for at most {limit:,} answers."
            raise ApiError(400, message, param="n")
        for prompt in self.prompts:
            self.service.check_prompt(prompt, self.sampling)
        admission, meters = self.service.admission, self.service.meters
        admission.take(len(self.answers))
        try:
            self._stream = self.service.client.stream(
                self.prompts, self.sampling, priority=self.priority, salt=self.salt, adapter=self.adapter
            )
        except WorkerDiedError:
            admission.give_back(len(self.answers))
            told = "the engine is being started again; try again soon."
            raise ApiError(503, told, code="engine_down", headers={"retry-after": "5"}) from None
        meters.asked_samples.observe(self.sampling.n)
        if self.sampling.max_tokens is not None:
            meters.asked_tokens.observe(self.sampling.max_tokens)
        for prompt in self.prompts:
            meters.prompt_length.observe(len(prompt))
            meters.prompt_tokens.add(len(prompt))

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """What is new, each time that something is; nothing after a long silence."""
        assert self._stream is not None
        latest = self.arrival + self.service.limits.request_timeout
        while any(not answer.reason for answer in self.answers):
            left = latest - time.monotonic()
            if left <= 0:
                raise ApiError(504, f"the request took longer than {self.service.limits.request_timeout:g} seconds.")
            events = await self._stream.next(min(PING_SECONDS, left))
            new: dict[int, list[TokenEvent]] = {}
            for event in events:
                if not self.answers[event.answer].reason:
                    new.setdefault(event.answer, []).append(event)
            deltas = [self.answers[place].take(came, self.arrival) for place, came in new.items()]
            for delta in deltas:
                if delta.reason and not new[delta.index][-1].reason:
                    self._stream.end(delta.index)
            yield deltas

    def leave(self) -> None:
        """The client has gone."""
        if self._stream is not None:
            self._stream.give(ClientGoneError())

    def close(self, reason: str = "abort") -> None:
        """Give everything back; whatever had not ended is aborted."""
        if self._stream is None:
            return
        self._stream.close()
        self._stream = None
        self.service.admission.give_back(len(self.answers))
        for answer in self.answers:
            if not answer.reason:
                answer.end(reason, time.monotonic(), self.arrival)

    @property
    def usage(self) -> dict[str, object]:
        prompt = sum(map(len, self.prompts))
        answer = sum(each.count for each in self.answers)
        cached = sum(each.cached for each in self.answers[:: self.sampling.n])
        return {
            "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


def sampling_of(body: Asked, *, max_tokens: int | None, logprobs: int | None, vocabulary: int) -> SamplingParams:
    """What the engine is asked for. What was not said is OpenAI's default."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    for name, tokens in (("logit_bias", list(bias)), ("stop_token_ids", body.stop_token_ids or [])):
        wrong = next((token for token in tokens if token >= vocabulary), None)
        if wrong is not None:
            raise ApiError(400, f"{name}: there is no token {wrong}; the model has {vocabulary:,}.", param=name)
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise ApiError(400, "min_tokens is more than max_tokens.", param="min_tokens")
    chosen: dict[str, Any] = {
        "min_tokens": body.min_tokens, "temperature": body.temperature, "top_p": body.top_p, "min_p": body.min_p,
        "top_k": max(body.top_k or 0, 0), "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty, "repetition_penalty": body.repetition_penalty, "seed": body.seed,
        "n": body.n, "ignore_eos": body.ignore_eos,
    }  # fmt: skip
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=tuple(dict.fromkeys(stop)),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=bias,
            structured_output=structured_output_of(body),
            **{name: value for name, value in chosen.items() if value is not None},
        )
    except RequestError as error:
        raise ApiError(400, str(error)) from error
