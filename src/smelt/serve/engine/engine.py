"""The engine: requests in, tokens out, step by step; and `generate`, which answers a list of prompts."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from smelt.errors import ModelError, RequestError
from smelt.kvcache.streaming.text import TextStream
from smelt.models.load import load, skeleton
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.beam_search import Beam, BeamSearch, BeamSearchParams
from smelt.serve.engine.blocks import BlockPool
from smelt.serve.engine.config import EngineConfig
from smelt.serve.engine.detokenizer import Detokenizer
from smelt.serve.engine.factory import build, check_kv_cache
from smelt.serve.engine.prefill_pace import PrefillPace
from smelt.serve.engine.prompt_logprobs import PromptLogprob
from smelt.serve.engine.request import ANYONE, Request, RequestId, RequestStatus, Tenant, check_prompt, check_tokens
from smelt.serve.engine.routed_runner import RoutesTokens
from smelt.serve.engine.runner import InflightBatch
from smelt.serve.engine.sampler import Logprobs
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.scheduler import ScheduledBatch
from smelt.serve.engine.step_timer import StepTimer
from smelt.serve.engine.structured_output import GrammarCompiler

logger = logging.getLogger(__name__)
WARMUP_TOKENS = 4  # output tokens of a warmup request


class Event(NamedTuple):
    """A token of a request, or its end, or both."""

    request: Request
    token: int | None = None
    logprobs: Logprobs | None = None
    reason: str = ""  # not empty: the request has finished; `error`: `request.error` says why
    prompt_logprobs: Sequence[PromptLogprob] = ()  # of the next prompt tokens; the first token of a prompt has none


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt."""

    prompt: str
    text: str
    tokens: list[int]
    reason: str  # stop, length or abort
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)  # from the second prompt token on


