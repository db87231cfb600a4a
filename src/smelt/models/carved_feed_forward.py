"""The module of a feed-forward that is carved into experts, and the routing that all layers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from smelt.errors import ModelError
from smelt.models.expert_router import ExpertRouter
from smelt.models.experts import Expert
from smelt.models.families import ExpertPaths


@dataclass(frozen=True)
class SharedRouting:
    """The experts of the tokens of one forward pass, and the tokens sorted by expert."""

    experts: Tensor  # [tokens]
    order: Tensor  # of the tokens, by expert
    inverse: Tensor  # where each token is in that order
    counts: tuple[int, ...]  # tokens of each expert

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> SharedRouting:
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = tuple(torch.bincount(flat, minlength=num_experts).tolist())
        return cls(flat, order, torch.argsort(order), counts)

    def to(self, device: torch.device) -> SharedRouting:
        return SharedRouting(self.experts.to(device), self.order.to(device), self.inverse.to(device), self.counts)


class ExpertRoutes:
    """Holds the routing of the forward pass in progress, which the router or an engine computes."""

    def __init__(self, router: ExpertRouter) -> None:
        self._router = (router,)  # in a tuple: it is a part of the network already
        self._current: SharedRouting | None = None
        self._preset = False

    @property
    def router(self) -> ExpertRouter:
        return self._router[0]

    @contextmanager
    def preset(self, routing: SharedRouting) -> Iterator[None]:
        """Use this routing inside the context instead of asking the router."""
        self._current, self._preset = routing, True
        try:
            yield
        finally:
            self._current, self._preset = None, False

    def begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Route the tokens of a forward pass of the backbone (a forward pre-hook)."""
        if self._preset:
            return args, kwargs
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if ids is None:
            raise ModelError("the router of this model reads token ids; give input_ids instead of embeddings.")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise ModelError("the router of this model needs an attention mask with one value per token.")
        cache, layers = kwargs.get("past_key_values"), module.config.num_hidden_layers
        uses_cache = kwargs.get("use_cache")
        if cache is None and (module.config.use_cache if uses_cache is None else uses_cache) and not module.training:
            cache = kwargs["past_key_values"] = DynamicCache(config=module.config)
        if cache is not None and cache.get_seq_length() and len(cache.layers) <= layers:
            raise ModelError("this KV cache was not filled by this model: it lacks the keys of the expert router.")
        experts = self.router.route(ids, mask, cache=cache, first_layer=layers)
        self._current = SharedRouting.of(experts, self.router.config.experts)
        return args, kwargs

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget the routing after a forward pass (a forward hook)."""
        if not self._preset:
            self._current = None

    def take(self, tokens: int) -> SharedRouting:
        """Return the routing, for a feed-forward that has so many tokens."""
        if self._current is None or len(self._current.experts) != tokens:
            raise ModelError(
                "the experts of this model are chosen before its first layer, so a layer cannot run by itself; run the "
                "whole network."
            )
        return self._current


class CarvedFeedForward(nn.Module):
    """The shared channels, and the expert of each token; the routing is that of the whole forward pass."""

    def __init__(
        self, names: ExpertPaths, shared: Expert, experts: Sequence[Expert], activation: Callable[[Tensor], Tensor],
        routes: ExpertRoutes,
    ) -> None:  # fmt: skip
        super().__init__()
        self.names, self.act_fn = names, activation
        for name in (names.gate, names.up, names.down):  # as in the feed-forward that this replaces
            self.add_module(name, shared.get_submodule(name))
        self.experts = nn.ModuleList(experts)
        self.routes = routes
        self.run_expert: Callable[[int, Tensor], Tensor] | None = None  # set where experts are not all resident
        self.expert_order: Sequence[int] | None = None  # in which they run; the result does not depend on it

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        gate, up, down = (self.get_submodule(name) for name in (self.names.gate, self.names.up, self.names.down))
        shared: Tensor = down(gated(self.act_fn, gate(flat), up(flat)))
        routing = self.routes.take(len(flat))
        parts = list(flat[routing.order].split(list(routing.counts)))
        for index in self.expert_order if self.expert_order is not None else range(len(parts)):
            if len(parts[index]) or self.training:  # in training every parameter gets a gradient
                run = self.run_expert or self._run_resident
                parts[index] = run(index, parts[index])
        return (shared + torch.cat(parts)[routing.inverse]).view_as(hidden_states)

    def _run_resident(self, index: int, tokens: Tensor) -> Tensor:
        output: Tensor = self.experts[index](tokens)
        return output


def gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """Return the inputs of the down projection."""
    return activation(gate) * up
