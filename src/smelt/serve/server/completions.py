"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.beam_generation import create_generation
from smelt.serve.server.generation import (
    Delta,
    Generation,
    TokenLogprob,
    build_sampling_params,
    check_generation,
    prompt_logprobs_body,
    truncate_prompt,
)
from smelt.serve.server.schemas import CompletionRequest
from smelt.serve.server.service import Service
from smelt.serve.server.stream import Chunk, respond
from smelt.serve.server.tokenization import INLINE_CHARACTERS

router = APIRouter()
DEFAULT_MAX_TOKENS = 16
_NOT_ASKED = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "token_ids"))  # null, as in vLLM's answers


@router.post("/completions", include_in_schema=False)
@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts, in one response or as server-sent events."""
    service: Service = request.app.state.service
    inputs = _inputs(body)
    check_generation(service, body, len(inputs))
    sampling = build_sampling_params(
        body, max_tokens=DEFAULT_MAX_TOKENS if body.token_limit is None else body.token_limit, logprobs=body.logprobs,
        prompt_logprobs=max(counts) if (counts := _prompt_logprobs(body)) else None,
        vocab_size=service.vocab_size,
    )  # fmt: skip
    texts, prompts = await _tokenize(service, inputs, sampling, body)
    generation = create_generation(service, prompts, body, sampling, request.state.key)
    writer = _Writer(service, body, generation, texts if body.echo else [""] * len(prompts))
    return await respond(request, generation, writer, body.stream)


def _inputs(body: CompletionRequest) -> list[str | list[int]]:
    content: Any = body.prompt
    return content if isinstance(content, list) and not isinstance(content[0], int) else [content]


async def _tokenize(
    service: Service, inputs: list[str | list[int]], sampling: SamplingParams, body: CompletionRequest
) -> tuple[list[str], list[list[int]]]:
    """Return every prompt as text, which only `echo` needs, and as tokens; refuse the first that does not fit."""
    texts: list[str] = []
    prompts: list[list[int]] = []
    inline = sum(map(len, inputs)) <= INLINE_CHARACTERS
    for prompt in inputs:
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            tokens = await service.tokenizer.encode(prompt, special=special, inline=inline)
        else:
            tokens = prompt
        kept = truncate_prompt(tokens, body, service, sampling)
        service.check_prompt(kept, sampling)
        prompts.append(kept)
        if isinstance(prompt, str) and len(kept) == len(tokens):
            texts.append(prompt)
        else:
            texts.append(await service.tokenizer.decode(kept) if body.echo else "")
    return texts, prompts


def _prompt_logprobs(body: CompletionRequest) -> list[int]:
    """Return how many likely tokens of each prompt token `prompt_logprobs` and `echo` with `logprobs` ask for."""
    counts = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return [count for count in counts if count is not None]


class _Writer:
    """Write the responses to one request."""

    def __init__(self, service: Service, body: CompletionRequest, generation: Generation, echoes: list[str]) -> None:
        self.tokenizer, self.body, self.generation, self.echoes = service.tokenizer, body, generation, echoes
        self.head = {
            "id": f"cmpl-{body.request_id or uuid.uuid4().hex}", "object": "text_completion",
            "created": int(time.time()), "model": body.model or service.name,
            "system_fingerprint": service.system_fingerprint,
        }  # fmt: skip
        self.echoes_logprobs = bool(body.echo) and body.logprobs is not None
        self.lengths = [0 if self.echoes_logprobs else len(self._echo(answer.index)) for answer in generation.answers]

    def response(self, answers: list[Delta]) -> dict[str, Any]:
        choices = [{**_NOT_ASKED, **self._choice(answer, self._echo(answer.index), first=True)} for answer in answers]
        for position, choice in enumerate(choices):
            if (count := self.body.prompt_logprobs) is not None:
                logprobs = self.generation.prompt_logprobs(choice["index"])
                choice["prompt_logprobs"] = prompt_logprobs_body(self.tokenizer, logprobs, count)
            choice["index"] = position  # of several samples, the best may be any
        return {**self.head, "choices": choices, "usage": self.generation.usage}

    async def chunks(self) -> AsyncIterator[Chunk]:
        options = self.body.stream_options
        usage_in_chunks = options is not None and bool(options.include_usage and options.continuous_usage_stats)
        echoed: set[int] = set()
        async for deltas in self.generation.deltas():
            yield None
            for delta in deltas:
                if not delta.tokens and not delta.reason:  # log-probabilities of a part of the prompt
                    continue
                first = delta.index not in echoed
                echo = self._echo(delta.index) if first else ""
                echoed.add(delta.index)
                if delta.text or delta.logprobs or delta.reason or echo or self.body.return_token_ids:
                    usage = {"usage": self.generation.usage} if usage_in_chunks else {}
                    yield {**self.head, "choices": [self._choice(delta, echo, first)], **usage}
        if options is not None and options.include_usage:
            yield {**self.head, "choices": [], "usage": self.generation.usage}

    def _choice(self, delta: Delta, echo: str, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index, "text": echo + delta.text, "logprobs": self._logprobs(delta, first),
            "finish_reason": delta.reason or None,
        }  # fmt: skip
        if self.body.return_token_ids:
            choice["token_ids"] = delta.tokens
            if first:
                choice["prompt_token_ids"] = self.generation.prompts[delta.index // self.generation.sampling.n]
        return choice

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.generation.sampling.n]

    def _logprobs(self, delta: Delta, first: bool) -> dict[str, Any] | None:
        """Return the log-probabilities of a delta; with `echo`, those of the prompt before the first."""
        if self.body.logprobs is None:
            return None
        token_ids = [logprob.token for logprob in delta.logprobs]
        logprobs: list[TokenLogprob | None] = [*delta.logprobs]
        if first and self.echoes_logprobs:
            token_ids = [*self.generation.answers[delta.index].prompt, *token_ids]
            logprobs = [*self.generation.prompt_logprobs(delta.index), *logprobs]
        tokens = [self.tokenizer.token(token)[0] for token in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self.lengths[delta.index])
            self.lengths[delta.index] += len(token)
        return {
            "tokens": tokens, "token_logprobs": [logprob and logprob.own for logprob in logprobs],
            "top_logprobs": [logprob and self._top(logprob) for logprob in logprobs], "text_offset": offsets,
        }  # fmt: skip

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens and the token itself; of several with the same text, the most likely one."""
        pairs = [*logprob.top[: self.body.logprobs], (logprob.token, logprob.own)]
        return {self.tokenizer.token(token)[0]: value for token, value in reversed(pairs)}
