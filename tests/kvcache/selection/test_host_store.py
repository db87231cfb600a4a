"""Pages on the host with some cached on the device: requested pages are present, correct and bounded in number."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.selection.host_store import HostPageStore
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.kvcache.selection.page_store import DevicePageStore

HEADS, BLOCKS, SIZE = {0: (2, 4), 2: (3, 4)}, 12, 5
PAGE_BYTES = 2 * SIZE * 4 * 4  # KV cache of one head
CPU = torch.device("cpu")


def host(**more: int) -> HostPageStore:
    return HostPageStore(HEADS, BLOCKS, SIZE, torch.float32, CPU, OffloadConfig(**{"num_slots": 6, **more}))


def fill(pages: HostPageStore | DevicePageStore, seed: int = 0) -> None:
    """Write every slot of every layer."""
    rng = torch.Generator().manual_seed(seed)
    for layer, (kv_heads, width) in HEADS.items():
        keys, values = torch.randn(2, BLOCKS * SIZE, kv_heads, width, generator=rng)
        pages.write(layer, keys, values, torch.arange(BLOCKS * SIZE))


def random_selection(rng: random.Random, kv_heads: int, requests: int = 2, max_pages: int = 3) -> tuple[Tensor, Tensor]:
    """Return different blocks for each head of a request; requests may share some. Trailing entries may be unused."""
    blocks = [[rng.sample(range(BLOCKS), max_pages) for _ in range(kv_heads)] for _ in range(requests)]
    counts = torch.tensor([rng.randrange(1, max_pages + 1) for _ in range(requests)])
    valid = (torch.arange(max_pages) < counts[:, None, None]).expand(requests, kv_heads, max_pages)
    return torch.tensor(blocks), valid


@pytest.mark.parametrize(("keep_steps", "refresh_interval"), [(0, 1), (1, 1), (3, 1), (2, 4), (100, 7)])
def test_resident_and_recalled_pages_are_the_selection(keep_steps: int, refresh_interval: int) -> None:
    """Over many steps with writes between them: every requested page on the device equals the host's, missing pages
    were copied and counted, and no head has more pages there than slots.
    """
    pages, plain = (
        host(keep_steps=keep_steps, refresh_interval=refresh_interval),
        DevicePageStore(HEADS, BLOCKS, SIZE, torch.float32, CPU),
    )
    fill(pages)
    fill(plain)
    rng, hits = random.Random(keep_steps), 0
    for step in range(1, 60):
        for layer, (kv_heads, width) in HEADS.items():
            slots = torch.tensor(rng.sample(range(BLOCKS * SIZE), 3))
            keys, values = torch.randn(2, 3, kv_heads, width)
            pages.write(layer, keys, values, slots)
            plain.write(layer, keys, values, slots)
            blocks, valid = random_selection(rng, kv_heads)
            residents, before = pages.residents[layer], pages.recalled_bytes
            head = torch.arange(kv_heads)[:, None].expand_as(blocks)
            resident = residents.slots(head, blocks) >= 0
            actual, expected = (
                pages.gather_selected(layer, blocks, valid, step),
                plain.gather_selected(layer, blocks, valid, step),
            )
            assert torch.equal(actual.keys[actual.block_tables[valid]], expected.keys[expected.block_tables[valid]])
            assert torch.equal(actual.values[actual.block_tables[valid]], expected.values[expected.block_tables[valid]])
            assert actual.recalled is not None and torch.equal(actual.recalled, valid & ~resident)
            copied = {tuple(pair) for pair in torch.stack((head, blocks), -1)[actual.recalled].tolist()}
            assert pages.recalled_bytes - before == len(copied) * PAGE_BYTES  # a shared page counts once
            assert (residents.block_in >= 0).sum(1).max() <= 6
            hits += int((valid & resident).sum())
        pages.end_step(step)
        if keep_steps == 0:
            assert all(pages_on_device.count == 0 for pages_on_device in pages.residents.values())
    assert (hits == 0) == (keep_steps == 0)


def test_pages_stay_for_keep_steps() -> None:
    """With keep_steps 2 and a check every 3 steps: steps 3 and 6 evict the pages that steps 2, 3 and 5, 6 did not
    select.
    """
    pages = host(keep_steps=2, refresh_interval=3)
    fill(pages)
    choices = {1: 7, 2: 8, 3: 9, 4: 10, 5: 9, 6: 9}
    valid = torch.ones(1, 2, 1, dtype=torch.bool)
    left = {}
    for step, block in choices.items():
        pages.gather_selected(0, torch.tensor([[[block], [block]]]), valid, step)
        pages.end_step(step)
        left[step] = sorted(pages.residents[0].block_in[0][pages.residents[0].block_in[0] >= 0].tolist())
    assert left == {1: [7], 2: [7, 8], 3: [8, 9], 4: [8, 9, 10], 5: [8, 9, 10], 6: [9]}


def test_full_slots_evict_the_least_recently_selected_page() -> None:
    pages = host(num_slots=3, keep_steps=100)
    valid = torch.ones(1, 2, 1, dtype=torch.bool)
    for step, block in enumerate([0, 1, 2, 0, 3], start=1):
        pages.gather_selected(0, torch.tensor([[[block], [block]]]), valid, step)
    residents = pages.residents[0]
    assert sorted(residents.block_in[0].tolist()) == [0, 2, 3] and residents.count == 6
    assert residents.slot_of[0].tolist().count(-1) == BLOCKS - 3
    again = pages.gather_selected(0, torch.tensor([[[0, 2, 1], [3, 2, 0]]]), torch.ones(1, 2, 3, dtype=torch.bool), 6)
    assert again.recalled is not None and again.recalled.tolist() == [[[False, False, True], [False] * 3]]
    with pytest.raises(RuntimeError, match="cannot be in its slots"):
        pages.gather_selected(0, torch.arange(4).expand(1, 2, 4), torch.ones(1, 2, 4, dtype=torch.bool), 7)


def test_blocks_that_are_not_retained_are_dropped() -> None:
    pages = host()
    for layer, (kv_heads, _) in HEADS.items():
        blocks = torch.tensor([1, 4, 9]).expand(1, kv_heads, 3)
        pages.gather_selected(layer, blocks, torch.ones_like(blocks, dtype=torch.bool), 1)
    pages.retain_blocks(torch.tensor([4, 5]))
    assert [sorted(set(resident.block_in.flatten().tolist())) for resident in pages.residents.values()] == [[-1, 4]] * 2
    pages.retain_blocks(torch.tensor([], dtype=torch.int64))
    assert all(resident.count == 0 and (resident.slot_of == -1).all() for resident in pages.residents.values())


def test_prefill_sees_all_of_its_pages_in_order() -> None:
    pages, plain = host(), DevicePageStore(HEADS, BLOCKS, SIZE, torch.float32, CPU)
    fill(pages)
    fill(plain)
    blocks = torch.tensor([11, 0, 7])
    actual, expected = pages.gather_all(2, blocks), plain.gather_all(2, blocks)
    assert torch.equal(
        actual.keys[actual.block_tables], expected.keys[expected.block_tables]
    ) and actual.block_tables.shape == (3, 3)
    assert torch.equal(actual.values[actual.block_tables], expected.values[expected.block_tables])
    assert torch.equal(pages.gather_keys(2, blocks), plain.gather_keys(2, blocks))
    assert pages.staged_bytes == 3 * 3 * PAGE_BYTES and pages.recalled_bytes == 0


@pytest.mark.parametrize("wrong", [{"num_slots": 0}, {"keep_steps": -1}, {"refresh_interval": 0}], ids=str)
def test_impossible_offload_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"give at least as many pages|they count steps"):
        OffloadConfig(**wrong)
