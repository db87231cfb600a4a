"""The pot: a cache of keys and values that is allocated once and never grows. When it is full, each head keeps some of
its tokens, all heads the same number, and they are moved together in place.

How many tokens lie in it (`length`) and how many have passed through it (`seen`) are two different things: a network is
told positions by whoever feeds it, and masks are made from the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from smelt.errors import ModelError, ResourceError

Turned = Callable[[Tensor, Tensor], Tensor]  # keys [kv_heads, tokens, width], their slots before: as they shall lie now


class BoundedCacheLayer(DynamicLayer):
    """One layer: keys and values [kv_heads, cap, width], which token of the stream lies where [kv_heads, cap], and with
    `marked` a number of its own for each [kv_heads, cap], which moves with it."""

    def __init__(self, cap: int, marked: bool) -> None:
        super().__init__()
        self.cap, self.marked, self.length, self.seen = cap, marked, 0, 0
        self.numbers: Tensor
        self.marks: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros((key_states.shape[1], self.cap, key_states.shape[3]))
        self.values = value_states.new_zeros((value_states.shape[1], self.cap, value_states.shape[3]))
        self.numbers = torch.zeros(self.keys.shape[:2], dtype=torch.int64, device=self.device)
        self.marks = torch.zeros(self.keys.shape[:2] if self.marked else (0, 0), device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Lay new tokens [1, kv_heads, new, width] behind the others, and give all back."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, new = self.length, key_states.shape[2]
        end = begin + new
        if end > self.cap:
            raise ResourceError(f"the pot holds {self.cap} tokens, and {end} were to lie in it.")
        self.keys[:, begin:end], self.values[:, begin:end] = key_states[0], value_states[0]
        self.numbers[:, begin:end] = torch.arange(self.seen, self.seen + new, device=self.device)
        self.length, self.seen = end, self.seen + new
        return self.keys[None, :, :end], self.values[None, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.cap

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number as transformers does."""
        self.back_to(self.length + tokens_to_remove, self.seen + tokens_to_remove)

    def back_to(self, length: int, seen: int) -> None:
        """Forget what came later. It is wiped out, so that nothing is left of it."""
        for tensor in self.tensors():
            tensor[:, length : self.length] = 0
        self.length, self.seen = length, seen

    def keep(self, places: Tensor, first: int, turned: Turned | None) -> None:
        """Of the tokens past `first` each head keeps those at these places [kv_heads, count], in rising order."""
        count = places.shape[1]
        for tensor in self.tensors():
            index = places if tensor.dim() == 2 else places[..., None].expand(-1, -1, tensor.shape[2])
            tensor[:, first : first + count] = tensor[:, first:].gather(1, index)
        if turned is not None:
            self.keys[:, first : first + count] = turned(self.keys[:, first : first + count], places + first)
        self.back_to(first + count, self.seen)

    def tensors(self) -> tuple[Tensor, ...]:
        if not self.is_initialized:
            return ()
        return (self.keys, self.values, self.numbers, *([self.marks] if self.marked else []))


class BoundedCache(Cache):
    """Give it to a network as `past_key_values`: one stream, batch 1, every layer with full attention."""

    def __init__(self, cap: int, config: PreTrainedConfig, marked: bool = False) -> None:
        check_layers(config)
        self.cap = cap
        super().__init__(layers=[BoundedCacheLayer(cap, marked) for _ in range(config.num_hidden_layers)])

    def allocate(self, feed: Callable[[], Any]) -> None:
        """Allocate everything by letting `feed` put a token through the network, of which nothing stays."""
        with self.aside():
            feed()

    @property
    def length(self) -> int:
        """Tokens that lie in it."""
        return int(self.layers[0].length)

    @property
    def seen(self) -> int:
        """Tokens that came, whether they stayed or not."""
        return int(self.layers[0].seen)

    @property
    def bytes(self) -> int:
        """All that it holds: keys, values, numbers and marks of tokens, also of slots that are free."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What comes inside is forgotten afterwards, to the bit."""
        length, seen = self.length, self.seen
        try:
            yield
        finally:
            self._back_to(length, seen)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What comes inside stays, unless it is cut off: then nothing of it does."""
        length, seen = self.length, self.seen
        try:
            yield
        except BaseException:
            self._back_to(length, seen)
            raise

    def _back_to(self, length: int, seen: int) -> None:
        for layer in self.layers:
            layer.back_to(length, seen)

    def keep(self, layer: int, places: Tensor, first: int = 0, turned: Turned | None = None) -> None:
        """Each head of a layer keeps the tokens past `first` that lie at `places` [kv_heads, count] from there on."""
        self.layers[layer].keep(places, first, turned)


def check_layers(config: PreTrainedConfig) -> None:
    """Layers that keep their own last tokens, or no tokens at all, cannot be cooked down."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise ModelError("this model has layers without full attention (sliding ones, for instance); a pot needs it.")


def best_in_order(scores: Tensor, count: int) -> Tensor:
    """The places of the best [..., count] of scores [..., tokens], in rising order; of equal ones the earlier."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values
