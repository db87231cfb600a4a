"""Run a network whose experts are chosen by one router ahead of all layers.

The router reads token ids only, so the experts of a prompt are known when it is queued, and those of a sampled token
before the next step is scheduled: the scheduler can group tokens by expert, and experts can be loaded ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smelt.errors import ModelError, RequestError
from smelt.models.carved_experts import carved_layers, carved_routes_of
from smelt.models.carved_feed_forward import SharedRouting
from smelt.models.model import Model
from smelt.serve.engine.expert_cache import ExpertCache
from smelt.serve.engine.expert_slots import ExpertSlots
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import InflightBatch, ModelRunner
from smelt.serve.engine.scheduler import ScheduledBatch


class RoutedRunner(ModelRunner):
    """Eager steps with the experts of every token given; with `expert_slots`, so many of them are on the device."""

    def __init__(
        self, model: Model, *, expert_slots: int | None, expert_policy: str, expert_prefetch: bool, **sizes: Any
    ) -> None:
        super().__init__(model, compiled=False, **sizes)
        routes = carved_routes_of(model.network)
        assert routes is not None
        self.routes, self.router = routes, routes.router
        self.num_experts = self.router.config.experts
        if expert_slots is not None and expert_slots > self.num_experts:
            raise RequestError(
                f"{expert_slots} expert slots are more than the {self.num_experts} experts of this model; give at most "
                f"{self.num_experts}, or leave them out to keep all experts on the device."
            )
        self.expert_cache = None if expert_slots is None else ExpertCache(expert_slots, expert_policy)
        self.expert_uses = 0  # experts that each step used, summed over steps
        self.slots = (
            None
            if expert_slots is None
            else ExpertSlots(carved_layers(model.network), expert_slots, self.device, expert_prefetch)
        )

    @property
    def backend(self) -> str:
        cache = self.expert_cache
        slots = "" if cache is None else f", {cache.slots} of {self.num_experts} experts at a time"
        return f"{super().backend}{slots}"

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
        experts = self.router.route(padded, mask)[:, -1].tolist()
        for request, expert in zip(requests, experts, strict=True):
            request.expert_routes.append(expert)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        self.route([chunk.request for chunk in batch.chunks])
        experts = [
            expert
            for chunk in batch.chunks
            for expert in chunk.request.expert_routes[chunk.start : chunk.start + chunk.count]
        ]
        if len(experts) != batch.tokens:
            raise ModelError("a step computes a token that the router has not seen.")
        self.expert_uses += len(set(experts))
        if self.slots is not None and self.expert_cache is not None:
            self.slots.begin(self.expert_cache.plan(experts, batch.next_expert_use))
        routing = SharedRouting.of(torch.tensor(experts), self.num_experts).to(self.device)
        with self.routes.preset(routing):
            return super().launch(batch)

    def resident(self) -> list[int]:
        """Return the experts on the device; none if all of them are."""
        return [] if self.expert_cache is None else self.expert_cache.resident

    def expert_state(self) -> dict[str, int]:
        """Return counts since the start, for the metrics."""
        cache = self.expert_cache
        return {
            "expert_uses": self.expert_uses,
            "expert_hits": 0 if cache is None else cache.hits,
            "expert_misses": 0 if cache is None else cache.misses,
            "expert_bytes_loaded": 0 if self.slots is None else self.slots.loaded_bytes,
        }
