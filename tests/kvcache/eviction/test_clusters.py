"""Head clusters: the map is a bijection, and the cost of sharing pages is ordered as it must be."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.clusters import (
    SCOPES,
    HeadClusters,
    cluster_heads,
    num_pages,
    sharing_overhead,
    splits_per_cluster,
)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw layers, heads, and a cluster size that divides the heads."""
    layers, heads = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    return layers, heads, draw(st.sampled_from(divisors(heads)))


def budgets_of(layers: int, heads: int, seed: int, skew: float = 3.0) -> Tensor:
    return torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** skew


def retrieval_profile(seed: int, layers: int = 36, heads: int = 8) -> Tensor:
    """Return budgets where most heads keep little, some more, and a few retrieval heads nearly all."""
    random = torch.Generator().manual_seed(seed)
    budgets = 0.02 + 0.25 * torch.rand(layers, heads, generator=random, dtype=torch.float64) ** 3
    retrieval = torch.randperm(layers * heads, generator=random)[:14]
    budgets.view(-1)[retrieval] = 0.6 + 0.4 * torch.rand(14, generator=random, dtype=torch.float64)
    return budgets


@settings(max_examples=80, deadline=None)
@given(
    layers=st.integers(1, 8), heads=st.integers(1, 8), seed=st.integers(0, 2**32), data=st.data(),
    scope=st.sampled_from(SCOPES), ties=st.booleans(),
)  # fmt: skip
def test_the_map_is_a_bijection(
    layers: int, heads: int, seed: int, data: st.DataObject, scope: str, ties: bool
) -> None:
    size = data.draw(st.sampled_from(divisors(heads if scope == "per_layer" else layers * heads)))
    budgets = budgets_of(layers, heads, seed)
    clusters = cluster_heads((budgets * 3).floor() if ties else budgets, size, scope)
    assert clusters.size == size and len(clusters.members) == layers * heads // size
    assert clusters.head_indices.shape == (len(clusters.members), size)
    cells = (clusters.cluster * size + clusters.column).flatten()
    assert cells.sort().values.tolist() == list(range(layers * heads))
    for layer in range(layers):
        for head in range(heads):
            assert clusters.members[clusters.cluster[layer, head]][clusters.column[layer, head]] == (layer, head)
    assert all(list(cluster) == sorted(cluster) for cluster in clusters.members)
    if scope == "per_layer":
        assert all(len({layer for layer, _ in cluster}) == 1 for cluster in clusters.members)


def test_largest_budgets_come_first_and_ties_keep_their_order() -> None:
    budgets = torch.tensor([[0.1, 0.9, 0.5, 0.5], [0.5, 0.9, 0.1, 0.2]])
    expected = (((0, 1), (1, 1)), ((0, 2), (0, 3)), ((1, 0), (1, 3)), ((0, 0), (1, 2)))
    assert cluster_heads(budgets, 2).members == expected
    expected = (((0, 1), (0, 2)), ((0, 0), (0, 3)), ((1, 0), (1, 1)), ((1, 2), (1, 3)))
    assert cluster_heads(budgets, 2, "per_layer").members == expected
    expected = (((0, 0), (0, 1)), ((0, 2), (0, 3)), ((1, 0), (1, 1)), ((1, 2), (1, 3)))
    assert cluster_heads(budgets, 2, "adjacent").members == expected


@settings(max_examples=150, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 2**32), skew=st.floats(0, 6), block=st.integers(1, 32))
def test_the_order_of_waste(shape: tuple[int, int, int], seed: int, skew: float, block: int) -> None:
    """Within a layer (the size divides its heads) adjacent heads are one possible grouping, and sorting is the best."""
    layers, heads, size = shape
    budgets = budgets_of(layers, heads, seed, skew)
    for amounts in (budgets, num_pages(budgets, 5000, 4, 32, block)):
        overheads = {scope: sharing_overhead(amounts, cluster_heads(budgets, size, scope)) for scope in SCOPES}
        ideal, monolithic = overheads["global"].ideal, overheads["global"].monolithic
        chain = [
            ideal,
            overheads["global"].clustered,
            overheads["per_layer"].clustered,
            overheads["adjacent"].clustered,
            monolithic,
        ]
        assert all(less <= more * (1 + 1e-12) for less, more in pairwise(chain)), chain


