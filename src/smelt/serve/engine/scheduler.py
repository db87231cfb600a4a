"""Continuous batching: choose the tokens of the next step (Yu et al., OSDI 2022, with blocks allocated on demand).

Every step is scheduled anew. Running requests come first, in order; each gets its next token or the next chunk of its
prompt. Then waiting requests are admitted in order (of priority, then fairly between tenants, then of arrival) while
all tokens of each fit; the first that does not fit ends the admission, so that no request starves. A request with a
long prompt reserves blocks for its output: recomputing the prompt would cost more. If blocks run out anyway, the last
running request is preempted: its blocks are released and its tokens are recomputed later; no sampled token is lost.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from smelt.errors import RequestError
from smelt.serve.engine.fair_queue import FairQueue
from smelt.serve.engine.kv_cache_manager import KVCacheManager
from smelt.serve.engine.request import Request, RequestStatus

logger = logging.getLogger(__name__)
MAX_PROMPT_LOGITS = 256  # prompt tokens per step whose logits are computed
OUTPUT_RESERVATION = 8  # blocks are reserved for an output of one 8th of the prompt


@dataclass(slots=True)  # not frozen: one is created per token
class ScheduledChunk:
    """Tokens `start` to `start + count` of a request. Computing its last token samples the next one."""

    request: Request
    start: int
    count: int
    samples_token: bool


@dataclass
class ScheduledBatch:
    """The chunks that one step computes."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks to copy before the step: from, to
    next_expert_use: dict[int, int] = field(default_factory=dict)  # expert -> known tokens before its next use

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    def work(self, context_unit: int) -> float:
        """Return the tokens, each counted once more for every `context_unit` tokens of its context."""
        contexts = sum(chunk.count * (chunk.start + chunk.count) for chunk in self.chunks)
        return self.tokens + contexts / context_unit


