"""Block tables: which KV cache blocks hold the tokens of each running request.

Blocks are appended to a request's list, so a step writes only those that were allocated since the last one, for all
requests in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from smelt.serve.engine.request import Request
from smelt.serve.engine.scheduler import ScheduledChunk

ToDevice = Callable[[np.ndarray[Any, Any]], Tensor]


class BlockTables:
    """Write block ids into `tables` [slots, ...], int32, one row per request slot.

    `to_device` copies an array to the device of the tables; on a GPU it must not synchronize. The tables are updated in
    place, so that a CUDA graph may read them.
    """

    def __init__(self, tables: Tensor, to_device: ToDevice) -> None:
        self.tables = tables
        self._to_device = to_device
        self._row_size = tables[0].numel()
        self._written: list[tuple[list[int], int]] = [([], 0)] * len(tables)  # per slot: blocks, and how many of them
        self._entries: list[int] = []  # staged: indices into the flattened tables, and what to write there
        self._blocks: list[int] = []

    def update(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Write the new blocks of the requests of a step, each in the order of its blocks."""
        written = self._written
        for chunk in chunks:
            request = chunk.request
            blocks, count = written[request.slot]
            if blocks is not request.blocks or count < len(blocks):  # most steps add no block
                self.stage_new_blocks(request)
        self.commit()

    def stage_new_blocks(self, request: Request, entries: Sequence[int] | None = None) -> None:
        """Stage the blocks that were not written yet. `entries` are the row entries of all blocks of the request; by
        default they are in order."""
        blocks, count = self._written[request.slot]
        if blocks is not request.blocks:  # another request's, or its own before a preemption
            count = 0
        total = len(request.blocks)
        if count < total:
            new_entries = range(count, total) if entries is None else entries[count:]
            self.stage(request.slot, new_entries, request.blocks[count:])
            self._written[request.slot] = (request.blocks, total)

    def stage(self, slot: int, entries: Iterable[int], blocks: Iterable[int]) -> None:
        """Stage blocks at these entries of a slot's row."""
        first = slot * self._row_size
        self._entries += [first + entry for entry in entries]
        self._blocks += blocks

    def commit(self) -> None:
        """Write what was staged, in one copy to the device."""
        if self._entries:
            update = self._to_device(np.array([self._entries, self._blocks], dtype=np.int64))
            self.tables.view(-1)[update[0]] = update[1].int()
            self._entries, self._blocks = [], []
