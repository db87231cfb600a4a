"""Continuous batching that knows the experts of all queued tokens: a step computes tokens of few experts.

Prompts are routed when they arrive, sampled tokens before the next step. If not all running requests fit into a step,
or if not all experts fit on the device, those of the same experts run together and the others wait, a bounded number of
steps. A step that computes a prompt uses most experts anyway, so it leaves no request out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from smelt.serve.engine.expert_cache import group_by_expert, next_uses
from smelt.serve.engine.request import Request
from smelt.serve.engine.scheduler import ScheduledBatch, Scheduler

MAX_WAIT = 8  # steps that a request waits for others of its expert
LOOKAHEAD = 8192  # queued tokens whose experts are looked at
LOOKAHEAD_REQUESTS = 256


class ExpertScheduler(Scheduler):
    """Orders running requests by expert, and tells the runner when experts are used next."""

    def __init__(
        self, *args: Any, route: Callable[[Sequence[Request]], None], num_experts: int, max_experts: int | None,
        resident: Callable[[], Sequence[int]], expert_batching: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **settings)
        self._route, self.num_experts, self.max_experts = route, num_experts, max_experts
        self._resident, self.expert_batching = resident, expert_batching

    def add(self, request: Request) -> None:
        super().add(request)
        self._route([request])

    def schedule(self, max_prompt_tokens: int | None = None) -> ScheduledBatch:
        self._route(self.running)
        batch = super().schedule(max_prompt_tokens)
        scheduled = {id(chunk.request) for chunk in batch.chunks}
        for request in self.running:
            request.expert_wait = 0 if id(request) in scheduled else request.expert_wait + 1
        batch.next_expert_use = next_uses(self._upcoming(scheduled), self.num_experts, LOOKAHEAD)
        return batch

    def _batch_order(self) -> list[Request]:
        requests = list(self.running)
        prompts = [request for request in requests if _missing(request) != 1]
        admits = bool(self.waiting) and len(self.running) < self.max_num_seqs
        if not self.expert_batching or prompts or admits:
            return requests
        chosen = group_by_expert(
            [request.expert_routes[request.num_computed_tokens] for request in requests],
            [request.expert_wait for request in requests],
            max_tokens=self.max_num_batched_tokens, max_experts=self.max_experts, max_wait=MAX_WAIT,
            resident=self._resident(),
        )  # fmt: skip
        return [requests[index] for index in chosen]

    def _victim(self, batch: ScheduledBatch) -> Request:
        scheduled = {id(chunk.request) for chunk in batch.chunks}
        return next(request for request in reversed(self.running) if id(request) not in scheduled)

    def _upcoming(self, scheduled: set[int]) -> Iterator[int]:
        """Yield the experts of known tokens that are computed after this step: of requests that wait for others, of
        the rest of prompts, then of waiting requests."""
        left_out = [request for request in self.running if id(request) not in scheduled]
        others = [request for request in self.running if id(request) in scheduled]
        for request in (*left_out, *others, *islice(self.waiting, LOOKAHEAD_REQUESTS)):
            yield from request.expert_routes[request.num_computed_tokens :]


def _missing(request: Request) -> int:
    return request.num_expected_tokens - request.num_computed_tokens
