"""Generate the answers to a request: what completions and chat completions share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smelt.errors import RequestError
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.errors import ApiError, ClientGoneError
from smelt.serve.server.request_record import current_record
from smelt.serve.server.schemas import GenerationRequest
from smelt.serve.server.service import Service
from smelt.serve.server.structured import parse_structured_output
from smelt.serve.server.tokenization import AsyncTokenizer
from smelt.serve.server.unsupported import check_supported
from smelt.serve.worker.client import TokenEvent, TokenStream, WorkerDiedError

EVICTING_OPTIONS = ("kv_profile", "kv_token_cap")  # of the engine: they keep only a part of a prompt
PING_SECONDS = 15.0  # of silence, after which a streaming client gets a ping


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a sampled token, and the most likely tokens with theirs."""

    token: int
    own: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class PromptTokenLogprob(TokenLogprob):
    """The same of a prompt token, with its rank among all tokens, from 1 on."""

    rank: int


@dataclass
class Delta:
    """The new part of one answer. All deltas of an answer concatenate to it."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""

    @property
    def total_logprob(self) -> float:
        return sum(logprob.own for logprob in self.logprobs)

    def extend(self, other: Delta) -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.reason = other.reason


class AnswerState:
    """One answer in progress: its text so far, and its times."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        service: Service,
        sampling: SamplingParams,
        keep_stop: bool,
        markers: Collection[int],
        hidden_ends: Collection[int],
    ) -> None:
        self.index, self.prompt, self.metrics = index, prompt, service.metrics
        self.prompt_logprobs: list[PromptTokenLogprob] = []  # from the second prompt token on; of the first sample only
        self.text = service.tokenizer.detokenizer(prompt, sampling.stop, keep_stop, markers)
        self.hidden_ends = hidden_ends  # tokens that are no part of the text if they end the answer
        self.count, self.cached, self.reason = 0, 0, ""
        self.started = self.first = self.last = 0.0

    def add(self, events: Sequence[TokenEvent], arrival: float) -> Delta:
        """Turn new tokens into text; drop what comes after a stop string."""
        now = time.monotonic()
        for event in events:
            for own, rank, top in event.prompt_logprobs:
                token = self.prompt[len(self.prompt_logprobs) + 1]
                self.prompt_logprobs.append(PromptTokenLogprob(token, own, list(top), rank))
        new = [(event.token, event) for event in events if event.token is not None]
        shown = [token for token, _ in new]
        ended = events[-1].reason == "stop" and events[-1].token in self.hidden_ends
        update = self.text.update(shown[:-1] if ended else shown, events[-1].reason)
        delta = Delta(self.index, update.text, reason=update.reason)
        for token, event in new[: update.num_tokens + ended]:
            self._record_times(event, now, arrival)
            self.count += 1
            delta.tokens.append(token)
            if event.logprobs is not None:
                delta.logprobs.append(TokenLogprob(token, *event.logprobs))
        if delta.reason:
            self.finish(delta.reason, now, arrival)
        return delta

    def finish(self, reason: str, now: float, arrival: float) -> None:
        self.reason = reason
        metrics = self.metrics
        metrics.finished.inc(label=reason)
        if reason in ("stop", "length"):
            metrics.e2e_latency.observe(now - arrival)
            metrics.request_generation_tokens.observe(self.count)
            if self.count:
                metrics.inference_time.observe(now - self.started)
                metrics.decode_time.observe(now - self.first)
            if self.count > 1:
                metrics.time_per_output_token.observe((now - self.first) / (self.count - 1))

    def _record_times(self, event: TokenEvent, now: float, arrival: float) -> None:
        self.metrics.generated_tokens.inc()
        if self.count:
            self.metrics.inter_token_latency.observe(now - self.last)
        else:
            self.cached, self.first = event.num_cached_tokens, now
            self.started = max(event.started, arrival)
            self.metrics.time_to_first_token.observe(now - arrival)
            self.metrics.queue_time.observe(self.started - arrival)
            self.metrics.prefill_time.observe(now - self.started)
        self.last = now


