"""Slots on the device for offloaded pages: which pages of a layer are resident, per KV head, and which are evicted.

Steady tokens, after PnG-KV (arXiv 2511.00321): consecutive steps select mostly the same pages, so recently selected
ones stay resident. Little more than the paper's abstract is known; this rule is our reconstruction: every
`refresh_interval` steps, pages that none of the last `keep_steps` steps selected are evicted. Pages are also evicted,
least recently selected first, when others need their slots: the bound comes before the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.errors import ConfigError


@dataclass(frozen=True)
class OffloadConfig:
    """How many pages of a host-memory KV cache may be resident on the device, and for how long."""

    num_slots: int = 1024  # pages per layer and KV head, shared by all requests
    keep_steps: int = 8  # steps for which a selected page stays resident; 0: none stays
    refresh_interval: int = 1  # steps between evictions

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ConfigError(f"{self.num_slots} slots hold no page; give at least as many pages as a head attends to.")
        if self.keep_steps < 0 or self.refresh_interval < 1:
            raise ConfigError(
                f"keep_steps is {self.keep_steps} and refresh_interval {self.refresh_interval}; "
                "they count steps, at least 0 and 1."
            )


class ResidentPages:
    """Slot bookkeeping of one layer, on the host. The caller copies the pages."""

    def __init__(self, kv_heads: int, num_blocks: int, config: OffloadConfig) -> None:
        self.config = config
        self.slot_of = torch.full((kv_heads, num_blocks), -1, dtype=torch.int32)
        self.block_in = torch.full((kv_heads, config.num_slots), -1)
        self.last_selected = torch.full((kv_heads, config.num_slots), -1)  # step

    @property
    def count(self) -> int:
        """Resident pages of all heads."""
        return int((self.block_in >= 0).sum())

    def slots(self, heads: Tensor, block_ids: Tensor) -> Tensor:
        """Return the slots of these pages; -1 where a page is not resident."""
        return self.slot_of[heads, block_ids].long()

    def admit(self, heads: Tensor, block_ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Assign a slot to each of these distinct pages [n], sorted by head.

        Returns the slots [n] and which of them are new and must be filled. No page among them evicts another."""
        slots = self.slots(heads, block_ids)
        new = slots < 0
        self.last_selected[heads[~new], slots[~new]] = step
        if new.any():
            slots[new] = self._free_slots(heads[new], heads[~new], slots[~new], step)
            self.slot_of[heads[new], block_ids[new]] = slots[new].int()
            self.block_in[heads[new], slots[new]] = block_ids[new]
            self.last_selected[heads[new], slots[new]] = step
        return slots, new

    def end_step(self, step: int) -> None:
        """Evict pages that were not selected recently."""
        if step % self.config.refresh_interval == 0:
            self._evict((self.block_in >= 0) & (self.last_selected <= step - self.config.keep_steps))

    def retain_blocks(self, in_use: Tensor) -> None:
        """Evict pages of blocks that no request uses; `in_use` is a mask [blocks]."""
        self._evict((self.block_in >= 0) & ~in_use[self.block_in.clamp(min=0)])

    def _free_slots(self, heads: Tensor, pinned_heads: Tensor, pinned_slots: Tensor, step: int) -> Tensor:
        """Free a slot for each of these heads [n]: empty ones first, then the least recently selected, none pinned."""
        age = self.last_selected.clone()
        age[pinned_heads, pinned_slots] = step + 1
        order = age.argsort(dim=1, stable=True)  # [kv_heads, slots]
        num_needed = heads.bincount(minlength=len(order))
        num_pinned = pinned_heads.bincount(minlength=len(order))
        if bool((num_needed + num_pinned > self.config.num_slots).any()):
            raise RuntimeError(f"{int((num_needed + num_pinned).max())} pages of a head cannot be in its slots at once")
        rank = torch.arange(len(heads)) - (num_needed.cumsum(0) - num_needed)[heads]  # within the head
        slots = order[heads, rank]
        self._clear(heads, slots)
        return slots

    def _evict(self, mask: Tensor) -> None:  # [kv_heads, slots]
        heads, slots = mask.nonzero(as_tuple=True)
        self._clear(heads, slots)

    def _clear(self, heads: Tensor, slots: Tensor) -> None:
        block_ids = self.block_in[heads, slots]
        occupied = block_ids >= 0
        self.slot_of[heads[occupied], block_ids[occupied]] = -1
        self.block_in[heads, slots] = -1
        self.last_selected[heads, slots] = -1
