"""Page summaries: the formula, what it bounds and what it does not, and that a page is summarized once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.selection.page_summary import (
    PAGE_SUMMARIES,
    ArkVale,
    PageSummaryTable,
    Quest,
    page_scores,
)


def plain_scores(queries: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Compute the formula directly: sum_d max(q_d high_d, q_d low_d), then over the group."""
    q = queries[:, :, :, None]  # [requests, kv_heads, group, 1, head_dim]
    upper, lower = (corner.permute(0, 2, 1, 3)[:, :, None] for corner in (high, low))
    return torch.maximum(q * upper, q * lower).sum(-1).sum(2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), group=st.integers(1, 4), width=st.sampled_from([1, 3, 8]), tokens=st.integers(1, 9))
def test_scores_match_the_formula_and_bound_every_product_in_the_page(
    seed: int, group: int, width: int, tokens: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 5, 3, tokens, width, generator=random)  # [requests, pages, kv_heads, tokens, head_dim]
    queries = torch.randn(2, 3, group, width, generator=random)
    for summary in (Quest(), ArkVale()):
        high, low = summary.box(keys)
        assert high.shape == (2, 5, 3, width) and (high >= low).all()
        torch.testing.assert_close(page_scores(queries, high, low), plain_scores(queries, high, low))
    high, low = Quest().box(keys)
    products = torch.einsum("rhgw,rphtw->rhgpt", queries, keys).amax(-1)  # the best key of each page
    for member in range(group):
        assert (page_scores(queries[:, :, member : member + 1], high, low) >= products[:, :, member] - 1e-5).all()


def test_the_mean_cuboid_is_not_always_a_bound() -> None:
    """One far key among many near ones lies outside the box."""
    keys = torch.zeros(1, 1, 1, 8, 1)
    keys[..., 0, :] = 8.0  # center 4, and all are 4 away from it
    keys[..., 1:, :] = torch.tensor([3.0, 4, 4, 4, 4, 5, 0])[:, None]
    query = torch.ones(1, 1, 1, 1)
    high, low = ArkVale().box(keys)
    assert float(high) == 4 + (4 + 1 + 0 * 4 + 1 + 4) / 8 and float(low) == 4 - 10 / 8
    assert float(page_scores(query, high, low)) < 8
    assert float(page_scores(query, *Quest().box(keys))) == 8


def test_summaries_of_half_precision_pages_keep_their_dtype() -> None:
    keys = torch.randn(3, 2, 8, 4).bfloat16()
    for summary in (Quest(), ArkVale()):
        assert all(corner.dtype == torch.bfloat16 for corner in summary.box(keys))


def test_pages_are_summarized_as_they_fill() -> None:
    """Each block is summarized once, the others are unchanged, and scores follow the block table in any order."""
    heads, device = {0: (2, 4), 3: (1, 4)}, torch.device("cpu")
    table = PageSummaryTable(Quest(), heads, num_blocks=6, dtype=torch.float32, device=device)
    assert table.nbytes == 2 * 6 * (2 + 1) * 4 * 4
    keys = torch.randn(6, 2, 5, 4)
    for block in (4, 1, 5):
        table.update(0, torch.tensor([block]), keys[block : block + 1])
    queries, tables = torch.randn(2, 2, 3, 4), torch.tensor([[5, 1], [1, 4]])
    high, low = Quest().box(keys)
    before = table.scores(0, queries, tables)
    torch.testing.assert_close(before, plain_scores(queries, high[tables], low[tables]))
    table.update(0, torch.tensor([4]), torch.randn(1, 2, 5, 4))
    after = table.scores(0, queries, tables)
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    assert not table.scores(3, torch.randn(1, 1, 1, 4), torch.tensor([[0, 1]])).any()


def test_summaries_by_name() -> None:
    assert {PAGE_SUMMARIES.build(name).name for name in PAGE_SUMMARIES} == {"quest", "arkvale"}
    with pytest.raises(ConfigError, match="no page summary 'max'; there are arkvale, quest"):
        PAGE_SUMMARIES.build("max")
