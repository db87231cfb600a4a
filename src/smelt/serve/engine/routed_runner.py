"""Run a network whose experts are chosen by one router ahead of all layers.

The router reads token ids only, so the experts of a prompt are known when it is queued, and those of a sampled token
before the next step is scheduled: the scheduler can group tokens by expert, and experts can be loaded ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.errors import ModelError, RequestError
from smelt.models.carved_experts import carved_layers, carved_routes_of
from smelt.models.carved_feed_forward import SharedRouting
from smelt.models.expert_router import ExpertRouter
from smelt.models.lora import StackedFactors
from smelt.models.model import Model
from smelt.runtime.decoder import build_decoder
from smelt.serve.engine.expert_cache import ExpertAccess, ExpertCache
from smelt.serve.engine.expert_slots import ExpertSlots
from smelt.serve.engine.gpu_runner import CAPTURE_SIZES, GpuRunner, known_token
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import InflightBatch, ModelRunner
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:
    from smelt.runtime.gpu import Attend, FusedNetwork


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


class RoutesAhead(RoutesTokens):
    """A runner whose steps are scheduled by the experts of their tokens."""

    token_router: TokenRouter
    expert_cache: ExpertCache | None

    def resident(self) -> list[int]:
        """Return the experts on the device; none if all of them are."""
        return [] if self.expert_cache is None else self.expert_cache.resident


def _build_cache(slots: int, policy: str, num_experts: int) -> ExpertCache:
    if slots > num_experts:
        raise RequestError(
            f"{slots} expert slots are more than the {num_experts} experts of this model; give at most {num_experts}, "
            "or leave them out to keep all experts on the device."
        )
    return ExpertCache(slots, policy)


def _slots_suffix(runner: RoutesAhead) -> str:
    assert runner.expert_cache is not None
    return f", {runner.expert_cache.slots} of {runner.token_router.num_experts} experts at a time"


def _expert_state(uses: int, hits: int = 0, misses: int = 0, loaded_bytes: int = 0) -> dict[str, int]:
    return {
        "expert_uses": uses, "expert_hits": hits, "expert_misses": misses, "expert_bytes_loaded": loaded_bytes,
    }  # fmt: skip


class RoutedRunner(ModelRunner, RoutesAhead):
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
        self.expert_cache = None
        if expert_slots is not None:
            self.expert_cache = _build_cache(expert_slots, expert_policy, self.token_router.num_experts)
        self.slots = (
            None
            if expert_slots is None
            else ExpertSlots(carved_layers(model.network), expert_slots, self.device, expert_prefetch)
        )

    @property
    def backend(self) -> str:
        return super().backend + ("" if self.expert_cache is None else _slots_suffix(self))

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

    def _decode_inputs(self, packed: np.ndarray[Any, Any], chunks: Sequence[ScheduledChunk], size: int) -> Tensor:
        """Leave the experts to the step itself, so that they are part of its CUDA graph."""
        for chunk in chunks:
            self._begin_history(chunk)
        return self._to_device(np.concatenate((packed, self._empty_extra(size, False))))

    def _forward_decode(self, values: Tensor, size: int, bound: int) -> tuple[Tensor, Tensor]:
        slots, seq_lens, token_ids = values[: 3 * size].view(3, size)
        values[3 * size :] = self._route_last(slots, seq_lens - 1, token_ids)
        self._count_uses(values[3 * size :], slots != self.max_num_seqs)
        return super()._forward_decode(values, size, bound)

    def _step_inputs(self, packed: np.ndarray[Any, Any], chunks: Sequence[ScheduledChunk], size: int) -> Tensor:
        values = self._to_device(np.concatenate((packed, self._empty_extra(size, False))))
        experts = values[len(packed) :]
        single = [chunk for chunk in chunks if chunk.count == 1]  # before the others
        if single:
            for chunk in single:
                self._begin_history(chunk)
            inputs = [(chunk.request.slot, chunk.start, known_token(chunk.request, chunk.start)) for chunk in single]
            experts[: len(single)] = self._route_last(*self._to_device(np.array(inputs, dtype=np.int64).T))
        offset = len(single)
        for chunk in chunks[len(single) :]:
            experts[offset : offset + chunk.count] = self._route_prompt(chunk)
            offset += chunk.count
        self._count_uses(experts[:offset])
        return values

    def _count_uses(self, experts: Tensor, active: Tensor | None = None) -> None:
        """Count the experts of a step; tokens that are not `active` are padding."""
        chosen = experts[:, None] == torch.arange(self.router.config.experts, device=self.device)
        self._uses += (chosen if active is None else chosen & active[:, None]).any(0).sum()

    def _route_prompt(self, chunk: ScheduledChunk) -> Tensor:  # [tokens of the chunk]
        request, stop, context = chunk.request, chunk.start + chunk.count, self.router.config.context
        ids = self._to_device(np.array(request.tokens[max(chunk.start - context + 1, 0) : stop], dtype=np.int64))
        last = ids[-context:]
        self._history[request.slot, context - len(last) :] = last
        self._next[request.slot] = (request, stop)
        return self.router.route(ids[None])[0, -chunk.count :]

    def _route_last(self, slots: Tensor, positions: Tensor, ids: Tensor) -> Tensor:  # [tokens]
        """Choose the experts of single tokens, and add them to the history; a negative id is the slot's last token."""
        context = self.router.config.context
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

    def _empty_extra(self, size: int, extended: bool) -> np.ndarray[Any, Any]:
        return np.zeros(size, dtype=np.int64)

    def _hidden(self, embedded: Tensor, attend: Attend, extra: Tensor, active: Tensor | None) -> Tensor:
        return self.network.hidden(embedded, attend, active=active, experts=extra)


