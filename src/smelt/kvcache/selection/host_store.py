"""Pages in host memory, of which the device holds a bounded number: what is chosen and not there is recalled.

A page on the device always equals its page on the host: it is copied whole, and what is written to one is written to
the other. So a recall is a copy in one direction, and a page that leaves the device needs none. On CUDA pages of the
host are pinned and copies run on a stream of their own; on a processor the slots of the device are a second buffer, and
the copies are as real.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from smelt.kernels.paged import empty_pages
from smelt.kvcache.selection.page_cache import OffloadConfig, ResidentPages
from smelt.kvcache.selection.page_store import GatheredPages, one_head, pages_of_layers, put, rows_of
from smelt.kvcache.selection.page_summary import LayerHeads


class HostPageStore:
    """All pages on the host; for each layer and head of keys as many slots on the device as the residence says."""

    def __init__(
        self,
        heads: LayerHeads,
        blocks: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        residence: OffloadConfig,
    ) -> None:
        self.most_at_once: int | None = residence.slots
        self._device = device
        self._keys, self._values = (_host_pages(heads, blocks, size, dtype, device) for _ in range(2))
        self._key_slots, self._value_slots = (
            {
                layer: empty_pages((kv_heads * residence.slots, size, width), dtype, device)
                for layer, (kv_heads, width) in heads.items()
            }
            for _ in range(2)
        )
        self.residents = {layer: ResidentPages(kv_heads, blocks, residence) for layer, (kv_heads, _) in heads.items()}
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.recalled_bytes = 0  # copied to the device because they were chosen
        self.staged_bytes = 0  # copied to the device for prompts, which attend to all of their pages

    def write(self, layer: int, keys: Tensor, values: Tensor, places: Tensor) -> None:
        put(self._keys[layer], keys.cpu(), places)
        put(self._values[layer], values.cpu(), places)
        self._write_slots(layer, keys, values, places)

    def keys_of(self, layer: int, blocks: Tensor) -> Tensor:
        return self._keys[layer][blocks].to(self._device)

    def whole(self, layer: int, blocks: Tensor) -> GatheredPages:
        """One layer of one request at a time is staged, for this call alone."""
        keys, values = (pages[layer][blocks].to(self._device) for pages in (self._keys, self._values))
        self.staged_bytes += keys.nbytes + values.nbytes
        rows = rows_of(torch.arange(len(blocks), device=self._device), keys.shape[1])
        return GatheredPages(one_head(keys), one_head(values), rows)

    def chosen(self, layer: int, blocks: Tensor, there: Tensor, step: int) -> GatheredPages:
        residents, (every, kv_heads) = self.residents[layer], self._keys[layer].shape[:2]
        blocks, there = blocks.cpu(), there.cpu()
        head = torch.arange(kv_heads)[:, None].expand_as(blocks)
        pages, back = (head * every + blocks)[there].unique(return_inverse=True)  # requests may share pages
        heads, mine = pages // every, pages % every
        slots, new = residents.admit(heads, mine, step)
        self._recall(layer, heads[new], mine[new], slots[new])
        rows, recalled = torch.zeros_like(blocks), torch.zeros_like(there)
        rows[there] = (heads * residents.residence.slots + slots)[back]
        recalled[there] = new[back]
        keys, values = self._key_slots[layer].unsqueeze(2), self._value_slots[layer].unsqueeze(2)
        return GatheredPages(keys, values, rows.to(self._device), recalled)

    def settle(self, step: int) -> None:
        for residents in self.residents.values():
            residents.settle(step)

    def keep_only(self, blocks: Tensor) -> None:
        for residents in self.residents.values():
            kept = torch.zeros(residents.slot_of.shape[1], dtype=torch.bool)
            kept[blocks] = True
            residents.keep_only(kept)

    def _write_slots(self, layer: int, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """The same tokens where their page lies on the device."""
        size, slots = self._keys[layer].shape[2], self.residents[layer].residence.slots
        found = self.residents[layer].slot_of[:, places // size].long()  # [kv_heads, tokens]
        head, token = (found >= 0).nonzero(as_tuple=True)
        if not len(head):
            return
        rows, offsets = head * slots + found[head, token], places[token] % size
        rows, offsets, head, token = (each.to(self._device) for each in (rows, offsets, head, token))
        self._key_slots[layer][rows, offsets] = keys[token, head]
        self._value_slots[layer][rows, offsets] = values[token, head]

    def _recall(self, layer: int, heads: Tensor, blocks: Tensor, slots: Tensor) -> None:
        if not len(heads):
            return
        kv_heads, every = self._keys[layer].shape[1], self.residents[layer].residence.slots
        source, target = blocks * kv_heads + heads, (heads * every + slots).to(self._device)
        pinned = self._side is not None
        with self._beside():
            for all_pages, all_slots in ((self._keys, self._key_slots), (self._values, self._value_slots)):
                pages, room = all_pages[layer].flatten(0, 1), all_slots[layer]
                gathered = torch.empty((len(source), *room.shape[1:]), dtype=room.dtype, pin_memory=pinned)
                torch.index_select(pages, 0, source, out=gathered)
                room.index_copy_(0, target, gathered.to(self._device, non_blocking=True))
                self.recalled_bytes += gathered.nbytes
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def _beside(self) -> AbstractContextManager[object]:
        """Copies wait for what still reads the slots; the processor does not wait for the copies: it gathers values
        while keys are on their way."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._side)


def _host_pages(
    heads: LayerHeads, blocks: int, size: int, dtype: torch.dtype, device: torch.device
) -> dict[int, Tensor]:
    """Pinned where a device copies from them."""
    if device.type == "cpu":
        return pages_of_layers(heads, blocks, size, dtype, device)
    return {
        layer: torch.zeros(blocks, kv_heads, size, width, dtype=dtype, pin_memory=True)
        for layer, (kv_heads, width) in heads.items()
    }
