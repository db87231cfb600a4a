"""KV cache pages offloaded to host memory; a bounded number is resident on the device, and selected pages are recalled.

A resident page always equals its page on the host: it is copied as a unit, and writes go to both. So a recall copies
in one direction, and evicting a page copies nothing. On CUDA host pages are pinned and copies run on a side stream; on
CPU the device slots are a second buffer, with the same copies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from smelt.kernels.paged import allocate_kv_pages
from smelt.kvcache.selection.page_cache import OffloadConfig, ResidentPages
from smelt.kvcache.selection.page_store import (
    GatheredPages,
    allocate_layer_pages,
    per_head_tables,
    single_head_pages,
    write_pages,
)
from smelt.kvcache.selection.page_summary import LayerHeads


class HostPageStore:
    """All pages on the host; `config.num_slots` slots per layer and KV head on the device."""

    def __init__(
        self,
        heads: LayerHeads,
        num_blocks: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        config: OffloadConfig,
    ) -> None:
        self.max_pages_per_call: int | None = config.num_slots
        self._device = device
        self._keys, self._values = (_host_pages(heads, num_blocks, page_size, dtype, device) for _ in range(2))
        self._key_slots, self._value_slots = (
            {
                layer: allocate_kv_pages((kv_heads * config.num_slots, page_size, head_dim), dtype, device)
                for layer, (kv_heads, head_dim) in heads.items()
            }
            for _ in range(2)
        )
        self.residents = {layer: ResidentPages(kv_heads, num_blocks, config) for layer, (kv_heads, _) in heads.items()}
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.recalled_bytes = 0  # copied to the device for decode steps
        self.staged_bytes = 0  # copied to the device for prefill, which attends to all pages

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        write_pages(self._keys[layer], keys.cpu(), slot_mapping)
        write_pages(self._values[layer], values.cpu(), slot_mapping)
        self._write_resident(layer, keys, values, slot_mapping)

    def gather_keys(self, layer: int, block_ids: Tensor) -> Tensor:
        return self._keys[layer][block_ids].to(self._device)

    def gather_all(self, layer: int, block_ids: Tensor) -> GatheredPages:
        """Stage one layer of one request, for this call alone."""
        keys, values = (pages[layer][block_ids].to(self._device) for pages in (self._keys, self._values))
        self.staged_bytes += keys.nbytes + values.nbytes
        block_tables = per_head_tables(torch.arange(len(block_ids), device=self._device), keys.shape[1])
        return GatheredPages(single_head_pages(keys), single_head_pages(values), block_tables)

    def gather_selected(self, layer: int, block_ids: Tensor, mask: Tensor, step: int) -> GatheredPages:
        residents, (num_blocks, kv_heads) = self.residents[layer], self._keys[layer].shape[:2]
        block_ids, mask = block_ids.cpu(), mask.cpu()
        head = torch.arange(kv_heads)[:, None].expand_as(block_ids)
        pages, inverse = (head * num_blocks + block_ids)[mask].unique(return_inverse=True)  # requests may share pages
        heads, page_blocks = pages // num_blocks, pages % num_blocks
        slots, new = residents.admit(heads, page_blocks, step)
        self._recall(layer, heads[new], page_blocks[new], slots[new])
        block_tables, recalled = torch.zeros_like(block_ids), torch.zeros_like(mask)
        block_tables[mask] = (heads * residents.config.num_slots + slots)[inverse]
        recalled[mask] = new[inverse]
        keys, values = self._key_slots[layer].unsqueeze(2), self._value_slots[layer].unsqueeze(2)
        return GatheredPages(keys, values, block_tables.to(self._device), recalled)

    def end_step(self, step: int) -> None:
        for residents in self.residents.values():
            residents.end_step(step)

    def retain_blocks(self, block_ids: Tensor) -> None:
        for residents in self.residents.values():
            in_use = torch.zeros(residents.slot_of.shape[1], dtype=torch.bool)
            in_use[block_ids] = True
            residents.retain_blocks(in_use)

    def _write_resident(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Write the same tokens to the pages that are resident."""
        page_size, num_slots = self._keys[layer].shape[2], self.residents[layer].config.num_slots
        slots = self.residents[layer].slot_of[:, slot_mapping // page_size].long()  # [kv_heads, tokens]
        head, token = (slots >= 0).nonzero(as_tuple=True)
        if not len(head):
            return
        rows, offsets = head * num_slots + slots[head, token], slot_mapping[token] % page_size
        rows, offsets, head, token = (index.to(self._device) for index in (rows, offsets, head, token))
        self._key_slots[layer][rows, offsets] = keys[token, head]
        self._value_slots[layer][rows, offsets] = values[token, head]

    def _recall(self, layer: int, heads: Tensor, block_ids: Tensor, slots: Tensor) -> None:
        if not len(heads):
            return
        kv_heads, num_slots = self._keys[layer].shape[1], self.residents[layer].config.num_slots
        source, target = block_ids * kv_heads + heads, (heads * num_slots + slots).to(self._device)
        pinned = self._copy_stream is not None
        with self._on_copy_stream():
            for host, device in ((self._keys, self._key_slots), (self._values, self._value_slots)):
                pages, resident = host[layer].flatten(0, 1), device[layer]
                gathered = torch.empty((len(source), *resident.shape[1:]), dtype=resident.dtype, pin_memory=pinned)
                torch.index_select(pages, 0, source, out=gathered)
                resident.index_copy_(0, target, gathered.to(self._device, non_blocking=True))
                self.recalled_bytes += gathered.nbytes
        if self._copy_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copy_stream)

    def _on_copy_stream(self) -> AbstractContextManager[object]:
        """Make copies wait for kernels that still read the slots. The host does not wait for the copies: it gathers
        values while keys are in flight."""
        if self._copy_stream is None:
            return nullcontext()
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._copy_stream)


def _host_pages(
    heads: LayerHeads, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> dict[int, Tensor]:
    """Allocate host pages, pinned where a GPU copies from them."""
    if device.type == "cpu":
        return allocate_layer_pages(heads, num_blocks, page_size, dtype, device)
    return {
        layer: torch.zeros(num_blocks, kv_heads, page_size, head_dim, dtype=dtype, pin_memory=True)
        for layer, (kv_heads, head_dim) in heads.items()
    }
