"""Block tables: only new blocks are written, in one copy, wherever the tables are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt.serve.engine.block_table import BlockTables
from smelt.serve.engine.request import Request, RequestId
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.scheduler import ScheduledChunk


class Copies:
    """Count the entries of each copy to the device."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, values: np.ndarray[Any, Any]) -> Tensor:
        self.sizes.append(values.shape[1])
        return torch.from_numpy(values)


def request(slot: int, blocks: list[int]) -> Request:
    return Request(RequestId(str(slot)), [1], SamplingParams(), 8, slot=slot, blocks=blocks)


def chunks(*requests: Request) -> list[ScheduledChunk]:
    return [ScheduledChunk(each, 0, 1, True) for each in requests]


def build(*shape: int) -> tuple[BlockTables, Copies]:
    copies = Copies()
    return BlockTables(torch.zeros(shape, dtype=torch.int32), copies), copies


def test_new_blocks_of_all_requests_are_one_copy() -> None:
    block_tables, copies = build(3, 4)
    first, second = request(0, [5, 6]), request(2, [7])
    block_tables.update(chunks(first, second))
    assert block_tables.tables.tolist() == [[5, 6, 0, 0], [0, 0, 0, 0], [7, 0, 0, 0]]
    block_tables.update(chunks(first, second))
    first.blocks += [8]
    block_tables.update(chunks(first, second))
    assert block_tables.tables[0].tolist() == [5, 6, 8, 0] and copies.sizes == [3, 1]


def test_a_slot_with_other_blocks_is_written_from_its_start() -> None:
    block_tables, copies = build(1, 3)
    preempted = request(0, [1, 2])
    block_tables.update(chunks(preempted))
    preempted.blocks = [3, 2]
    block_tables.update(chunks(preempted))
    assert block_tables.tables.tolist() == [[3, 2, 0]]
    block_tables.update(chunks(request(0, [4])))
    assert block_tables.tables.tolist() == [[4, 2, 0]] and copies.sizes == [2, 2, 1]


def test_blocks_at_entries_of_clusters() -> None:
    block_tables, copies = build(2, 2, 2)  # slots, clusters, pages per cluster
    clustered, entries = request(1, [5, 6]), [0, 2]
    block_tables.stage_new_blocks(clustered, entries)
    block_tables.stage(clustered.slot, [3], range(9, 10))
    assert not block_tables.tables.any()
    block_tables.commit()
    assert block_tables.tables.tolist() == [[[0, 0], [0, 0]], [[5, 0], [6, 9]]]
    clustered.blocks += [7]
    block_tables.stage_new_blocks(clustered, [*entries, 1])
    block_tables.commit()
    block_tables.commit()
    assert block_tables.tables[1].tolist() == [[5, 7], [6, 9]] and copies.sizes == [3, 1]
