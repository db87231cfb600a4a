"""The engine: requests in, tokens out, step by step; and the call that answers a list of prompts."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from smelt.errors import ConfigError, ModelError, RequestError
from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.kvcache.eviction.profile import EvictionProfile
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.models.load import load
from smelt.models.model import Model
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.blocks import BlockPool
from smelt.serve.engine.detokenizer import TextStream
from smelt.serve.engine.factory import Sizes, capped_parts, plain_parts, ragged_parts, retention_of, selecting_parts
from smelt.serve.engine.kv_dtype import kind_for
from smelt.serve.engine.request import Request, State
from smelt.serve.engine.runner import Launched
from smelt.serve.engine.sampler import Logprobs
from smelt.serve.engine.sampling import Sampling
from smelt.serve.engine.scheduler import Step
from smelt.serve.engine.structured_output import Forms

if TYPE_CHECKING:
    from smelt.kvcache.streaming.text import TextStream as StreamedText

Kind = TypeVar("Kind")
ENDLESS = 2**30  # tokens that no text has
TRIED = 4  # tokens of an answer that nobody asked for


class Event(NamedTuple):
    """A token of a request, or its end, or both."""

    request: Request
    token: int | None = None
    logprobs: Logprobs | None = None
    reason: str = ""  # not empty: the request has ended


@dataclass(frozen=True)
class Answer:
    """What a prompt was answered with."""

    prompt: str
    text: str
    tokens: list[int]
    reason: str  # stop, length or abort
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[Logprobs] = field(default_factory=list)


class Engine:
    """Many requests at once on one model. `step` runs one iteration; `generate` runs them until all are answered."""

    def __init__(
        self,
        model: Model | str,
        *,
        device: str = "cpu",
        context: int | None = None,  # tokens of prompt and answer together; by default the model's own, at most 8192
        cache_bytes: int | None = None,  # of keys and values
        block: int = 16,  # tokens that lie together in the cache
        batch_tokens: int = 2048,  # computed in a step, at most
        batch_requests: int = 256,
        chunk: int | None = None,  # of a prompt in a step, at most
        queue: int = 4096,
        prefix_cache: bool = True,
        adapters: Mapping[str, str | Path] | None = None,  # low-rank ones by name: folders in PEFT's format
        devices: int = 1,  # that the model is split over
        compiled: bool = True,  # where the network can be; otherwise, or when False, it runs as it is
        kv: EvictionPolicy
        | EvictionProfile
        | str
        | Path
        | None = None,  # heads keep so many tokens: `smelt kv profile`
        select: SparseAttentionConfig
        | Mapping[str, Any]
        | None = None,  # nothing is evicted: pages that a token attends to
        residence: OffloadConfig | Mapping[str, Any] | None = None,  # with `select`: pages in the host's memory
        cap: BoundedCacheConfig
        | int
        | None = None,  # tokens that a request holds, however long its text; the rest is distilled
        kv_type: str | None = None,  # int8, fp8, int4 or model: what keys and values are held in
    ) -> None:
        home = "cpu" if devices > 1 else device  # a model that is split comes to its devices in parts
        self.model = load(model, device=home, packed=devices == 1) if isinstance(model, str) else model
        if self.model.task != "language":
            raise ModelError(f"{self.model.source or 'this model'} is no language model: it cannot generate.")
        self.cap = BoundedCacheConfig(cap) if isinstance(cap, int) else cap
        self.context = _context(self.model, context) if self.cap is None else _endless(context)
        self.vocabulary: int = self.model.network.config.get_text_config().vocab_size
        self.adapters = Adapters(self.model, adapters or {})
        choice = _made(SparseAttentionConfig, select)
        if kv is not None and choice is not None:
            raise ConfigError("heads keep what a profile says, or pages are chosen and nothing is evicted; not both.")
        if self.cap is not None and (kv is not None or choice is not None):
            raise ConfigError("under a cap pots decide what is kept: leave out the profile, or the choice of pages.")
        block = block if choice is None else choice.page_size
        kind = kind_for(self.model, kv_type)
        sizes = Sizes(self.context, cache_bytes, block, batch_tokens, batch_requests, chunk, queue, prefix_cache, kind)
        given = (self.model, sizes, self.adapters, [device] * devices, compiled)
        if self.cap is not None:
            self.scheduler, self.runner = capped_parts(*given, self.cap)
        elif choice is not None:
            self.scheduler, self.runner = selecting_parts(*given, choice, _made(OffloadConfig, residence))
        elif kv is None:
            self.scheduler, self.runner = plain_parts(*given)
        else:
            self.scheduler, self.runner = ragged_parts(*given, retention_of(self.model, kv, block))
        self.forms = Forms(self.model.tokenizer, self.vocabulary, self.runner.ends)
        self._launched: deque[Launched] = deque()
        self._names = 0
        self._counts = dict.fromkeys(
            ("steps", "computed_tokens", "preemptions", "prompt_tokens", "cached_tokens", "generated_tokens"), 0
        )

    def prepare(self, lengths: Sequence[int] | None = None) -> None:
        """What is compiled and captured on first use, before anybody waits for it: a step of every size, and prompts of
        these lengths; by default those that a GPU needs, and on a processor none."""
        self.runner.prepare()
        counts = dict(self._counts)
        for together in self._tried() if lengths is None else [lengths]:
            self._try(together)
        self.scheduler.memory.forget()
        self._counts = counts

    def _tried(self) -> list[list[int]]:
        """Lengths of prompts that take every way through the kernels of a GPU: a short one by itself; then a long one,
        one of a chunk, and where the context is short as many as fill a step."""
        if self.model.device.type != "cuda":
            return []
        chunk, long = self.scheduler.chunk, min(2 * self.scheduler.chunk + 7, max(self.longest - TRIED, 1))
        return [[24], [chunk, *[long] * -(-self.scheduler.most_tokens // long)]]

    def _try(self, lengths: Sequence[int]) -> None:
        """As many of them at once as may wait."""
        most = self.longest - TRIED
        sampling = Sampling(max_tokens=TRIED, temperature=0, ignore_end=True)
        for length in lengths[: self.scheduler.most_waiting if most > 0 else 0]:
            self.submit([0] * min(length, most), sampling, salt=secrets.token_bytes(16))  # nobody is to find these
        while self.busy:
            self.step()

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, *, name: str = "", priority: int = 0, salt: bytes = b"",
        adapter: str | None = None,
    ) -> list[Request]:  # fmt: skip
        """Queue a prompt; as many requests as samples were asked for, which share its blocks."""
        self.adapters.check(adapter)
        _check_prompt(prompt, self.context, self.vocabulary)
        matcher = None if sampling.form is None else self.forms.matcher(sampling.form)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        most = self._most(len(prompt), sampling.max_tokens)
        self._names += 1
        requests: list[Request] = []
        for sample in range(sampling.n):
            request = Request(
                id=f"{name or self._names}-{sample}", prompt=list(prompt), sampling=sampling,
                limit=min(most, self.context), seed=seed + sample, priority=priority, salt=salt, adapter=adapter,
                parent=requests[0] if requests else None, matcher=None if matcher is None else matcher.copy(),
            )  # fmt: skip
            try:
                self.scheduler.add(request)
            except RequestError:
                for sibling in requests:
                    self.abort(sibling)
                raise
            requests.append(request)
        return requests

    def _most(self, prompt: int, asked: int | None) -> int:
        """Tokens of prompt and answer. Who asks for no number gets what the context holds; under a cap, where it may
        have no end, an answer as long as the cap."""
        if asked is None:
            return self.context if self.cap is None else prompt + self.cap.tokens
        return prompt + asked

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer that a request could have."""
        return self.scheduler.memory.holds(self.context)

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.memory.pool

    def abort(self, request: Request) -> None:
        """Its blocks are free at the next step."""
        self.scheduler.end(request, "abort")

    def stream(self, cap: int = 4096, **options: Any) -> StreamedText:
        """Text without an end in memory for `cap` tokens, beside the requests: push to it, ask it at any time. It runs
        the engine's network in the caller's thread, so not while another thread steps."""
        from smelt.kvcache.streaming.text import TextStream as Pot

        return Pot(self.model, cap, **options)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._launched)

    def state(self) -> dict[str, int]:
        """Numbers for an operator: what there is now, and what was counted since the start."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            **self.scheduler.memory.state(),
            **self._counts,
        }

    def step(self) -> list[Event]:
        """One iteration: the next step is launched, then the oldest one under way is read. What that gave."""
        if self._launched and self._needs_history():
            return self._read(self._launched.popleft())
        step = self.scheduler.schedule()
        self._count(step)
        if step.pieces:
            self._launched.append(self.runner.launch(step))
        if len(self._launched) > (self.runner.ahead if step.pieces else 0):
            return self._read(self._launched.popleft())
        return []

    def _needs_history(self) -> bool:
        """Whether the next step may only be planned when the tokens under way are known."""
        return any(request.sampling.needs_history for request in self.scheduler.running)

    def _count(self, step: Step) -> None:
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += step.tokens
        self._counts["preemptions"] += len(step.preempted)
        for piece in step.pieces:
            if piece.request.admitted_at == 0:
                piece.request.admitted_at = self._counts["steps"]
                piece.request.started = time.monotonic()
                self._counts["prompt_tokens"] += len(piece.request.prompt)
                self._counts["cached_tokens"] += piece.request.cached

    def _read(self, launched: Launched) -> list[Event]:
        for piece in launched.step.pieces:
            if not piece.gives:
                self.scheduler.computed(piece.request)
        drawn = launched.drawn
        if drawn is None:
            return []
        events = []
        for row, (request, token) in enumerate(zip(launched.giving, launched.tokens(), strict=True)):
            if request.state is State.ENDED:  # aborted while the step ran
                continue
            self.scheduler.received(request, token)
            if request.matcher is not None:
                request.matcher.take(token)
            asked = request.sampling.logprobs
            logprobs = None if asked is None else drawn.logprobs(row, asked)
            reason = self._reason(request, token)
            if reason:
                self.scheduler.end(request, reason)
            events.append(Event(request, token, logprobs, reason))
        self._counts["generated_tokens"] += len(events)
        return events

    def _reason(self, request: Request, token: int) -> str:
        """Why a request ends with this token, if it does."""
        sampling, count = request.sampling, len(request.tokens) - len(request.prompt)
        ends = token in sampling.stop_ids or (token in self.runner.ends and not sampling.ignore_end)
        if ends and count >= sampling.min_tokens:
            return "stop"
        if request.matcher is not None and request.matcher.ended:
            return "stop"
        return "length" if len(request.tokens) >= request.limit else ""

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], sampling: Sampling | None = None, *,
        adapter: str | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Answer every prompt (texts, or lists of tokens), as many times as `n` of the sampling says."""
        sampling = sampling or Sampling()
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ModelError("this model has no tokenizer: text cannot be made with it.")
        answers: dict[Request, _Answering] = {}
        for prompt in prompts:
            tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
            for request in self.submit(tokens, sampling, adapter=adapter):
                answers[request] = _Answering(prompt, TextStream(tokenizer, tokens, sampling.stop))
        while self.busy:
            for event in self.step():
                answering = answers[event.request]
                answering.take(event)
                if answering.stream.stopped is not None and not event.reason:
                    self.scheduler.end(event.request, "stop")
        return [answering.answer(request) for request, answering in answers.items()]