class Scheduler:
    """Schedules at most `max_num_batched_tokens` of `max_num_seqs` requests, `prefill_chunk_size` of each."""

    def __init__(
        self,
        cache_manager: KVCacheManager,
        *,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        prefill_chunk_size: int | None = None,
        max_queued: int = 4096,
        watermark: float = 0.01,
    ) -> None:
        self.cache_manager = cache_manager
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size or max_num_batched_tokens
        self.max_queued = max_queued
        self.watermark_blocks = int(
            watermark * cache_manager.pool.num_blocks
        )  # free when a request is admitted while others run
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.fair_queue = FairQueue()
        self._slots = deque(range(max_num_seqs))
        self._arrivals = 0
        self._prompt_budget = max_num_batched_tokens  # what is left of it in the step that is being scheduled
        self._prompt_logits_left = 0  # in the step that is being scheduled

    def add(self, request: Request) -> None:
        if len(self.waiting) >= self.max_queued:
            raise RequestError(f"{self.max_queued:,} requests are waiting already; try again later.")
        max_tokens = self.cache_manager.max_tokens_for(request)
        if len(request.prompt) + 1 > max_tokens:
            raise RequestError(
                f"a prompt of {len(request.prompt):,} tokens is longer than the cache's {max_tokens - 1:,}."
            )
        request.limit = max_tokens
        request.arrival = self._arrivals
        self._arrivals += 1
        self.fair_queue.on_arrival(request)
        self._enqueue(request)

    def finish(self, request: Request, reason: str) -> None:
        """Finish or abort a request. Its blocks are free at once: any step that could overwrite them is launched after
        those in flight."""
        if request.state is RequestStatus.FINISHED:
            return
        self.fair_queue.on_finish(request)
        if request.state is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            self._remove(request, reason)
        request.state, request.reason = RequestStatus.FINISHED, reason

    def schedule(self, max_prompt_tokens: int | None = None) -> ScheduledBatch:
        """Schedule the next step; its tokens count as computed from now on.

        `max_prompt_tokens` limits the prompts in a step that running answers wait for.
        """
        batch = ScheduledBatch()
        answering = max_prompt_tokens is not None and any(_is_decoding(request) for request in self.running)
        self._prompt_budget = max_prompt_tokens if max_prompt_tokens and answering else self.max_num_batched_tokens
        self._prompt_logits_left = MAX_PROMPT_LOGITS
        budget = self._schedule_running(batch)
        if not batch.preempted:
            self._admit(batch, budget)
        for chunk in batch.chunks:
            chunk.request.num_computed_tokens += chunk.count
            chunk.request.num_inflight += chunk.samples_token
        batch.copies, self.cache_manager.copies = self.cache_manager.copies, []
        return batch

    def on_token(self, request: Request, token: int) -> None:
        """Append a sampled token."""
        request.num_inflight -= 1
        request.tokens.append(token)
        self.cache_manager.commit(request)

    def on_computed(self, request: Request) -> None:
        """Handle a finished step that sampled no token."""
        self.cache_manager.commit(request)

    def _schedule_running(self, batch: ScheduledBatch) -> int:
        budget = self.max_num_batched_tokens
        for request in self._batch_order():
            if not budget:
                break
            if request.state is not RequestStatus.RUNNING:  # preempted for one before it
                continue
            expected = request.num_expected_tokens
            count = self._schedulable_tokens(request, budget, batch)
            finishing = expected >= request.limit and request.num_inflight > 0  # the token in flight is its last
            if count and not finishing:
                if not self._allocate_or_preempt(request, count, batch):
                    break
                self._append(batch, request, count)
                budget -= count
        return budget

    def _batch_order(self) -> list[Request]:
        """Return the running requests that this step may compute, in the order in which they get its tokens."""
        return list(self.running)

    def _victim(self, batch: ScheduledBatch) -> Request:
        """Return the request to preempt: the last one, which is not scheduled in this step yet as they are in order."""
        return self.running[-1]

    def _schedulable_tokens(self, request: Request, budget: int, batch: ScheduledBatch) -> int:
        """Return how many tokens of a request this step computes, within what is left for prompts.

        A chunk that the cache manager does not split is the only one in its step.
        """
        count = self._num_schedulable(request, budget)
        if count <= 1:
            return count
        if count > self._prompt_budget:
            smaller = self._num_schedulable(request, self._prompt_budget)
            if smaller or any(chunk.count > 1 for chunk in batch.chunks):
                count = smaller
        self._prompt_budget = max(self._prompt_budget - count, 0)
        return count

    def _allocate_or_preempt(self, request: Request, count: int, batch: ScheduledBatch) -> bool:
        """Allocate blocks for `count` more tokens, preempting the last requests if needed; False if `request` was
        preempted itself."""
        missing = self.cache_manager.blocks_needed(request, request.num_computed_tokens + count) - len(request.blocks)
        if missing <= 0:
            return True
        while not self.cache_manager.can_allocate(missing):
            victim = self._victim(batch)
            self._preempt(victim, batch)
            if victim is request:
                return False
        self.cache_manager.allocate(request, request.num_computed_tokens + count)
        return True

    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        self._remove(request, "")
        request.num_computed_tokens = 0
        request.preemptions += 1
        batch.preempted.append(request)
        logger.debug("no block of the KV cache is free: a request is preempted (%d running)", len(self.running))
        self._enqueue(request)

    def _admit(self, batch: ScheduledBatch, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if request.num_inflight or not self._ready(request):  # its last token is still in flight
                break
            if not self.cache_manager.admit(request, self._reserved_blocks(request)):
                break
            count = self._schedulable_tokens(request, budget, batch)
            if not count:  # only complete chunks, or no logits left: this one waits for the next step
                self.cache_manager.release(request, "")
                request.num_computed_tokens = 0
                break
            self.waiting.pop(0)
            self.fair_queue.on_start(request)
            request.parent = None
            if not request.preemptions:
                request.num_cached_tokens = request.num_computed_tokens
            self.cache_manager.allocate(request, request.num_computed_tokens + count)
            request.slot, request.state = self._slots.popleft(), RequestStatus.RUNNING
            insort(self.running, request, key=lambda running: running.order)
            self._append(batch, request, count)
            budget -= count

    def _num_schedulable(self, request: Request, budget: int) -> int:
        """Return how many tokens of a request the next step computes: few at a time where all of them need logits."""
        chunk_size = self.prefill_chunk_size
        if request.wants_prompt_logits and request.num_computed_tokens < len(request.prompt) - 1:
            chunk_size = min(chunk_size, self._prompt_logits_left)
        return self.cache_manager.schedulable_tokens(request, budget, chunk_size) if chunk_size else 0

    def _append(self, batch: ScheduledBatch, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        batch.chunks.append(ScheduledChunk(request, start, count, start + count == request.num_expected_tokens))
        if request.wants_prompt_logits:
            self._prompt_logits_left -= min(count, max(len(request.prompt) - 1 - start, 0))

    def _ready(self, request: Request) -> bool:
        """Return whether the prompt shared with a sibling is computed."""
        parent = request.parent
        return (
            parent is None or parent.state is RequestStatus.FINISHED or parent.num_computed_tokens >= len(parent.prompt)
        )

    def _reserved_blocks(self, request: Request) -> int:
        """Return the blocks to leave free beside a request's current tokens: outstanding reservations of running
        requests, its own reservation, and the watermark; 0 if nothing is running."""
        if not self.running:
            return 0
        needed = self.cache_manager.blocks_needed
        outstanding = sum(needed(running, _expected_length(running)) - len(running.blocks) for running in self.running)
        return (
            outstanding
            + needed(request, _expected_length(request))
            - needed(request, request.num_expected_tokens)
            + self.watermark_blocks
        )

    def _remove(self, request: Request, reason: str) -> None:
        self.running.remove(request)
        self.cache_manager.release(request, reason)
        self._slots.append(request.slot)
        request.slot = -1

    def _enqueue(self, request: Request) -> None:
        request.state = RequestStatus.WAITING
        insort(self.waiting, request, key=lambda waiting: waiting.order)


def _is_decoding(request: Request) -> bool:
    return request.num_computed_tokens >= len(request.prompt)


def _expected_length(request: Request) -> int:
    """Return the tokens that blocks are reserved for: the prompt and a share of its length as output."""
    return max(
        request.num_expected_tokens, min(request.limit, len(request.prompt) + len(request.prompt) // OUTPUT_RESERVATION)
    )
