"""Beam search for a request: the engine computes one token of all beams at a time, as requests of their own."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

from smelt.errors import RequestError
from smelt.serve.engine.beam_search import Beam, BeamSearch, BeamSearchParams
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.errors import ApiError, ClientGoneError
from smelt.serve.server.generation import Delta, Generation
from smelt.serve.server.schemas import GenerationRequest, extras
from smelt.serve.server.service import Service
from smelt.serve.worker.client import TokenEvent, TokenStream

# Fields that beam search does not support, with the values that change nothing; None is always allowed.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,), "logprobs": (False,), "echo": (False,), "prompt_logprobs": (), "stop": ("", []),
    "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "min_tokens": (0,), "logit_bias": ({},),
    "allowed_token_ids": (), "bad_words": ([],),
    "response_format": ({"type": "text"},), "structured_outputs": ({},),
}  # fmt: skip


def create_generation(
    service: Service, prompts: list[list[int]], request: GenerationRequest, sampling: SamplingParams, key: bytes,
    markers: Collection[int] = (),
) -> Generation:  # fmt: skip
    """Return the generation of a request: by beam search if it asks for that, else by sampling."""
    cls = BeamGeneration if request.use_beam_search else Generation
    return cls(service, prompts, request, sampling, key, markers)


class BeamGeneration(Generation):
    """Search for the `n` best answers with `n` beams. All of them are known at the end."""

    def __init__(
        self, service: Service, prompts: list[list[int]], request: GenerationRequest, sampling: SamplingParams,
        key: bytes, markers: Collection[int] = (),
    ) -> None:  # fmt: skip
        _check_fields(request, sampling)
        super().__init__(service, prompts, request, sampling, key, markers)
        engine = service.supervisor.engine if service.supervisor is not None else None
        eos_token_ids = [] if engine is None or sampling.ignore_eos else engine.eos_token_ids
        ends = {*eos_token_ids, *sampling.stop_token_ids}
        longest = max(map(len, prompts))
        limit = min(service.max_model_len, service.tokenizer.max_tokens + 1) - longest
        try:
            params = BeamSearchParams(
                sampling.n, sampling.max_tokens or max(limit, 1),
                1.0 if request.length_penalty is None else request.length_penalty, request.early_stopping or False,
            )  # fmt: skip
        except RequestError as error:
            raise ApiError(400, str(error), param="n") from error
        self._searches = [BeamSearch(params, ends) for _ in prompts]
        self._gone = False

    def disconnect(self) -> None:
        self._gone = True
        super().disconnect()

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        deadline = self.arrival + self.service.limits.request_timeout
        while beams := self._running_beams():
            candidates: dict[int, Sequence[tuple[int, float]]] = {}  # by beam
            while len(candidates) < len(beams):
                for event in await self._next_events(deadline):
                    if event.logprobs is not None:
                        candidates[event.answer] = event.logprobs[1]
                yield []
            for index in dict.fromkeys(index for index, _ in beams):
                own = [candidates[number] for number, (prompt, _) in enumerate(beams) if prompt == index]
                self._searches[index].advance(own)
            if self._running_beams():
                self._start_next_step()
        yield [self._finish(index) for index in range(len(self.answers))]

    def _running_beams(self) -> list[tuple[int, Beam]]:
        """Return the beams of all prompts, each with the number of its prompt."""
        searches = enumerate(self._searches)
        return [(index, beam) for index, search in searches if not search.done for beam in search.running]

    def _start_stream(self) -> TokenStream:
        sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=self._searches[0].num_candidates)
        return self._submit([[*self.prompts[index], *beam.tokens] for index, beam in self._running_beams()], sampling)

    def _start_next_step(self) -> None:
        if self._gone:
            raise ClientGoneError
        assert self._stream is not None
        self._stream.close()
        self._stream = self._start_stream()

    def _finish(self, index: int) -> Delta:
        """Return an answer as one delta."""
        answer = self.answers[index]
        beam = self._searches[index // self.sampling.n].finished[index % self.sampling.n]
        now = time.monotonic()
        events = [TokenEvent(index, token, None, "", 0, now) for token in beam.tokens[:-1]]
        return answer.add([*events, TokenEvent(index, beam.tokens[-1], None, beam.reason, 0, now)], self.arrival)


def _check_fields(request: GenerationRequest, sampling: SamplingParams) -> None:
    fields = {**dict(request), **extras(request)}
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) is not None and fields[name] not in neutral:
            raise ApiError(400, f"{name}: it has no effect on beam search; leave it out.", param=name)
    if sampling.n != (request.n or 1):
        raise ApiError(400, "best_of: beam search returns n answers of n beams; leave it out.", param="best_of")
    if sampling.max_tokens == 0:
        raise ApiError(400, "max_tokens: beam search needs at least one token.", param="max_tokens")
