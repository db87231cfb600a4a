"""Splits of a sequence, merged by log-sum-exp, equal attention over all of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from smelt.kvcache.selection.split_kv import merge_splits, partial_attention, split_kv_attention


@pytest.mark.parametrize("num_splits", range(2, 9))
@pytest.mark.parametrize("tokens", [3, 8, 257])  # with 3 some splits are empty
@pytest.mark.parametrize("size", [1.0, 40.0])  # sharp attention, whose exponentials would overflow
def test_merged_splits_equal_full_attention(num_splits: int, tokens: int, size: float) -> None:
    queries = size * torch.randn(2, 3, 4, 16)  # [requests, kv_heads, group, head_dim]
    keys, values = torch.randn(2, 2, 3, tokens, 16)
    expected = F.scaled_dot_product_attention(queries.double(), keys.double(), values.double(), scale=0.25).float()
    actual = split_kv_attention(queries, keys, values, 0.25, num_splits)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_merged_splits_can_be_merged_again_and_empty_ones_weigh_nothing() -> None:
    queries, keys, values = torch.randn(2, 4, 8), torch.randn(2, 30, 8), torch.randn(2, 30, 8)
    parts = [
        partial_attention(queries, keys[:, cut], values[:, cut], 0.3) for cut in (slice(5), slice(5, 17), slice(17, 30))
    ]
    empty = partial_attention(queries, keys[:, :0], values[:, :0], 0.3)
    assert not empty[0].any() and (empty[1] == -torch.inf).all()
    two, total = merge_splits(*zip(*parts[:2], empty, strict=True))
    actual, lse = merge_splits([two, parts[2][0]], [total, parts[2][1]])
    expected, sums = partial_attention(queries, keys, values, 0.3)
    torch.testing.assert_close((actual, lse), (expected, sums), atol=1e-5, rtol=1e-5)
    nothing = merge_splits(*zip(empty, empty, strict=True))
    assert not nothing[0].any() and (nothing[1] == -torch.inf).all()
