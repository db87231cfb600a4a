"""Which pages of a layer lie on the device, slot by slot, for each head of keys; and which of them stay there.

Steady tokens, after PnG-KV (arXiv 2511.00321): consecutive steps choose mostly the same pages, so that those chosen
lately are worth their place. [recon] Little more than the abstract of the paper is known; the rule here is our
reconstruction: every `refresh` steps, pages that none of the last `steady` steps chose leave. Pages also leave, those
not chosen for longest first, when others need their slots: the bound comes before the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.errors import ConfigError


@dataclass(frozen=True)
class OffloadConfig:
    """How much of a cache on the host may be on the device, and for how long."""

    slots: int = 1024  # pages of every layer and head of keys, for all requests together
    steady: int = 8  # steps for which a page that was chosen stays; 0: nothing stays
    refresh: int = 1  # steps between two looks at what may go

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigError(f"{self.slots} slots hold no page; give as many pages as a head attends to, or more.")
        if self.steady < 0 or self.refresh < 1:
            told = f"steady is {self.steady} and refresh {self.refresh}"
            raise ConfigError(f"{told}; they count steps, at least 0 and 1.")


class ResidentPages:
    """Of one layer. Numbers only, on the host: the pages themselves are moved by whoever asks for slots."""

    def __init__(self, kv_heads: int, blocks: int, residence: OffloadConfig) -> None:
        self.residence = residence
        self.slot_of = torch.full((kv_heads, blocks), -1, dtype=torch.int32)
        self.block_in = torch.full((kv_heads, residence.slots), -1)
        self.chosen_at = torch.full((kv_heads, residence.slots), -1)  # the last step that chose it

    @property
    def count(self) -> int:
        """Pages on the device, of all heads."""
        return int((self.block_in >= 0).sum())

    def slots(self, heads: Tensor, blocks: Tensor) -> Tensor:
        """Where these pages lie; -1: not on the device."""
        return self.slot_of[heads, blocks].long()

    def admit(self, heads: Tensor, blocks: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """A slot for each of these pages [n], which all differ and are sorted by head; and which of them are new there
        and must be filled. No page among them loses its slot to another."""
        slots = self.slots(heads, blocks)
        new = slots < 0
        self.chosen_at[heads[~new], slots[~new]] = step
        if new.any():
            slots[new] = self._taken(heads[new], heads[~new], slots[~new], step)
            self.slot_of[heads[new], blocks[new]] = slots[new].int()
            self.block_in[heads[new], slots[new]] = blocks[new]
            self.chosen_at[heads[new], slots[new]] = step
        return slots, new

    def settle(self, step: int) -> None:
        """The steady rule, at the end of a step."""
        if step % self.residence.refresh == 0:
            self._drop((self.block_in >= 0) & (self.chosen_at <= step - self.residence.steady))

    def keep_only(self, kept: Tensor) -> None:
        """Blocks [blocks] that are still anyone's; the others leave."""
        self._drop((self.block_in >= 0) & ~kept[self.block_in.clamp(min=0)])

    def _taken(self, heads: Tensor, held_heads: Tensor, held_slots: Tensor, step: int) -> Tensor:
        """A slot for each of these heads [n]: empty ones first, then those not chosen for longest; none of the held."""
        age = self.chosen_at.clone()
        age[held_heads, held_slots] = step + 1
        order = age.argsort(dim=1, stable=True)  # [kv_heads, slots]
        wanted = heads.bincount(minlength=len(order))
        held = held_heads.bincount(minlength=len(order))
        if bool((wanted + held > self.residence.slots).any()):
            raise RuntimeError(f"{int((wanted + held).max())} pages of a head cannot be in its slots at once")
        rank = torch.arange(len(heads)) - (wanted.cumsum(0) - wanted)[heads]  # among those of the same head
        slots = order[heads, rank]
        self._empty(heads, slots)
        return slots

    def _drop(self, which: Tensor) -> None:  # [kv_heads, slots]
        heads, slots = which.nonzero(as_tuple=True)
        self._empty(heads, slots)

    def _empty(self, heads: Tensor, slots: Tensor) -> None:
        blocks = self.block_in[heads, slots]
        held = blocks >= 0
        self.slot_of[heads[held], blocks[held]] = -1
        self.block_in[heads, slots] = -1
        self.chosen_at[heads, slots] = -1