@settings(max_examples=80, deadline=None)
@given(layers=st.integers(1, 8), heads=st.integers(1, 8), seed=st.integers(0, 2**32), data=st.data())
def test_no_map_wastes_less_than_the_global_map(layers: int, heads: int, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(divisors(layers * heads)))
    budgets = budgets_of(layers, heads, seed)
    least = sharing_overhead(budgets, cluster_heads(budgets, size)).clustered
    shuffled = budgets.flatten()[torch.randperm(budgets.numel(), generator=torch.Generator().manual_seed(seed))]
    for other in (budgets, shuffled.view_as(budgets)):  # adjacent heads, in this order and in a random one
        assert least <= sharing_overhead(other, cluster_heads(other, size, "adjacent")).clustered * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2, 4])
def test_a_few_retrieval_heads_cost_little_more_than_the_ideal(seed: int, size: int) -> None:
    budgets = retrieval_profile(seed)
    assert 1 < sharing_overhead(budgets, cluster_heads(budgets, size)).ratio < 1.06
    in_pages = num_pages(budgets, 32_000, 4, 32, 16)
    assert sharing_overhead(in_pages, cluster_heads(budgets, size)).ratio < 1.06
    assert sharing_overhead(in_pages, cluster_heads(budgets, size, "adjacent")).ratio > 1.2
    assert (
        sharing_overhead(budgets, cluster_heads(budgets, 2 * size)).ratio
        > sharing_overhead(budgets, cluster_heads(budgets, size)).ratio
    )


def test_waste_by_hand() -> None:
    amounts = torch.tensor([[1, 4], [3, 2]])
    overhead = sharing_overhead(amounts, cluster_heads(amounts, 2, "adjacent"))
    assert (overhead.ideal, overhead.clustered, overhead.monolithic) == (10, 14, 16)
    assert overhead.ratio == 1.4
    assert sharing_overhead(amounts, cluster_heads(amounts, 2)).clustered == 12
    assert sharing_overhead(amounts, cluster_heads(amounts, 1)).ratio == 1


def test_pages_are_counted_exactly() -> None:
    budgets = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
    # 36 always kept and 0, 300, 500, 1000 of the others, in blocks of 16
    assert num_pages(budgets, 1036, 4, 32, 16).tolist() == [3, 21, 34, 65]
    assert num_pages(budgets, 20, 4, 32, 16).tolist() == [2, 2, 2, 2]  # shorter than sink and window: all of it
    # 0.07 * 100 is a little more than 7 in floating point, and 30 + 7 fill one block of 37
    assert num_pages(torch.tensor([0.07], dtype=torch.float64), 130, 10, 20, 37).tolist() == [1]


@pytest.mark.parametrize(
    ("size", "scope", "sentence"),
    [
        (5, "global", "clusters of 5 do not divide the 12 of all heads; take one of 1, 2, 3, 4, 6, 12"),
        (6, "per_layer", "do not divide the 4 of a layer's heads; take one of 1, 2, 4"),
        (0, "global", "clusters of 0 do not divide"),
        (2, "layer", "global, per_layer, adjacent, not 'layer'"),
    ],
)
def test_impossible_clusters_are_one_sentence(size: int, scope: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cluster_heads(torch.rand(3, 4), size, scope)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ((((0, 0), (0, 1)), ((1, 0), (1, 0))), "exactly once"),
        ((((0, 0), (0, 1)), ((1, 0), (2, 0))), "exactly once"),
        ((((0, 0),), ((0, 1), (1, 0), (1, 1))), "as many heads in one cluster"),
        ((((0, 1), (0, 0)), ((1, 0), (1, 1))), "in order"),
    ],
)
def test_a_map_that_is_not_a_bijection_is_refused(
    members: tuple[tuple[tuple[int, int], ...], ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        HeadClusters(2, 2, members)


def test_splits_follow_budgets() -> None:
    budgets = torch.tensor([1.0, 0.5, 0.25, 0.0, 0.01, 0.3], dtype=torch.float64)
    assert splits_per_cluster(budgets, 8).tolist() == [8, 5, 3, 1, 1, 3]  # the first three as in the paper's figure
    assert splits_per_cluster(budgets, 1).tolist() == [1] * 6
    with pytest.raises(ConfigError, match="at least 1 part"):
        splits_per_cluster(budgets, 0)


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=20), max_splits=st.integers(1, 64))
def test_splits_are_monotone_and_in_range(values: list[float], max_splits: int) -> None:
    table = splits_per_cluster(torch.tensor(sorted(values), dtype=torch.float64), max_splits)
    assert (table.diff() >= 0).all() and table.min() >= 1 and table.max() <= max_splits
