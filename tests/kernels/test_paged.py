"""Paged attention against a hand-written oracle, on random block tables."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.paged import paged_attention_reference, store_kv


def oracle(
    queries: Tensor, keys: list[Tensor], values: list[Tensor], counts: list[int], scale: float, window: int | None
) -> Tensor:
    """Compute attention query by query and head by head in float64, from contiguous keys and values."""
    rows, query = [], 0
    group = queries.shape[1] // keys[0].shape[1]
    for request_keys, request_values, count in zip(keys, values, counts, strict=True):
        for position in range(len(request_keys) - count, len(request_keys)):
            first = 0 if window is None else max(0, position - window + 1)
            heads = []
            for head in range(queries.shape[1]):
                dots = (
                    request_keys[first : position + 1, head // group].double() @ queries[query, head].double() * scale
                )
                weights = (dots - dots.max()).exp()
                heads.append((weights / weights.sum()) @ request_values[first : position + 1, head // group].double())
            rows.append(torch.stack(heads))
            query += 1
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 8, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (4, 4)]),
    width=st.sampled_from([1, 8, 24]),
    window=st.sampled_from([None, 1, 5]),
)
def test_random_block_tables(seed: int, size: int, heads: tuple[int, int], width: int, window: int | None) -> None:
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    lengths = [draw(1, 40) for _ in range(draw(1, 5))]
    counts = [draw(1, length + 1) for length in lengths]
    needed = [math.ceil(length / size) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=rng).tolist()  # blocks in random order
    tables = torch.full((len(lengths), max(needed)), 0, dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    pages = [
        torch.randn(sum(needed) + 3, size, heads[1], width, generator=rng) for _ in range(2)
    ]  # filled with garbage
    keys, values = ([torch.randn(length, heads[1], width, generator=rng) for length in lengths] for _ in range(2))

    def slots_of(row: int, positions: Tensor) -> Tensor:
        return tables[row].long()[positions // size] * size + positions % size

    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):  # the tokens before the chunk
        old = torch.arange(length - count)
        store_kv(keys[row][: length - count], values[row][: length - count], *pages, slots_of(row, old))
    new = torch.cat(
        [
            slots_of(row, torch.arange(length - count, length))
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
        ]
    )
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    batch = AttentionMetadata(starts, torch.tensor(lengths, dtype=torch.int32), tables, new, max(lengths), counts)
    fresh_keys, fresh_values = (
        torch.cat([tensor[-count:] for tensor, count in zip(side, counts, strict=True)]) for side in (keys, values)
    )
    store_kv(fresh_keys, fresh_values, *pages, new)
    queries = torch.randn(sum(counts), heads[0], width, generator=rng)
    actual = paged_attention_reference(queries, *pages, batch, 0.3, window)
    expected = oracle(queries, keys, values, counts, 0.3, window)
    assert torch.allclose(actual.double(), expected, atol=1e-5)


def test_a_slot_of_minus_one_is_not_written() -> None:
    pages = [torch.zeros(2, 4, 1, 3) for _ in range(2)]
    store_kv(torch.ones(2, 1, 3), torch.ones(2, 1, 3), *pages, torch.tensor([5, -1]))
    assert pages[0].sum() == 3 and bool((pages[0].flatten(0, 1)[5] == 1).all())


@pytest.mark.parametrize("window", [None, 3])
def test_one_page_holding_everything_is_plain_attention(window: int | None) -> None:
    torch.manual_seed(0)
    keys, values, queries = torch.randn(7, 2, 8), torch.randn(7, 2, 8), torch.randn(7, 4, 8)
    pages = AttentionMetadata(
        torch.tensor([0, 7], dtype=torch.int32), torch.tensor([7], dtype=torch.int32),
        torch.tensor([[0]], dtype=torch.int32), torch.arange(7), 7, [7],
    )  # fmt: skip
    result = paged_attention_reference(queries, keys[None], values[None], pages, 8**-0.5, window)
    assert torch.allclose(result.double(), oracle(queries, [keys], [values], [7], 8**-0.5, window), atol=1e-5)
