"""Keys and values in pages of one head each: block b of head h is page b * kv_heads + h.

So every head of a request is a sequence of its own with its own table, and attention over any choice of pages is plain
paged attention with one head of keys. This file has the pages that all lie on the device; `host` has the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from smelt.kernels.paged import empty_pages
from smelt.kvcache.selection.page_summary import LayerHeads


@dataclass(frozen=True)
class GatheredPages:
    """Pages that lie on the device, and which of them are meant."""

    keys: Tensor  # [pages, tokens, 1, width]
    values: Tensor
    rows: Tensor  # [..., pages of a sequence], int64
    recalled: Tensor | None = None  # the shape of `rows`, on the host: which had to be copied; None: nothing was


class Pages(Protocol):
    """What attention needs of the place where pages lie."""

    most_at_once: int | None  # pages of a head that can be on the device for one call; None: all

    def write(self, layer: int, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """New tokens [tokens, kv_heads, width]; places are block * size + offset, on the host."""

    def keys_of(self, layer: int, blocks: Tensor) -> Tensor:
        """[n, kv_heads, tokens, width] of blocks [n]."""

    def whole(self, layer: int, blocks: Tensor) -> GatheredPages:
        """All pages of one request; rows [kv_heads, blocks]."""

    def chosen(self, layer: int, blocks: Tensor, there: Tensor, step: int) -> GatheredPages:
        """Of blocks [requests, kv_heads, pages] those that are `there` (the same shape): rows of that shape."""

    def settle(self, step: int) -> None:
        """A step is done."""

    def keep_only(self, blocks: Tensor) -> None:
        """Only these blocks are still anyone's."""


class DevicePageStore:
    """Everything on the device: selection saves reading, not memory."""

    def __init__(self, heads: LayerHeads, blocks: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.most_at_once: int | None = None
        self._device = device
        self._keys, self._values = (pages_of_layers(heads, blocks, size, dtype, device) for _ in range(2))

    def write(self, layer: int, keys: Tensor, values: Tensor, places: Tensor) -> None:
        put(self._keys[layer], keys, places.to(self._device))
        put(self._values[layer], values, places.to(self._device))

    def keys_of(self, layer: int, blocks: Tensor) -> Tensor:
        return self._keys[layer][blocks.to(self._device)]

    def whole(self, layer: int, blocks: Tensor) -> GatheredPages:
        kv_heads = self._keys[layer].shape[1]
        return self._found(layer, rows_of(blocks.to(self._device), kv_heads))

    def chosen(self, layer: int, blocks: Tensor, there: Tensor, step: int) -> GatheredPages:
        kv_heads = self._keys[layer].shape[1]
        head = torch.arange(kv_heads, device=self._device)[:, None]
        return self._found(layer, blocks * kv_heads + head)

    def settle(self, step: int) -> None:
        """Nothing moves."""

    def keep_only(self, blocks: Tensor) -> None:
        """The pool of blocks knows it."""

    def _found(self, layer: int, rows: Tensor) -> GatheredPages:
        return GatheredPages(one_head(self._keys[layer]), one_head(self._values[layer]), rows)


def pages_of_layers(
    heads: LayerHeads, blocks: int, size: int, dtype: torch.dtype, device: torch.device
) -> dict[int, Tensor]:
    """Of each layer, [blocks, kv_heads, size, width]."""
    return {layer: empty_pages((blocks, count, size, width), dtype, device) for layer, (count, width) in heads.items()}


def put(pages: Tensor, new: Tensor, places: Tensor) -> None:
    """New tokens [tokens, kv_heads, width] into pages [blocks, kv_heads, size, width]."""
    size = pages.shape[2]
    pages[places // size, :, places % size] = new


def rows_of(blocks: Tensor, kv_heads: int) -> Tensor:
    """Blocks of a request [blocks] as pages of each head: [kv_heads, blocks]."""
    return blocks * kv_heads + torch.arange(kv_heads, device=blocks.device)[:, None]


def one_head(pages: Tensor) -> Tensor:
    """[blocks, kv_heads, size, width] seen as a cache with one head of keys."""
    return pages.flatten(0, 1).unsqueeze(2)