class SlottedGpuRunner(GpuRunner, RoutesAhead):
    """Run steps in CUDA graphs with a few of the experts on the device. A step that needs others is extended: it copies
    them from host memory while it runs. The host knows the experts of a step, so it waits for the step before."""

    max_inflight_steps = 0
    extension = "that load experts"

    def __init__(
        self, model: Model, *, expert_slots: int, expert_policy: str, expert_prefetch: bool, **settings: Any
    ) -> None:
        self.token_router = TokenRouter(model)
        self.expert_cache: ExpertCache = _build_cache(expert_slots, expert_policy, self.token_router.num_experts)
        self._prefetch, self._loaded_bytes = expert_prefetch, 0
        self._next_use: Mapping[int, int] = {}
        self._accesses: list[ExpertAccess] = []
        super().__init__(model, **settings)

    def _build_network(self, model: Model, stacks: Mapping[nn.Module, StackedFactors] | None) -> FusedNetwork:
        from smelt.runtime.gpu import FusedNetwork

        decoder, slots = build_decoder(model, self.max_model_len), self.expert_cache.slots
        return FusedNetwork(decoder, CAPTURE_SIZES[-1], stacks, expert_slots=slots, expert_prefetch=self._prefetch)

    @property
    def backend(self) -> str:
        return super().backend + _slots_suffix(self)

    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        self.token_router.begin(batch)
        self._next_use = batch.next_expert_use
        return super().launch(batch)

    def _run_decode(self, chunks: list[ScheduledChunk]) -> tuple[Tensor, Tensor]:
        self._plan(chunks)
        return super()._run_decode(chunks)

    def _run_prefill(self, chunks: list[ScheduledChunk]) -> tuple[Tensor, Tensor]:
        self._plan(chunks)
        return super()._run_prefill(chunks)

    def _run_mixed(self, batch: ScheduledBatch) -> InflightBatch:
        self._plan(batch.chunks)
        return super()._run_mixed(batch)

    def _plan(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Decide which experts of a part of a step are in slots, and which are loaded."""
        self._accesses = self.expert_cache.plan(experts_of(chunks), self._next_use)
        self._loaded_bytes += self.network.expert_bytes * sum(access.loads for access in self._accesses)

    @property
    def _has_extended_steps(self) -> bool:
        return True

    def _is_extended(self, chunks: Sequence[ScheduledChunk]) -> bool:
        return any(access.loads for access in self._accesses)

    def _step_inputs(self, packed: np.ndarray[Any, Any], chunks: Sequence[ScheduledChunk], size: int) -> Tensor:
        extra = self._empty_extra(size, self._is_extended(chunks))
        slots, experts, loaded, placed = np.split(extra, np.cumsum([size, size, self.token_router.num_experts])[:3])
        in_slot = {access.expert: access.slot for access in self._accesses if not access.loads}
        routes = experts_of(chunks)
        slots[: len(routes)] = [in_slot.get(expert, -1) for expert in routes]
        if len(experts):
            experts[: len(routes)] = [-1 if expert in in_slot else expert for expert in routes]
        stay = set(self.expert_cache.resident)
        for access in self._accesses:
            if access.loads:
                loaded[access.expert] = access.expert
                placed[access.expert] = access.slot if access.expert in stay else -1
        return self._to_device(np.concatenate((packed, extra)))

    def _empty_extra(self, size: int, extended: bool) -> np.ndarray[Any, Any]:
        """Return the slots of tokens; in extended steps also the experts of those without one, which experts to load,
        and in which slots they stay. -1 is none."""
        return np.full(2 * (size + self.token_router.num_experts) if extended else size, -1, dtype=np.int64)

    def _hidden(self, embedded: Tensor, attend: Attend, extra: Tensor, active: Tensor | None) -> Tensor:
        size, experts = len(embedded), self.token_router.num_experts
        slots, rest = extra.split([size, len(extra) - size])
        loads = rest.split([size, experts, experts]) if len(rest) else None
        return self.network.hidden(embedded, attend, active=slots >= 0, experts=slots, loads=loads)

    def expert_state(self) -> dict[str, int]:
        cache = self.expert_cache
        return _expert_state(self.token_router.uses, cache.hits, cache.misses, self._loaded_bytes)