class Engine:
    """Continuous batching of many requests on one model. `step` runs one iteration, `generate` all that are needed.

    Settings are an `EngineConfig`, or its fields and those of `KVCacheConfig` as keywords.
    """

    def __init__(self, model: Model | str, config: EngineConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise TypeError(f"give an EngineConfig or its fields ({', '.join(settings)}), not both.")
        self.config = config = config or EngineConfig.from_fields(**settings)
        if isinstance(model, str):
            config.check(empty := Model(skeleton(model), source=model))  # before weights are read
            check_kv_cache(empty, config, config.kv_cache.explicit_dtype)
            sharded = config.tensor_parallel_size > 1  # such a model goes to its devices in shards
            model = load(model, device="cpu" if sharded else config.device, packed=not sharded)
        config.check(model)
        self.model = model
        self.max_model_len = config.resolve_max_model_len(model)
        self.vocab_size: int = model.network.config.get_text_config().vocab_size
        self.adapters = Adapters(model, config.adapters, max_loras=config.max_loras, max_lora_rank=config.max_lora_rank)
        self.scheduler, self.runner = build(model, config, self.adapters)
        logger.debug("%s runs with %s, up to %d tokens", model.source or "the model", self.backend, self.max_model_len)
        self.grammar_compiler = GrammarCompiler(model.tokenizer, self.vocab_size, self.runner.eos_token_ids)
        self.step_timer = StepTimer(compiles_on_first_use=model.device.type == "cuda")
        # The context length at which attention costs a token as much as its weights do: about 6 times the hidden size.
        self._context_unit = 6 * int(getattr(model.network.config.get_text_config(), "hidden_size", 1024))
        self._inflight: deque[InflightBatch] = deque()
        self._prefill_pace = PrefillPace(config.target_step_seconds)
        self._num_submitted = 0
        self._counts = dict.fromkeys(
            ("steps", "computed_tokens", "preemptions", "prompt_tokens", "cached_tokens", "generated_tokens"), 0
        )

    @property
    def backend(self) -> str:
        """Return what runs a step, and what it quantizes that the model does not."""
        head, activations = self.config.lm_head_dtype, self.config.activation_dtype
        more = [f"{activations} activations"] if activations is not None else []
        more += [f"{head} LM head"] if head is not None else []
        return ", ".join([self.runner.backend, *more])

    def warmup(self, lengths: Sequence[int] | None = None, progress: Progress | None = None) -> None:
        """Compile and capture before the first request: steps of every batch size, and prompts of these lengths; by
        default those that a GPU needs, and one token on CPU, whose time tells the watchdog what a step may take."""
        progress = progress or NullProgress()
        self.runner.warmup(progress)
        counts = dict(self._counts)
        batches = self._warmup_lengths() if lengths is None else [lengths]
        runs = [(batch, adapter) for batch in batches for adapter in (None, *self.adapters.names[:1])]
        for batch, adapter in progress.track(runs, "warming up"):
            self._run_warmup(batch, adapter)
        self.scheduler.cache_manager.drop_sessions()
        self._counts = counts

    def _warmup_lengths(self) -> list[list[int]]:
        """Return batches of prompt lengths that take every path through the GPU kernels: a short prompt alone; then one
        chunk beside a long prompt, or as many prompts as fill a step."""
        if self.model.device.type != "cuda":
            return [[1]]
        chunk = self.scheduler.prefill_chunk_size
        long = min(2 * chunk + 7, max(self.max_request_tokens - WARMUP_TOKENS, 1))
        return [[24], [chunk, *[long] * -(-self.scheduler.max_num_batched_tokens // long)]]

    def _run_warmup(self, lengths: Sequence[int], adapter: str | None) -> None:
        """Run prompts of these lengths at once, at most as many as may wait."""
        max_length = self.max_request_tokens - WARMUP_TOKENS
        sampling = SamplingParams(max_tokens=WARMUP_TOKENS, temperature=0, ignore_eos=True)
        for length in lengths[: self.scheduler.max_queued if max_length > 0 else 0]:
            salt = secrets.token_bytes(16)  # no request can share it
            self.submit([0] * min(length, max_length), sampling, salt=salt, adapter=adapter)
        while self.busy:
            self.step()

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter, or replace the one of this name, for which there must be room (`max_loras`)."""
        if self.config.tensor_parallel_size > 1:
            raise ModelError("adapters are loaded at the start only on several devices: use one, or restart.")
        self._check_unused(name)
        self.adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter; another can take its place."""
        self._check_unused(name)
        self.adapters.unload(name)

    def _check_unused(self, adapter: str) -> None:
        requests = (*self.scheduler.running, *self.scheduler.waiting)
        if any(request.adapter == adapter for request in requests):
            raise RequestError(f"requests are using the adapter {adapter!r}; wait until they have ended.")

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, name: str = "", priority: int = 0, salt: bytes = b"",
        adapter: str | None = None, tenant: Tenant = ANYONE,
    ) -> list[Request]:  # fmt: skip
        """Queue a prompt: one request per sample, which share the prompt's blocks."""
        self.adapters.check(adapter)
        salt = self.adapters.cache_salt(adapter, salt)
        check_prompt(prompt, self.max_model_len, self.vocab_size)
        self.config.kv_cache.check_sampling(sampling)
        self._check_allowed_tokens(sampling)
        constraint = sampling.structured_output
        matcher = None if constraint is None else self.grammar_compiler.matcher(constraint)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        limit = min(self._token_limit(len(prompt), sampling.max_tokens), self.max_model_len)
        self._num_submitted += 1
        name = name or str(self._num_submitted)
        requests: list[Request] = []
        for sample in range(sampling.n):
            own_sampling = replace(sampling, prompt_logprobs=None) if sample else sampling  # only the first computes it
            request = Request(
                id=RequestId(name, sample), prompt=list(prompt), sampling=own_sampling, limit=limit, seed=seed + sample,
                priority=priority, salt=salt, adapter=adapter, tenant=tenant, parent=requests[0] if requests else None,
                matcher=None if matcher is None else matcher.copy(),
            )  # fmt: skip
            try:
                self.scheduler.add(request)
            except RequestError:
                for sibling in requests:
                    self.abort(sibling)
                raise
            requests.append(request)
        return requests

    def _check_allowed_tokens(self, sampling: SamplingParams) -> None:
        """Refuse allowed tokens that do not exist, or of which `min_tokens` leaves none."""
        check_tokens(sampling.allowed_token_ids, self.vocab_size)
        ends = {*self.runner.eos_token_ids, *sampling.stop_token_ids} if sampling.min_tokens else set()
        if sampling.allowed_token_ids and ends.issuperset(sampling.allowed_token_ids):
            raise RequestError("all of allowed_token_ids end the answer, so min_tokens leaves none to sample.")

    def _token_limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the limit of prompt and output tokens. Without `max_tokens` it is what the context fits; under a token
        cap, where a text may have no end, the output may be as long as the cap."""
        if max_tokens is not None:
            return prompt_tokens + max(max_tokens, 1)  # with 0, the token that the prompt samples is dropped
        cap = self.config.kv_cache.kv_token_cap
        return self.max_model_len if cap is None else prompt_tokens + cap.max_tokens

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens that one request could have."""
        return self.scheduler.cache_manager.max_request_tokens(self.max_model_len)

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.cache_manager.pool

    def abort(self, request: Request) -> None:
        """Finish a request now; its blocks are free at the next step."""
        self.scheduler.finish(request, "abort")

    def stream(self, cap: int = 4096, **options: Any) -> TextStream:
        """Return an endless text stream with a KV cache of `cap` tokens, independent of the requests. It runs the
        network in the caller's thread, so do not step in another thread meanwhile."""
        return TextStream(self.model, cap, **options)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._inflight)

    def state(self) -> dict[str, int]:
        """Return metrics: current gauges, and counters since the start."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            **(cache := self.scheduler.cache_manager.state()),
            "kv_bytes": cache["blocks"] * self.pool.block_bytes,
            "kv_bytes_used": cache["blocks_used"] * self.pool.block_bytes,
            **(self.runner.expert_state() if isinstance(self.runner, RoutesTokens) else {}),
            "kv_tokens": sum(request.num_computed_tokens for request in self.scheduler.running),
            **self._counts,
        }

    def step(self) -> list[Event]:
        """Run one iteration: launch the next batch, then read the oldest one in flight and return what it sampled."""
        self.step_timer.begin()
        try:
            return self._step()
        finally:
            self.step_timer.end()

    def _step(self) -> list[Event]:
        for inflight in self._inflight:
            self.step_timer.add_work(inflight.batch.work(self._context_unit))
        if self._inflight and self._needs_history():
            return self._read(self._inflight.popleft())
        if self.runner.max_inflight_steps or self.model.device.type == "cuda":  # a step is short
            batch, begun = self.scheduler.schedule(), None
        else:
            batch, begun = self.scheduler.schedule(self._prefill_pace.max_tokens), time.monotonic()
        self._count(batch)
        self.step_timer.add_work(batch.work(self._context_unit))
        if batch.chunks:
            self._inflight.append(self.runner.launch(batch))
        events: list[Event] = []
        if len(self._inflight) > (self.runner.max_inflight_steps if batch.chunks else 0):
            events = self._read(self._inflight.popleft())
        if begun is not None:
            self._prefill_pace.record(batch.tokens, time.monotonic() - begun)
        return events

    def _needs_history(self) -> bool:
        """Return whether the next batch can be scheduled only when the tokens in flight are known."""
        return any(request.sampling.needs_history for request in self.scheduler.running)

    def _count(self, batch: ScheduledBatch) -> None:
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += batch.tokens
        self._counts["preemptions"] += len(batch.preempted)
        for chunk in batch.chunks:
            if chunk.request.admitted_at == 0:
                chunk.request.admitted_at = self._counts["steps"]
                chunk.request.started = time.monotonic()
                self._counts["prompt_tokens"] += len(chunk.request.prompt)
                self._counts["cached_tokens"] += chunk.request.num_cached_tokens

    def _read(self, inflight: InflightBatch) -> list[Event]:
        for chunk in inflight.batch.chunks:
            if not chunk.samples_token:
                self.scheduler.on_computed(chunk.request)
        prompt_logprobs = self._read_prompt_logprobs(inflight)
        output = inflight.sampler_output
        events = []
        for request in [request for request in prompt_logprobs if output is None or request not in inflight.requests]:
            events.append(Event(request, prompt_logprobs=prompt_logprobs[request]))
        if output is None:
            return events
        for row, (request, token) in enumerate(zip(inflight.requests, inflight.tokens(), strict=True)):
            if request.state is RequestStatus.FINISHED:  # aborted while the step ran
                continue
            if request.sampling.max_tokens == 0:
                self.scheduler.on_computed(request)
                self.scheduler.finish(request, "length")
                events.append(Event(request, reason="length", prompt_logprobs=prompt_logprobs.get(request, ())))
                continue
            self.scheduler.on_token(request, token)
            if request.matcher is not None:
                request.matcher.accept_token(token)
                request.error = request.matcher.error
            if request.error:
                self.scheduler.finish(request, "error")
                events.append(Event(request, reason="error"))
                continue
            num_logprobs = request.sampling.logprobs
            logprobs = None if num_logprobs is None else output.logprobs(row, num_logprobs)
            reason = self._finish_reason(request, token)
            if reason:
                self.scheduler.finish(request, reason)
            events.append(Event(request, token, logprobs, reason, prompt_logprobs.get(request, ())))
        self._counts["generated_tokens"] += sum(event.token is not None for event in events)
        return events

    @staticmethod
    def _read_prompt_logprobs(inflight: InflightBatch) -> dict[Request, list[PromptLogprob]]:
        """Return log-probabilities of prompt tokens that were not known, which they are after a preemption."""
        new: dict[Request, list[PromptLogprob]] = {}
        for chunk in inflight.prompt_logprobs:
            request, known = chunk.request, chunk.request.num_prompt_logprobs
            if request.state is not RequestStatus.FINISHED:
                logprobs = chunk.read()[max(known + 1 - chunk.first, 0) :]
                request.num_prompt_logprobs += len(logprobs)
                new[request] = logprobs
        return new

    def _finish_reason(self, request: Request, token: int) -> str:
        """Return why a request finishes with this token; empty if it does not."""
        sampling, count = request.sampling, len(request.tokens) - len(request.prompt)
        stops = token in sampling.stop_token_ids or (token in self.runner.eos_token_ids and not sampling.ignore_eos)
        if stops and count >= sampling.min_tokens:
            return "stop"
        if request.matcher is not None and request.matcher.is_terminated:
            return "stop"
        return "length" if len(request.tokens) >= request.limit else ""

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], sampling: SamplingParams | None = None, *,
        adapter: str | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer every prompt (a string or a list of tokens), `sampling.n` times each."""
        sampling = sampling or SamplingParams()
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ModelError("this model has no tokenizer, so it cannot generate text.")
        pending: dict[Request, _PendingOutput] = {}
        for prompt in prompts:
            tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
            for request in self.submit(tokens, sampling, adapter=adapter):
                pending[request] = _PendingOutput(prompt, Detokenizer(tokenizer, tokens, sampling.stop))
        while self.busy:
            for event in self.step():
                if event.request.error:
                    for request in pending:
                        self.abort(request)
                    raise RequestError(event.request.error)
                if pending[event.request].add(event) and not event.reason:
                    self.scheduler.finish(event.request, "stop")
        return [output.build(request) for request, output in pending.items()]

    def beam_search(
        self, prompts: Sequence[Sequence[int]], params: BeamSearchParams, *, ignore_eos: bool = False
    ) -> list[list[Beam]]:
        """Return the best answers to every prompt (a list of tokens), the best first, at most `params.width`."""
        salt = secrets.token_bytes(16)
        searches = [BeamSearch(params, () if ignore_eos else self.runner.eos_token_ids) for _ in prompts]
        while not all(search.done for search in searches):
            requests: dict[int, list[Request]] = {}
            found: dict[Request, Sequence[tuple[int, float]]] = {}
            for index, (prompt, search) in enumerate(zip(prompts, searches, strict=True)):
                if not search.done:
                    sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=search.num_candidates)
                    requests[index] = [
                        self.submit([*prompt, *beam.tokens], sampling, salt=salt)[0] for beam in search.running
                    ]
            while self.busy:
                found |= {event.request: event.logprobs.top for event in self.step() if event.logprobs is not None}
            for index, submitted in requests.items():
                searches[index].advance([found[request] for request in submitted])
        return [search.finished for search in searches]


@dataclass
class _PendingOutput:
    """An answer that is being generated."""

    prompt: str | Sequence[int]
    detokenizer: Detokenizer
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)

    def add(self, event: Event) -> str:
        """Add a token; return why the answer is finished, empty if it is not."""
        tokens = [] if event.token is None else [event.token]
        self.tokens += tokens
        self.prompt_logprobs += event.prompt_logprobs
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        delta = self.detokenizer.update(tokens, event.reason)
        self.text += delta.text
        return delta.reason

    def build(self, request: Request) -> RequestOutput:
        reason = "stop" if self.detokenizer.stopped is not None else request.reason
        prompt = self.prompt if isinstance(self.prompt, str) else ""
        return RequestOutput(
            prompt, self.text, self.tokens, reason, len(request.prompt), request.num_cached_tokens, self.logprobs,
            self.prompt_logprobs,
        )  # fmt: skip
