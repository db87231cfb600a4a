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
from smelt.serve.engine.detokenizer import Detokenizer
from smelt.serve.engine.factory import Sizes, capped_parts, plain_parts, ragged_parts, retention_of, selecting_parts
from smelt.serve.engine.kv_dtype import resolve_kv_cache_dtype
from smelt.serve.engine.request import Request, RequestStatus
from smelt.serve.engine.runner import InflightBatch
from smelt.serve.engine.sampler import Logprobs
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.scheduler import ScheduledBatch
from smelt.serve.engine.structured_output import GrammarCompiler

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
class RequestOutput:
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
        max_model_len: int
        | None = None,  # tokens of prompt and answer together; by default the model's own, at most 8192
        kv_cache_bytes: int | None = None,  # of keys and values
        block_size: int = 16,  # tokens that lie together in the cache
        max_num_batched_tokens: int = 2048,  # computed in a step, at most
        max_num_seqs: int = 256,
        prefill_chunk_size: int | None = None,  # of a prompt in a step, at most
        max_queued: int = 4096,
        prefix_cache: bool = True,
        adapters: Mapping[str, str | Path] | None = None,  # low-rank ones by name: folders in PEFT's format
        tensor_parallel_size: int = 1,  # that the model is split over
        compiled: bool = True,  # where the network can be; otherwise, or when False, it runs as it is
        kv_profile: EvictionPolicy
        | EvictionProfile
        | str
        | Path
        | None = None,  # heads keep so many tokens: `smelt kv profile`
        page_selection: SparseAttentionConfig
        | Mapping[str, Any]
        | None = None,  # nothing is evicted: pages that a token attends to
        kv_offload: OffloadConfig | Mapping[str, Any] | None = None,  # with `select`: pages in the host's memory
        kv_token_cap: BoundedCacheConfig
        | int
        | None = None,  # tokens that a request holds, however long its text; the rest is distilled
        kv_cache_dtype: str | None = None,  # int8, fp8, int4 or model: what keys and values are held in
    ) -> None:
        home = "cpu" if tensor_parallel_size > 1 else device  # a model that is split comes to its devices in parts
        self.model = load(model, device=home, packed=tensor_parallel_size == 1) if isinstance(model, str) else model
        if self.model.task != "language":
            raise ModelError(f"{self.model.source or 'this model'} is no language model: it cannot generate.")
        self.kv_token_cap = BoundedCacheConfig(kv_token_cap) if isinstance(kv_token_cap, int) else kv_token_cap
        self.max_model_len = (
            _context(self.model, max_model_len) if self.kv_token_cap is None else _endless(max_model_len)
        )
        self.vocab_size: int = self.model.network.config.get_text_config().vocab_size
        self.adapters = Adapters(self.model, adapters or {})
        choice = _made(SparseAttentionConfig, page_selection)
        if kv_profile is not None and choice is not None:
            raise ConfigError("heads keep what a profile says, or pages are chosen and nothing is evicted; not both.")
        if self.kv_token_cap is not None and (kv_profile is not None or choice is not None):
            raise ConfigError("under a cap pots decide what is kept: leave out the profile, or the choice of pages.")
        block_size = block_size if choice is None else choice.page_size
        kind = resolve_kv_cache_dtype(self.model, kv_cache_dtype)
        sizes = Sizes(
            self.max_model_len,
            kv_cache_bytes,
            block_size,
            max_num_batched_tokens,
            max_num_seqs,
            prefill_chunk_size,
            max_queued,
            prefix_cache,
            kind,
        )
        given = (self.model, sizes, self.adapters, [device] * tensor_parallel_size, compiled)
        if self.kv_token_cap is not None:
            self.scheduler, self.runner = capped_parts(*given, self.kv_token_cap)
        elif choice is not None:
            self.scheduler, self.runner = selecting_parts(*given, choice, _made(OffloadConfig, kv_offload))
        elif kv_profile is None:
            self.scheduler, self.runner = plain_parts(*given)
        else:
            self.scheduler, self.runner = ragged_parts(*given, retention_of(self.model, kv_profile, block_size))
        self.grammar_compiler = GrammarCompiler(self.model.tokenizer, self.vocab_size, self.runner.eos_token_ids)
        self._launched: deque[InflightBatch] = deque()
        self._names = 0
        self._counts = dict.fromkeys(
            ("steps", "computed_tokens", "preemptions", "prompt_tokens", "cached_tokens", "generated_tokens"), 0
        )

    def warmup(self, lengths: Sequence[int] | None = None) -> None:
        """What is compiled and captured on first use, before anybody waits for it: a step of every size, and prompts of
        these lengths; by default those that a GPU needs, and on a processor none."""
        self.runner.warmup()
        counts = dict(self._counts)
        for together in self._warmup_lengths() if lengths is None else [lengths]:
            self._run_warmup(together)
        self.scheduler.cache_manager.forget()
        self._counts = counts

    def _warmup_lengths(self) -> list[list[int]]:
        """Lengths of prompts that take every way through the kernels of a GPU: a short one by itself; then a long one,
        one of a chunk, and where the context is short as many as fill a step."""
        if self.model.device.type != "cuda":
            return []
        chunk, long = (
            self.scheduler.prefill_chunk_size,
            min(2 * self.scheduler.prefill_chunk_size + 7, max(self.max_request_tokens - TRIED, 1)),
        )
        return [[24], [chunk, *[long] * -(-self.scheduler.max_num_batched_tokens // long)]]

    def _run_warmup(self, lengths: Sequence[int]) -> None:
        """As many of them at once as may wait."""
        most = self.max_request_tokens - TRIED
        sampling = SamplingParams(max_tokens=TRIED, temperature=0, ignore_eos=True)
        for length in lengths[: self.scheduler.max_queued if most > 0 else 0]:
            self.submit([0] * min(length, most), sampling, salt=secrets.token_bytes(16))  # nobody is to find these
        while self.busy:
            self.step()

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, name: str = "", priority: int = 0, salt: bytes = b"",
        adapter: str | None = None,
    ) -> list[Request]:  # fmt: skip
        """Queue a prompt; as many requests as samples were asked for, which share its blocks."""
        self.adapters.check(adapter)
        _check_prompt(prompt, self.max_model_len, self.vocab_size)
        matcher = (
            None if sampling.structured_output is None else self.grammar_compiler.matcher(sampling.structured_output)
        )
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        most = self._most(len(prompt), sampling.max_tokens)
        self._names += 1
        requests: list[Request] = []
        for sample in range(sampling.n):
            request = Request(
                id=f"{name or self._names}-{sample}", prompt=list(prompt), sampling=sampling,
                limit=min(most, self.max_model_len), seed=seed + sample, priority=priority, salt=salt, adapter=adapter,
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
            return self.max_model_len if self.kv_token_cap is None else prompt + self.kv_token_cap.max_tokens
        return prompt + asked

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and answer that a request could have."""
        return self.scheduler.cache_manager.holds(self.max_model_len)

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.cache_manager.pool

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
            **self.scheduler.cache_manager.state(),
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
        if len(self._launched) > (self.runner.max_inflight_steps if step.pieces else 0):
            return self._read(self._launched.popleft())
        return []

    def _needs_history(self) -> bool:
        """Whether the next step may only be planned when the tokens under way are known."""
        return any(request.sampling.needs_history for request in self.scheduler.running)

    def _count(self, step: ScheduledBatch) -> None:
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += step.tokens
        self._counts["preemptions"] += len(step.preempted)
        for piece in step.pieces:
            if piece.request.admitted_at == 0:
                piece.request.admitted_at = self._counts["steps"]
                piece.request.started = time.monotonic()
                self._counts["prompt_tokens"] += len(piece.request.prompt)
                self._counts["cached_tokens"] += piece.request.num_cached_tokens

    def _read(self, launched: InflightBatch) -> list[Event]:
        for piece in launched.step.pieces:
            if not piece.samples_token:
                self.scheduler.on_computed(piece.request)
        drawn = launched.drawn
        if drawn is None:
            return []
        events = []
        for row, (request, token) in enumerate(zip(launched.giving, launched.tokens(), strict=True)):
            if request.state is RequestStatus.FINISHED:  # aborted while the step ran
                continue
            self.scheduler.on_token(request, token)
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
        ends = token in sampling.stop_token_ids or (token in self.runner.eos_token_ids and not sampling.ignore_eos)
        if ends and count >= sampling.min_tokens:
            return "stop"
        if request.matcher is not None and request.matcher.ended:
            return "stop"
        return "length" if len(request.tokens) >= request.limit else ""

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], sampling: SamplingParams | None = None, *,
        adapter: str | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """RequestOutput every prompt (texts, or lists of tokens), as many times as `n` of the sampling says."""
        sampling = sampling or SamplingParams()
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ModelError("this model has no tokenizer: text cannot be made with it.")
        answers: dict[Request, _Answering] = {}
        for prompt in prompts:
            tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
            for request in self.submit(tokens, sampling, adapter=adapter):
                answers[request] = _Answering(prompt, Detokenizer(tokenizer, tokens, sampling.stop))
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
    stream: Detokenizer
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

    def answer(self, request: Request) -> RequestOutput:
        reason = "stop" if self.stream.stopped is not None else request.reason
        prompt = self.prompt if isinstance(self.prompt, str) else ""
        return RequestOutput(
            prompt, self.text, self.tokens, reason, len(request.prompt), request.num_cached_tokens, self.logprobs
        )


def _check_prompt(prompt: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token.")
    if len(prompt) >= max_model_len:
        raise RequestError(f"the prompt has {len(prompt):,} tokens; with an answer it must fit into {max_model_len:,}.")
    wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"there is no token {wrong}; the model has {vocab_size:,}.")


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
