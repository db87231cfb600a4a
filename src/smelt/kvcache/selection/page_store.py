"""KV cache pages of one head each: block b of head h is page b * kv_heads + h.

So every head of a request is a sequence with its own block table, and attention over any selection of pages is plain
paged attention with one KV head. This file stores all pages on the device; `host_store` offloads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from smelt.kernels.paged import allocate_kv_pages
from smelt.kvcache.selection.page_summary import LayerHeads


@dataclass(frozen=True)
class GatheredPages:
    """Pages on the device, and the block table of each sequence into them."""

    keys: Tensor  # [pages, page_size, 1, head_dim]
    values: Tensor
    block_tables: Tensor  # [..., pages per sequence], int64
    recalled: Tensor | None = None  # shape of `block_tables`, on the host: copied for this call; None: none was


class PageStore(Protocol):
    """Storage of pages as sparse page attention uses it."""

    max_pages_per_call: int | None  # pages per head that fit on the device for one call; None: all

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Write new tokens [tokens, kv_heads, head_dim] to slots block * page_size + offset (on the host)."""

    def gather_keys(self, layer: int, block_ids: Tensor) -> Tensor:
        """Return the keys [n, kv_heads, page_size, head_dim] of blocks [n]."""

    def gather_all(self, layer: int, block_ids: Tensor) -> GatheredPages:
        """Return all pages of one request; block_tables [kv_heads, blocks]."""

    def gather_selected(self, layer: int, block_ids: Tensor, mask: Tensor, step: int) -> GatheredPages:
        """Return the blocks [requests, kv_heads, pages] where `mask` is set; mask and block_tables have that shape."""

    def end_step(self, step: int) -> None:
        """Finish a step, after its last layer."""

    def retain_blocks(self, block_ids: Tensor) -> None:
        """Drop resident pages of all other blocks, which no request uses."""


class DevicePageStore:
    """Keep all pages on the device: sparse attention saves memory traffic, not memory."""

    def __init__(
        self, heads: LayerHeads, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_pages_per_call: int | None = None
        self._device = device
        self._keys, self._values = (allocate_layer_pages(heads, num_blocks, page_size, dtype, device) for _ in range(2))

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        write_pages(self._keys[layer], keys, slot_mapping.to(self._device))
        write_pages(self._values[layer], values, slot_mapping.to(self._device))

    def gather_keys(self, layer: int, block_ids: Tensor) -> Tensor:
        return self._keys[layer][block_ids.to(self._device)]

    def gather_all(self, layer: int, block_ids: Tensor) -> GatheredPages:
        kv_heads = self._keys[layer].shape[1]
        return self._gathered(layer, per_head_tables(block_ids.to(self._device), kv_heads))

    def gather_selected(self, layer: int, block_ids: Tensor, mask: Tensor, step: int) -> GatheredPages:
        kv_heads = self._keys[layer].shape[1]
        head = torch.arange(kv_heads, device=self._device)[:, None]
        return self._gathered(layer, block_ids * kv_heads + head)

    def end_step(self, step: int) -> None:
        """Do nothing: pages never move."""

    def retain_blocks(self, block_ids: Tensor) -> None:
        """Do nothing: the block pool tracks blocks in use."""

    def _gathered(self, layer: int, block_tables: Tensor) -> GatheredPages:
        return GatheredPages(single_head_pages(self._keys[layer]), single_head_pages(self._values[layer]), block_tables)


def allocate_layer_pages(
    heads: LayerHeads, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> dict[int, Tensor]:
    """Allocate [blocks, kv_heads, page_size, head_dim] per layer."""
    return {
        layer: allocate_kv_pages((num_blocks, kv_heads, page_size, head_dim), dtype, device)
        for layer, (kv_heads, head_dim) in heads.items()
    }


def write_pages(pages: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
    """Write tokens [tokens, kv_heads, head_dim] into pages [blocks, kv_heads, page_size, head_dim]."""
    page_size = pages.shape[2]
    pages[slot_mapping // page_size, :, slot_mapping % page_size] = new


def per_head_tables(block_ids: Tensor, kv_heads: int) -> Tensor:
    """Return the block table of each head, [kv_heads, blocks], from the blocks [blocks] of a request."""
    return block_ids * kv_heads + torch.arange(kv_heads, device=block_ids.device)[:, None]


def single_head_pages(pages: Tensor) -> Tensor:
    """View pages [blocks, kv_heads, page_size, head_dim] as a paged KV cache with one head."""
    return pages.flatten(0, 1).unsqueeze(2)
