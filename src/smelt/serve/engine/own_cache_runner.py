"""Run networks whose cache cannot be paged: request after request, each with the cache that transformers gives it.

That is the case for state space layers, convolutions over time, and attention that transformers does not let us replace
(ALiBi). It is slower than paged attention: requests are not batched, and their memory is only estimated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from smelt.models.model import Model
from smelt.progress import Progress
from smelt.serve.engine.prompt_logprobs import PromptChunkLogprobs, compute_prompt_logprobs
from smelt.serve.engine.request import Request, RequestStatus
from smelt.serve.engine.runner import InflightBatch, find_eos_token_ids, sampled_requests
from smelt.serve.engine.sampler import sample
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

_CACHE_NAMES = ("past_key_values", "cache_params")  # as transformers calls a cache, in inputs and outputs alike


@dataclass(frozen=True)
class _OwnCache:
    """The cache of a request, and how many of its tokens are in it."""

    name: str
    cache: Any
    num_tokens: int


class OwnCacheRunner:
    """Run every request on its own. A prompt runs as a whole when its last chunk is scheduled."""

    max_inflight_steps = 0
    backend = "eager, cache of the network's own"

    def __init__(self, model: Model) -> None:
        self.network, self.device = model.network, model.device
        self.eos_token_ids = find_eos_token_ids(model)
        self._caches: WeakKeyDictionary[Request, _OwnCache] = WeakKeyDictionary()

    def warmup(self, progress: Progress) -> None:
        """Do nothing: nothing is compiled on first use."""

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        for request in [request for request in self._caches if request.state is RequestStatus.FINISHED]:
            del self._caches[request]
        requests = sampled_requests(batch.chunks)
        if not requests:
            return InflightBatch(batch, requests, None)
        last_logits: list[Tensor] = []
        prompt_logprobs: list[PromptChunkLogprobs] = []
        for chunk in batch.chunks:
            if chunk.samples_token:
                logits = self._logits(chunk)
                last_logits.append(logits[-1].clone())
                whole = ScheduledChunk(chunk.request, chunk.start + chunk.count - len(logits), len(logits), True)
                prompt_logprobs += compute_prompt_logprobs([whole], logits.__getitem__)
        output = sample(torch.stack(last_logits), requests, self.eos_token_ids)
        return InflightBatch(batch, requests, output, prompt_logprobs)

    def _logits(self, chunk: ScheduledChunk) -> Tensor:  # [computed tokens, vocabulary]
        """Return the logits up to the end of a chunk, of all tokens that were not computed before.

        A request that was preempted starts again from its first token.
        """
        request, stop = chunk.request, chunk.start + chunk.count
        known = self._caches.pop(request, None)
        cached = known is not None and known.num_tokens == stop - 1
        tokens = request.tokens[stop - 1 : stop] if cached else request.tokens[:stop]
        inputs = {"input_ids": torch.tensor([tokens], device=self.device)}
        cache = {known.name: known.cache} if known is not None and cached else {}
        output = self.network(**inputs, **cache, use_cache=True)
        for name in _CACHE_NAMES:
            if getattr(output, name, None) is not None:
                self._caches[request] = _OwnCache(name, getattr(output, name), stop)
        logits: Tensor = output.logits[0]
        return logits
