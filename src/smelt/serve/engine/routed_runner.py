"""Run a network whose experts are chosen by one router ahead of all layers.

The router reads token ids only, so the experts of a prompt are known when it is queued, and those of a sampled token
before the next step is scheduled: the scheduler can group tokens by expert, and experts can be loaded ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smelt.errors import ModelError, RequestError
from smelt.models.carved_experts import carved_layers, carved_routes_of
from smelt.models.carved_feed_forward import SharedRouting
from smelt.models.model import Model
from smelt.serve.engine.expert_cache import ExpertCache
from smelt.serve.engine.expert_slots import ExpertSlots
from smelt.serve.engine.gpu_runner import GpuRunner
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import InflightBatch, ModelRunner
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:
    from smelt.runtime.gpu import Attend


class TokenRouter:
    """Chooses the experts of the tokens of requests, and counts those that steps use."""

    def __init__(self, model: Model) -> None:
        routes = carved_routes_of(model.network)
        assert routes is not None
        self.routes, self.router, self.device = routes, routes.router, model.device
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


class RoutesTokens:
    """What a scheduler and the metrics need of a runner that routes tokens."""

    token_router: TokenRouter

    def resident(self) -> list[int]:
        """Return the experts on the device; none if all of them are."""
        return []

    def expert_state(self) -> dict[str, int]:
        """Return counts since the start, for the metrics."""
        return {"expert_uses": self.token_router.uses, "expert_hits": 0, "expert_misses": 0, "expert_bytes_loaded": 0}


class RoutedRunner(ModelRunner, RoutesTokens):
    """Run the network with the experts of every token given; with `expert_slots`, so many of them are on the device,
    and steps are eager."""

    def __init__(
        self, model: Model, *, compiled: bool, expert_slots: int | None, expert_policy: str, expert_prefetch: bool,
        **sizes: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, compiled=compiled and expert_slots is None, **sizes)
        self.token_router = TokenRouter(model)
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
        with self.token_router.routes.preset(routing):
            return super().launch(batch)

    def resident(self) -> list[int]:
        return [] if self.expert_cache is None else self.expert_cache.resident

    def expert_state(self) -> dict[str, int]:
        cache = self.expert_cache
        if cache is None or self.slots is None:
            return super().expert_state()
        counts = {"expert_hits": cache.hits, "expert_misses": cache.misses}
        return {**super().expert_state(), **counts, "expert_bytes_loaded": self.slots.loaded_bytes}


class RoutedGpuRunner(GpuRunner, RoutesTokens):
    """Run steps in CUDA graphs with all experts on the device; the host routes a token before it is computed."""

    max_inflight_steps = 0  # the host must know a token to route it

    def __init__(self, model: Model, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.token_router = TokenRouter(model)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        self.token_router.begin(batch)
        return super().launch(batch)

    def _pack_extra(self, chunks: Sequence[ScheduledChunk], size: int) -> np.ndarray[Any, Any]:
        experts = experts_of(chunks)
        return np.array(experts + [0] * (size - len(experts)), dtype=np.int64)

    def _empty_extra(self, size: int, with_adapters: bool) -> np.ndarray[Any, Any]:
        return np.zeros(size, dtype=np.int64)

    def _hidden(self, embedded: Tensor, attend: Attend, extra: Tensor, active: Tensor | None) -> Tensor:
        return self.network.hidden(embedded, attend, active=active, experts=extra)
