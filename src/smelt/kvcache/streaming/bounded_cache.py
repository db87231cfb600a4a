"""Bounded KV cache: allocated once, never grows. When it is full, each head retains some of its tokens, all heads the
same number, compacted in place.

Tokens in the cache (`length`) and tokens that have passed through it (`num_seen`) differ: the caller chooses position
ids, and masks are made from the length.
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
from smelt.kvcache.eviction.attention import has_full_attention

RerotateFn = Callable[[Tensor, Tensor], Tensor]  # keys [kv_heads, tokens, head_dim] and their old slots -> moved keys


class BoundedCacheLayer(DynamicLayer):
    """One layer: keys and values [kv_heads, capacity, head_dim], the stream index of each token [kv_heads, capacity],
    and with `with_token_scores` one score per token [kv_heads, capacity] that moves with it."""

    def __init__(self, capacity: int, with_token_scores: bool) -> None:
        super().__init__()
        self.capacity, self.with_token_scores, self.length, self.num_seen = capacity, with_token_scores, 0, 0
        self.token_indices: Tensor
        self.token_scores: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros((key_states.shape[1], self.capacity, key_states.shape[3]))
        self.values = value_states.new_zeros((value_states.shape[1], self.capacity, value_states.shape[3]))
        self.token_indices = torch.zeros(self.keys.shape[:2], dtype=torch.int64, device=self.device)
        scores_shape = self.keys.shape[:2] if self.with_token_scores else (0, 0)
        self.token_scores = torch.zeros(scores_shape, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new tokens [1, kv_heads, new, head_dim] and return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, new = self.length, key_states.shape[2]
        end = begin + new
        if end > self.capacity:
            raise ResourceError(f"the bounded cache holds {self.capacity} tokens; {end} do not fit.")
        self.keys[:, begin:end], self.values[:, begin:end] = key_states[0], value_states[0]
        self.token_indices[:, begin:end] = torch.arange(self.num_seen, self.num_seen + new, device=self.device)
        self.length, self.num_seen = end, self.num_seen + new
        return self.keys[None, :, :end], self.values[None, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; the count is negative, as in transformers."""
        self.rollback(self.length + tokens_to_remove, self.num_seen + tokens_to_remove)

    def rollback(self, length: int, num_seen: int) -> None:
        """Remove later tokens and zero their slots."""
        for tensor in self.tensors():
            tensor[:, length : self.length] = 0
        self.length, self.num_seen = length, num_seen

    def retain(self, indices: Tensor, first: int, rerotate: RerotateFn | None) -> None:
        """Retain the tokens at `indices` [kv_heads, count], in rising order, of those from slot `first` on."""
        count = indices.shape[1]
        for tensor in self.tensors():
            index = indices if tensor.dim() == 2 else indices[..., None].expand(-1, -1, tensor.shape[2])
            tensor[:, first : first + count] = tensor[:, first:].gather(1, index)
        if rerotate is not None:
            self.keys[:, first : first + count] = rerotate(self.keys[:, first : first + count], indices + first)
        self.rollback(first + count, self.num_seen)

    def tensors(self) -> tuple[Tensor, ...]:
        if not self.is_initialized:
            return ()
        return (self.keys, self.values, self.token_indices, *([self.token_scores] if self.with_token_scores else []))


class BoundedCache(Cache):
    """Pass it to a network as `past_key_values`: one stream, batch size 1, full attention in every layer."""

    def __init__(self, capacity: int, config: PreTrainedConfig, with_token_scores: bool = False) -> None:
        check_full_attention(config)
        self.capacity = capacity
        super().__init__(
            layers=[BoundedCacheLayer(capacity, with_token_scores) for _ in range(config.num_hidden_layers)]
        )

    def allocate(self, feed: Callable[[], Any]) -> None:
        """Allocate all layers: `feed` runs one token through the network, which is removed again."""
        with self.temporary():
            feed()

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return int(self.layers[0].length)

    @property
    def num_seen(self) -> int:
        """Tokens that were appended, retained or not."""
        return int(self.layers[0].num_seen)

    @property
    def nbytes(self) -> int:
        """Allocated bytes: keys, values, token indices and scores, free slots included."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Remove tokens appended inside when the block ends; the cache is restored bit for bit."""
        length, num_seen = self.length, self.num_seen
        try:
            yield
        finally:
            self._rollback(length, num_seen)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep tokens appended inside, unless the block raises: then none of them."""
        length, num_seen = self.length, self.num_seen
        try:
            yield
        except BaseException:
            self._rollback(length, num_seen)
            raise

    def _rollback(self, length: int, num_seen: int) -> None:
        for layer in self.layers:
            layer.rollback(length, num_seen)

    def retain(self, layer: int, indices: Tensor, first: int = 0, rerotate: RerotateFn | None = None) -> None:
        """Retain the tokens of a layer at `indices` [kv_heads, count], counted from slot `first`."""
        self.layers[layer].retain(indices, first, rerotate)


def check_full_attention(config: PreTrainedConfig) -> None:
    """Refuse layers that keep only their last tokens, or none: they cannot be compressed."""
    if not has_full_attention(config):
        raise ModelError(
            "this model has layers without full attention, such as sliding-window layers; a bounded cache needs it."
        )


def topk_in_order(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` best scores [..., tokens], in rising order; earlier tokens win ties."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values