class Generation:
    """One request in progress; `markers` are special tokens that its answers show.

    `start` refuses what cannot be served; after it, `close` must be called.
    """

    def __init__(
        self,
        service: Service,
        prompts: list[list[int]],
        request: GenerationRequest,
        sampling: SamplingParams,
        key: bytes,
        markers: Collection[int] = (),
    ) -> None:
        self.service, self.prompts, self.sampling = service, prompts, sampling
        self.num_returned = request.n or 1  # answers per prompt: the best of those that are sampled
        self.arrival, self.key = time.monotonic(), key
        service.check_priority(key, request.priority)
        self.priority = request.priority or 0
        self.constraint_param = "response_format"  # the field that an invalid constraint comes from
        self.adapter = service.adapter_name(request.model)
        self.salt = hashlib.sha256(key + b"\0" + (request.cache_salt or "").encode()).digest()
        keep_stop = bool(request.include_stop_str_in_output)
        hidden_ends: Collection[int] = ()
        if request.skip_special_tokens is False:
            hidden_ends = () if keep_stop else service.tokenizer.special_ids.difference(markers)
            markers = service.tokenizer.special_ids
        n = sampling.n
        self.answers = [
            AnswerState(index * n + sample, prompt, service, sampling, keep_stop, markers, hidden_ends)
            for index, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        self._bad_words = request.bad_words or []
        self._stream: TokenStream | None = None

    async def start(self) -> None:
        if self._bad_words:
            words = await self.service.tokenizer.bad_words(self._bad_words)
            self.sampling = replace(self.sampling, bad_words=words)
        for prompt in self.prompts:
            self.service.check_prompt(prompt, self.sampling)
        if self.sampling.prompt_logprobs is not None and any(map(self.service.settings.engine.get, EVICTING_OPTIONS)):
            message = "log-probabilities of a prompt need a complete KV cache, which this server does not keep."
            raise ApiError(400, message, param="prompt_logprobs", code="unsupported")
        admission, metrics = self.service.admission, self.service.metrics
        admission.acquire(len(self.answers), self.key)
        try:
            self.service.rate_limits.admit_tokens(self.key, sum(map(len, self.prompts)))
            self._stream = self._start_stream()
        except ApiError:
            admission.release(len(self.answers), self.key)
            raise
        except WorkerDiedError:
            admission.release(len(self.answers), self.key)
            message = "the engine is not running now; try again soon."
            raise ApiError(503, message, code="engine_down", headers={"retry-after": "5"}) from None
        metrics.request_n.observe(self.sampling.n)
        if self.sampling.max_tokens is not None:
            metrics.request_max_tokens.observe(self.sampling.max_tokens)
        for prompt in self.prompts:
            metrics.request_prompt_tokens.observe(len(prompt))
            metrics.prompt_tokens.inc(len(prompt))
        if self.sampling.structured_output is not None:
            await self._wait_for_grammar()

    async def _wait_for_grammar(self) -> None:
        """Wait until the engine has compiled the constraint: once a stream has begun, a status of 400 is too late."""
        assert self._stream is not None
        seconds = self.service.limits.grammar_timeout
        try:
            await self._stream.accepted(seconds)
        except TimeoutError:
            self.close()
            message = f"the structured output was not compiled within {seconds:g} seconds; simplify it, or try again."
            raise ApiError(400, message, param=self.constraint_param) from None
        except RequestError as error:
            self.close()
            raise ApiError(400, str(error), param=self.constraint_param) from error
        except WorkerDiedError:
            self.close("error")
            raise
        except BaseException:  # the client is gone
            self.close()
            raise

    def _start_stream(self) -> TokenStream:
        return self._submit(self.prompts, self.sampling)

    def _submit(self, prompts: list[list[int]], sampling: SamplingParams) -> TokenStream:
        return self.service.require_engine().stream(
            prompts, sampling, priority=self.priority, salt=self.salt, adapter=self.adapter,
            tenant=self.service.tenant(self.key),
        )  # fmt: skip

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Yield new deltas as they arrive; an empty list after a long silence."""
        deadline = self.arrival + self.service.limits.request_timeout
        while any(not answer.reason for answer in self.answers):
            events = await self._next_events(deadline)
            new: dict[int, list[TokenEvent]] = {}
            for event in events:
                if not self.answers[event.answer].reason:
                    new.setdefault(event.answer, []).append(event)
            deltas = [self.answers[index].add(events, self.arrival) for index, events in new.items()]
            for delta in deltas:
                if delta.reason and not new[delta.index][-1].reason and self._stream is not None:
                    self._stream.abort(delta.index)
            yield deltas

    async def _next_events(self, deadline: float) -> list[TokenEvent]:
        """Return new events; none after a long silence."""
        assert self._stream is not None
        left = deadline - time.monotonic()
        if left <= 0:
            raise ApiError(504, f"the request took longer than {self.service.limits.request_timeout:g} seconds.")
        return await self._stream.next(min(PING_SECONDS, left))

    def select(self, answers: list[Delta]) -> list[Delta]:
        """Return the answers to respond with: of each prompt, those with the highest total log-probability."""
        n, best_of = self.num_returned, self.sampling.n
        if n == best_of:
            return answers
        selected: list[Delta] = []
        for first in range(0, len(answers), best_of):
            ranked = sorted(answers[first : first + best_of], key=lambda answer: -answer.total_logprob)
            selected += ranked[:n]
        return selected

    def disconnect(self) -> None:
        """Stop: the client has disconnected."""
        if self._stream is not None:
            self._stream.push(ClientGoneError())

    def close(self, reason: str = "abort") -> None:
        """Release everything; abort what has not finished."""
        if self._stream is None:
            return
        self._stream.close()
        self._stream = None
        self.service.admission.release(len(self.answers), self.key)
        self.service.rate_limits.charge_tokens(self.key, sum(answer.count for answer in self.answers))
        for answer in self.answers:
            if not answer.reason:
                answer.finish(reason, time.monotonic(), self.arrival)
        self._fill_record()

    def _fill_record(self) -> None:
        """Tell the access log and traces what the request has used."""
        record, answered = current_record(), [answer for answer in self.answers if answer.count]
        record.model = self.adapter or self.service.name
        record.prompt_tokens = sum(map(len, self.prompts))
        record.output_tokens = sum(answer.count for answer in self.answers)
        record.finish_reason = ",".join(dict.fromkeys(answer.reason for answer in self.answers))
        if answered:
            record.queue_time = max(0.0, min(answer.started for answer in answered) - record.arrival)
            record.time_to_first_token = min(answer.first for answer in answered) - record.arrival

    def prompt_logprobs(self, index: int) -> list[PromptTokenLogprob | None]:
        """Return the log-probabilities of an answer's prompt, which its first sample has; the first token has none."""
        return [None, *self.answers[index - index % self.sampling.n].prompt_logprobs]

    @property
    def usage(self) -> dict[str, object]:
        return self._usage(sum(answer.count for answer in self.answers))

    @property
    def initial_usage(self) -> dict[str, object]:
        """The usage before the first generated token."""
        return self._usage(0)

    def _usage(self, completion: int) -> dict[str, object]:
        prompt = sum(map(len, self.prompts))
        cached = sum(answer.cached for answer in self.answers[:: self.sampling.n])
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


def check_generation(service: Service, body: GenerationRequest, prompts: int = 1) -> None:
    """Refuse a request before any work is done for it: for another model, for text from an encoder, with fields that
    are not supported, or with more answers than there is room for."""
    service.check_model(body.model)
    service.require_engine()
    check_supported(body)
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise ApiError(400, "best_of: it must be at least n.", param="best_of")
    if body.stream and (body.best_of or 1) > (body.n or 1):
        raise ApiError(400, "best_of: the best answers are known at the end; leave out stream.", param="best_of")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs is not sent in a stream; leave out stream, or use echo with logprobs."
        raise ApiError(400, message, param="prompt_logprobs")
    answers, limit = prompts * (body.best_of or body.n or 1), service.limits.max_sequences
    if answers > limit:
        message = f"prompts times n is {answers:,}; a request may ask for at most {limit:,} answers."
        raise ApiError(400, message, param="n")
    service.admission.check(answers)


def truncate_prompt(
    tokens: list[int], body: GenerationRequest, service: Service, sampling: SamplingParams
) -> list[int]:
    """Return the last `truncate_prompt_tokens` tokens, if a request wants that, or the first; -1: as many as fit."""
    count = body.truncate_prompt_tokens
    if count is None:
        return tokens
    if count == 0:
        message = "truncate_prompt_tokens: at least one token must stay."
        raise ApiError(400, message, param="truncate_prompt_tokens")
    longest = min(service.max_model_len - max(sampling.max_tokens or 1, 1), service.tokenizer.max_tokens)
    kept = max(longest if count == -1 else count, 1)
    return tokens[:kept] if body.truncation_side == "right" else tokens[-kept:]


def build_sampling_params(
    body: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, vocab_size: int,
    prompt_logprobs: int | None = None,
) -> SamplingParams:  # fmt: skip
    """Convert a request to sampling parameters; fields left out have OpenAI's defaults."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    for name, tokens in (
        ("logit_bias", list(bias)),
        ("stop_token_ids", body.stop_token_ids or []),
        ("allowed_token_ids", body.allowed_token_ids or []),
    ):
        invalid = next((token for token in tokens if token >= vocab_size), None)
        if invalid is not None:
            message = f"{name}: there is no token {invalid}; the vocabulary has {vocab_size:,} tokens."
            raise ApiError(400, message, param=name)
    if body.allowed_token_ids and body.bad_words:
        raise ApiError(400, "allowed_token_ids and bad_words: use only one of them.", param="bad_words")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise ApiError(400, "min_tokens is larger than max_tokens.", param="min_tokens")
    optional: dict[str, Any] = {
        "min_tokens": body.min_tokens, "temperature": body.temperature, "top_p": body.top_p, "min_p": body.min_p,
        "top_k": max(body.top_k or 0, 0), "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty, "repetition_penalty": body.repetition_penalty, "seed": body.seed,
        "n": body.best_of or body.n, "ignore_eos": body.ignore_eos,
    }  # fmt: skip
    if (body.best_of or 1) > (body.n or 1):
        logprobs = logprobs or 0  # they decide which answers are the best
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=tuple(dict.fromkeys(stop)),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=bias,
            allowed_token_ids=tuple(body.allowed_token_ids or ()),
            structured_output=parse_structured_output(body),
            **{name: value for name, value in optional.items() if value is not None},
        )
    except RequestError as error:
        raise ApiError(400, str(error)) from error


def logprobs_body(tokenizer: AsyncTokenizer, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the log-probabilities of generated tokens as OpenAI's chat completions and responses do."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text, content = tokenizer.token(token)
        return {"token": text, "logprob": value, "bytes": list(content)}

    return [
        {**entry(logprob.token, logprob.own), "top_logprobs": [entry(*pair) for pair in logprob.top]}
        for logprob in logprobs
    ]


def prompt_logprobs_body(
    tokenizer: AsyncTokenizer, logprobs: list[PromptTokenLogprob | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return the log-probabilities of a prompt as vLLM does: of each token and the `count` most likely, by token id."""

    def entries(logprob: PromptTokenLogprob) -> dict[str, dict[str, Any]]:
        ranked = [(logprob.token, logprob.own, logprob.rank)]
        ranked += [(token, value, rank) for rank, (token, value) in enumerate(logprob.top[:count], 1)]
        return {
            str(token): {"logprob": value, "rank": rank, "decoded_token": tokenizer.token(token)[0]}
            for token, value, rank in ranked
        }

    return [None if logprob is None else entries(logprob) for logprob in logprobs]
