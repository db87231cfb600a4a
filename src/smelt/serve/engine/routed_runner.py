"""Run a network whose experts are chosen by one router ahead of all layers.

The router reads token ids only, so the experts of a prompt are known when it is queued, and those of a sampled token
before the next step is scheduled: the scheduler can group tokens by expert, and experts can be loaded ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smelt.errors import ModelError, RequestError
from smelt.models.carved_experts import carved_layers, carved_routes_of
from smelt.models.carved_feed_forward import SharedRouting
from smelt.models.expert_router import ExpertRouter
from smelt.models.model import Model
from smelt.serve.engine.expert_cache import ExpertCache
from smelt.serve.engine.expert_slots import ExpertSlots
from smelt.serve.engine.gpu_runner import GpuRunner, known_token
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import InflightBatch, ModelRunner
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:
    from smelt.runtime.gpu import Attend


class TokenRouter:
    """Chooses the experts of the tokens of requests, and counts those that steps use."""

    def __init__(self, model: Model) -> None:
        self.router, self.device = router_of(model), model.device
        self.num_experts = self.router.config.experts
        self.uses = 0  # experts that each step used, summed over steps

    @torch.inference_mode()
    def route(self, requests: Sequence[Request]) -> None:
        """Choose the experts of all known tokens of these requests that have none yet."""
        context = self.router.config.context
        stepping: list[Request] = []
        for request in requests:
            missing = len(request.tokens) - len(request.expert_routes)
            if missing == 1 and request.expert_routes:
                stepping.append(request)
            elif missing:  # a prompt: by itself, so that its routes do not depend on other requests
                start = max(len(request.expert_routes) - context + 1, 0)
                ids = torch.tensor([request.tokens[start:]], device=self.device)
                request.expert_routes += self.router.route(ids)[0, -missing:].tolist()
        if stepping:
            self._route_last(stepping, context)

    def _route_last(self, requests: Sequence[Request], context: int) -> None:
        """Choose the experts of the last tokens, each from the tokens that it depends on, padded on the left."""
        rows = [request.tokens[-context:] for request in requests]
        longest = max(map(len, rows))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.device)
        experts = self.router.route(padded, mask, last_only=True)[:, -1].tolist()
        for request, expert in zip(requests, experts, strict=True):
            request.expert_routes.append(expert)

    def begin(self, batch: ScheduledBatch) -> list[int]:
        """Return the experts of the tokens of a step, and count them."""
        self.route([chunk.request for chunk in batch.chunks])
        experts = experts_of(batch.chunks)
        if len(experts) != batch.tokens:
            raise ModelError("a step computes a token that the router has not seen.")
        self.uses += len(set(experts))
        return experts


def experts_of(chunks: Sequence[ScheduledChunk]) -> list[int]:
    """Return the experts of the tokens of chunks."""
    spans = [chunk.request.expert_routes[chunk.start : chunk.start + chunk.count] for chunk in chunks]
    return [expert for span in spans for expert in span]


def router_of(model: Model) -> ExpertRouter:
    routes = carved_routes_of(model.network)
    assert routes is not None
    return routes.router


class RoutesTokens(ABC):
    """A runner that routes tokens."""

    @abstractmethod
    def expert_state(self) -> dict[str, int]:
        """Return counts since the start, for the metrics."""


def _expert_state(uses: int, hits: int = 0, misses: int = 0, loaded_bytes: int = 0) -> dict[str, int]:
    return {
        "expert_uses": uses, "expert_hits": hits, "expert_misses": misses, "expert_bytes_loaded": loaded_bytes,
    }  # fmt: skip


class RoutedRunner(ModelRunner, RoutesTokens):
    """Run the network with the experts of every token given; with `expert_slots`, so many of them are on the device,
    and steps are eager."""

    def __init__(
        self, model: Model, *, compiled: bool, expert_slots: int | None, expert_policy: str, expert_prefetch: bool,
        **sizes: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, compiled=compiled and expert_slots is None, **sizes)
        routes = carved_routes_of(model.network)
        assert routes is not None
        self._routes, self.token_router = routes, TokenRouter(model)
        num_experts = self.token_router.num_experts
        if expert_slots is not None and expert_slots > num_experts:
            raise RequestError(
                f"{expert_slots} expert slots are more than the {num_experts} experts of this model; give at most "
                f"{num_experts}, or leave them out to keep all experts on the device."
            )
        self.expert_cache = None if expert_slots is None else ExpertCache(expert_slots, expert_policy)
        self.slots = (
            None
            if expert_slots is None
            else ExpertSlots(carved_layers(model.network), expert_slots, self.device, expert_prefetch)
        )

    @property
    def backend(self) -> str:
        cache = self.expert_cache
        slots = "" if cache is None else f", {cache.slots} of {self.token_router.num_experts} experts at a time"
        return f"{super().backend}{slots}"

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        experts = self.token_router.begin(batch)
        if self.compiled is not None:
            self.compiled.set_experts(torch.tensor(experts))
            return super().launch(batch)
        if self.slots is not None and self.expert_cache is not None:
            self.slots.begin(self.expert_cache.plan(experts, batch.next_expert_use))
        routing = SharedRouting.of(torch.tensor(experts), self.token_router.num_experts).to(self.device)
        with self._routes.preset(routing):
            return super().launch(batch)

    def resident(self) -> list[int]:
        """Return the experts on the device; none if all of them are."""
        return [] if self.expert_cache is None else self.expert_cache.resident

    def expert_state(self) -> dict[str, int]:
        cache, slots, uses = self.expert_cache, self.slots, self.token_router.uses
        if cache is None or slots is None:
            return _expert_state(uses)
        return _expert_state(uses, cache.hits, cache.misses, slots.loaded_bytes)


class RoutedGpuRunner(GpuRunner, RoutesTokens):
    """Run steps in CUDA graphs with all experts on the device, which routes tokens that the host does not know yet."""

    def __init__(self, model: Model, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.router = router_of(model)
        context = self.router.config.context
        # The tokens that the route of the next one depends on, by slot, and the request and the position of that one
        self._history = torch.zeros(self.max_num_seqs + 1, context, dtype=torch.int64, device=self.device)
        self._next: dict[int, tuple[Request, int]] = {}
        self._uses = torch.zeros((), dtype=torch.int64, device=self.device)

    def expert_state(self) -> dict[str, int]:
        return _expert_state(int(self._uses))

    def _step_inputs(self, packed: np.ndarray[Any, Any], chunks: Sequence[ScheduledChunk], size: int) -> Tensor:
        values = self._to_device(np.concatenate((packed, np.zeros(size, dtype=np.int64))))
        experts = values[len(packed) :]
        single = [chunk for chunk in chunks if chunk.count == 1]  # before the others
        if single:
            experts[: len(single)] = self._route_last(single)
        offset = len(single)
        for chunk in chunks[len(single) :]:
            experts[offset : offset + chunk.count] = self._route_prompt(chunk)
            offset += chunk.count
        used = torch.zeros(self.router.config.experts, dtype=torch.int64, device=self.device)
        self._uses += used.index_fill_(0, experts[:offset], 1).sum()
        return values

    def _route_prompt(self, chunk: ScheduledChunk) -> Tensor:  # [tokens of the chunk]
        request, stop, context = chunk.request, chunk.start + chunk.count, self.router.config.context
        ids = self._to_device(np.array(request.tokens[max(chunk.start - context + 1, 0) : stop], dtype=np.int64))
        last = ids[-context:]
        self._history[request.slot, context - len(last) :] = last
        self._next[request.slot] = (request, stop)
        return self.router.route(ids[None])[0, -chunk.count :]

    def _route_last(self, chunks: Sequence[ScheduledChunk]) -> Tensor:  # [chunks]
        for chunk in chunks:
            self._begin_history(chunk)
        context = self.router.config.context
        inputs = [(chunk.request.slot, chunk.start, known_token(chunk.request, chunk.start)) for chunk in chunks]
        slots, positions, ids = self._to_device(np.array(inputs, dtype=np.int64).T)
        ids = torch.where(ids < 0, self._last_tokens[slots], ids)
        rows = torch.cat((self._history[slots, 1:], ids[:, None]), dim=1)
        self._history[slots] = rows
        from_ = torch.arange(context, device=self.device)
        return self.router.route(rows, from_ >= context - 1 - positions[:, None], last_only=True)[:, -1]

    def _begin_history(self, chunk: ScheduledChunk) -> None:
        """Copy the tokens before a single one, unless the device has computed the step before it."""
        request, start = chunk.request, chunk.start
        if self._next.get(request.slot) != (request, start):
            context = self.router.config.context
            before = np.array(request.tokens[max(start - context, 0) : start], dtype=np.int64)
            self._history[request.slot, context - len(before) :] = self._to_device(before)
        self._next[request.slot] = (request, start + 1)

    def _empty_extra(self, size: int, with_adapters: bool) -> np.ndarray[Any, Any]:
        return np.zeros(size, dtype=np.int64)

    def _hidden(self, embedded: Tensor, attend: Attend, extra: Tensor, active: Tensor | None) -> Tensor:
        return self.network.hidden(embedded, attend, active=active, experts=extra)
