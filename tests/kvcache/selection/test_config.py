"""Page selection: the first, the last and the best pages; never more than the budget, and all where it allows all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt.errors import ConfigError
from smelt.kvcache.selection.config import SparseAttentionConfig


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4), sink=st.integers(0, 2), window=st.integers(1, 3),
    more=st.integers(0, 6), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_selection_matches_brute_force(
    lengths: list[int], sink: int, window: int, more: int, share: float, seed: int
) -> None:
    page = 4
    selection = SparseAttentionConfig(
        page_size=page,
        token_budget=(sink + window + more) * page,
        budget_ratio=share,
        sink_pages=sink,
        recent_pages=window,
    )
    max_pages = max(-(-length // page) for length in lengths)
    scores = torch.randn(len(lengths), 2, max_pages, generator=torch.Generator().manual_seed(seed))
    counts = selection.num_selected_pages(torch.tensor(lengths)).tolist()
    selected = selection.select_pages(scores, torch.tensor(lengths))
    assert selected.shape == (len(lengths), 2, max(counts))
    for row, length in enumerate(lengths):
        num_pages = -(-length // page)
        reference = max(
            sink + window + more, next(count for count in range(num_pages + 1) if count >= share * num_pages - 1e-6)
        )
        assert counts[row] == min(reference, num_pages)
        always = {page for page in range(num_pages) if page < sink or page >= num_pages - window}
        for head in range(2):
            best = sorted(set(range(num_pages)) - always, key=lambda page: -float(scores[row, head, page]))
            expected = sorted([*always, *best[: counts[row] - len(always)]])
            pages = selected[row, head].tolist()
            assert pages[: counts[row]] == expected and expected[-1] == num_pages - 1
            assert set(pages[counts[row] :]) <= {num_pages - 1}


def test_short_sequences_attend_to_all_pages() -> None:
    selection = SparseAttentionConfig(page_size=10, token_budget=40, sink_pages=1, recent_pages=1, min_tokens=100)
    lengths = torch.tensor([10, 95, 100, 101, 1000])
    assert selection.num_selected_pages(lengths).tolist() == [1, 10, 10, 4, 4]
    assert selection.max_selected_pages(1000) == 10  # of a sequence of 100 tokens


def test_a_budget_may_grow_with_the_length() -> None:
    fixed, growing = SparseAttentionConfig(token_budget=128), SparseAttentionConfig(token_budget=128, budget_ratio=0.1)
    lengths = torch.tensor([32, 640, 3200, 32000])
    assert fixed.num_selected_pages(lengths).tolist() == [1, 4, 4, 4]
    assert growing.num_selected_pages(lengths).tolist() == [1, 4, 10, 100]
    assert growing.max_selected_pages(32000) == 100


def test_pages_without_a_summary_are_not_selected() -> None:
    """A partially filled page has no summary; whatever its score, it is a recent page. Pages after it are never
    selected.
    """
    scores = torch.tensor([[[0.0, 5.0, 1.0, -9.0, 99.0, 99.0]]])
    selected = SparseAttentionConfig(page_size=8, token_budget=24, sink_pages=1, recent_pages=1).select_pages(
        scores, torch.tensor([8 * 3 + 2])
    )
    assert selected.tolist() == [[[0, 1, 3]]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_budget": 0}, "budget of 0 tokens holds no page"), ({"token_budget": -32}, "holds no page"),
        ({"token_budget": 96}, "2 sink and 2 recent pages are 128 tokens, more than the budget of 96"),
        ({"page_size": 0}, "page size of 0 tokens"), ({"recent_pages": 0}, "being filled"),
        ({"sink_pages": -1}, "not be negative"),
        ({"budget_ratio": 1.5}, "between 0 and 1"), ({"budget_ratio": float("nan")}, "between 0 and 1"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparseAttentionConfig(**wrong)