@dataclass
class _Answering:
    """An answer that is coming."""

    prompt: str | Sequence[int]
    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def take(self, event: Event) -> None:
        if event.token is not None:
            self.tokens.append(event.token)
            if event.logprobs is not None:
                self.logprobs.append(event.logprobs)
            self.text += self.stream.push([event.token])
        if event.reason:
            self.text += self.stream.finish()

    def answer(self, request: Request) -> Answer:
        reason = "stop" if self.stream.stopped is not None else request.reason
        prompt = self.prompt if isinstance(self.prompt, str) else ""
        return Answer(prompt, self.text, self.tokens, reason, len(request.prompt), request.cached, self.logprobs)


def _check_prompt(prompt: Sequence[int], context: int, vocabulary: int) -> None:
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token.")
    if len(prompt) >= context:
        raise RequestError(f"the prompt has {len(prompt):,} tokens; with an answer it must fit into {context:,}.")
    wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise RequestError(f"there is no token {wrong}; the model has {vocabulary:,}.")


def _made(kind: type[Kind], given: Kind | Mapping[str, Any] | None) -> Kind | None:
    """From its fields, as they come from another process."""
    return kind(**given) if isinstance(given, Mapping) else given


def _context(model: Model, asked: int | None) -> int:
    most = getattr(model.network.config.get_text_config(), "max_position_embeddings", None) or 8192
    if asked is None:
        return min(int(most), 8192)
    if not 2 <= asked <= most:
        raise RequestError(f"a context of {asked:,} tokens is not possible; the model has {most:,} positions.")
    return asked


def _endless(asked: int | None) -> int:
    """Under a cap: positions do not end, so that only who asks for a limit gets one that is ever met."""
    if asked is not None and asked < 2:
        raise RequestError(f"a context of {asked:,} tokens has no room for a prompt and an answer; give at least 2.")
    return ENDLESS if asked is None else asked
