"""Budget rules: exact totals, bounds, and each rule against its formula or a brute-force search."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import BudgetRule, fit_counts, num_forced, retained_mask, total_budget
from smelt.kvcache.eviction.budgets import (
    BUDGET_RULES,
    AdaKVBudget,
    GlobalTopKBudget,
    HeadKVBudget,
    PyramidKVBudget,
    StaticBudget,
    UniformBudget,
    make_budget_rule,
)
from smelt.kvcache.eviction.profile import EvictionProfile, KVShape

Sizes = tuple[int, int, int, int]  # layers, batch, kv_heads, tokens
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
KEEPS = st.floats(0.01, 1.0)


def scores_of(sizes: Sizes, seed: int, sink: int = 0, window: int = 0, levels: int | None = None) -> Tensor:
    """Return random scores whose scale differs per head; a small `levels` makes many of them equal."""
    layers, batch, heads, tokens = sizes
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(sizes, generator=random) * torch.rand(layers, batch, heads, 1, generator=random)
    if levels is not None:
        scores = (scores * levels).floor()
    scores[..., :sink] = torch.inf
    scores[..., max(tokens - window, 0) :] = torch.inf
    return scores


def profile_of(layers: int, heads: int, seed: int, keep: float = 0.3) -> EvictionProfile:
    ratios = torch.rand(6, layers, heads, generator=torch.Generator().manual_seed(seed)) ** 3
    return EvictionProfile.from_ratios(KVShape("llama", layers, heads, 8), "snapkv", keep, ratios)


def rules(layers: int, heads: int, seed: int) -> list[BudgetRule]:
    importance = torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-3
    return [
        UniformBudget(),
        PyramidKVBudget(),
        PyramidKVBudget(beta=2.0),
        AdaKVBudget(),
        AdaKVBudget(safeguard=0.0),
        AdaKVBudget(safeguard=1.0),
        GlobalTopKBudget(),
        HeadKVBudget(importance.tolist()),
        HeadKVBudget(importance.tolist(), beta=1.0),
        StaticBudget(profile_of(layers, heads, seed)),
    ]


@settings(max_examples=80, deadline=None)
@given(
    sizes=SIZES, keep=KEEPS, seed=st.integers(0, 2**32), sink=st.integers(0, 5), window=st.integers(0, 8),
    levels=st.sampled_from([None, 1, 3]),
)  # fmt: skip
@example(sizes=(2, 1, 2, 40), keep=1.0, seed=0, sink=2, window=4, levels=None)
def test_totals_are_exact_and_bounds_hold(
    sizes: Sizes, keep: float, seed: int, sink: int, window: int, levels: int | None
) -> None:
    layers, batch, heads, tokens = sizes
    scores = scores_of(sizes, seed, sink, window, levels)
    least = num_forced(scores)
    for rule in rules(layers, heads, seed):
        counts = rule.counts(scores, keep)
        assert counts.shape == (layers, batch, heads) and counts.dtype == torch.int64
        assert (counts >= least).all() and (counts <= tokens).all(), rule
        expected = least.sum((0, 2)).clamp(min=total_budget(scores, keep))
        assert counts.sum((0, 2)).tolist() == expected.tolist(), rule
        assert retained_mask(scores, counts).sum(-1).equal(counts)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, keep=KEEPS, seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_forced_tokens_per_head_come_first(sizes: Sizes, keep: float, seed: int, share: float) -> None:
    layers, batch, heads, tokens = sizes
    scores = scores_of(sizes, seed)
    random = torch.Generator().manual_seed(seed)
    always = torch.rand(sizes, generator=random) < share * torch.rand(layers, batch, heads, 1, generator=random)
    scores = scores.masked_fill(always, torch.inf)
    for rule in rules(layers, heads, seed):
        counts = rule.counts(scores, keep)
        assert (counts >= always.sum(-1)).all() and (counts <= tokens).all(), rule
        expected = always.sum((0, 2, 3)).clamp(min=total_budget(scores, keep))
        assert counts.sum((0, 2)).tolist() == expected.tolist(), rule


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**32), sink=st.integers(0, 5))
def test_keep_of_one_keeps_all(sizes: Sizes, seed: int, sink: int) -> None:
    scores = scores_of(sizes, seed, sink, 3)
    given_rules = [
        *rules(sizes[0], sizes[2], seed),
        StaticBudget(profile_of(sizes[0], sizes[2], seed, 1.0), rescale=False),
    ]
    for rule in given_rules:
        assert (rule.counts(scores, 1.0) == sizes[3]).all(), rule


@settings(max_examples=30, deadline=None)
@given(
    sizes=SIZES, keeps=st.tuples(KEEPS, KEEPS), seed=st.integers(0, 2**32), levels=st.sampled_from([None, 2]),
    safeguard=st.floats(0, 1),
)  # fmt: skip
def test_a_larger_keep_keeps_at_least_as_much_in_every_head(
    sizes: Sizes, keeps: tuple[float, float], seed: int, levels: int | None, safeguard: float
) -> None:
    low, high = sorted(keeps)
    scores = scores_of(sizes, seed, 2, 3, levels)
    by_threshold: list[BudgetRule] = [UniformBudget(), AdaKVBudget(safeguard), GlobalTopKBudget()]
    for rule in by_threshold:
        assert (rule.counts(scores, low) <= rule.counts(scores, high)).all(), rule
    for rule in rules(sizes[0], sizes[2], seed):  # rules that round or fall back keep only the total
        assert (rule.counts(scores, low).sum((0, 2)) <= rule.counts(scores, high).sum((0, 2))).all(), rule
    static = StaticBudget(profile_of(sizes[0], sizes[2], seed))
    assert (static.counts(scores, low) <= static.counts(scores, high) + 1).all()


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, keep=KEEPS, seed=st.integers(0, 2**32), levels=st.sampled_from([None, 1, 4]), part=st.floats(0, 1))
def test_ada_matches_brute_force(sizes: Sizes, keep: float, seed: int, levels: int | None, part: float) -> None:
    layers, batch, heads, tokens = sizes
    scores = scores_of(sizes, seed, 1, 2, levels)
    per_head = max(int(tokens * keep), int(num_forced(scores).max()))
    counts = AdaKVBudget(part).counts(scores, keep)
    safe = int(int(tokens * keep) * part)
    for layer in range(layers):
        for row in range(batch):
            cells = []
            for head in range(heads):
                values = scores[layer, row, head].tolist()
                ranked = sorted((-value, token) for token, value in enumerate(values))
                for rank, (value, token) in enumerate(ranked):
                    cells.append((-math.inf if rank < safe else value, token, head))
            selected = [head for _, _, head in sorted(cells)[: heads * per_head]]
            assert counts[layer, row].tolist() == [selected.count(head) for head in range(heads)]


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, keep=KEEPS, seed=st.integers(0, 2**32), levels=st.sampled_from([None, 1, 4]))
def test_global_topk_matches_brute_force(sizes: Sizes, keep: float, seed: int, levels: int | None) -> None:
    layers, batch, heads, tokens = sizes
    scores = scores_of(sizes, seed, 1, 2, levels)
    counts = GlobalTopKBudget().counts(scores, keep)
    for row in range(batch):
        values = scores[:, row].tolist()
        cells = sorted(
            (-values[layer][head][token], token, layer, head)
            for layer in range(layers)
            for head in range(heads)
            for token in range(tokens)
        )
        several = max(total_budget(scores, keep), int(num_forced(scores)[:, row].sum()))
        selected = [(layer, head) for _, _, layer, head in cells[:several]]
        expected = [[selected.count((layer, head)) for head in range(heads)] for layer in range(layers)]
        assert counts[:, row].tolist() == expected


def test_equal_scores_are_kept_equally() -> None:
    scores = torch.zeros(3, 2, 4, 20)
    assert (GlobalTopKBudget().counts(scores, 0.5) == 10).all()
    assert (AdaKVBudget().counts(scores, 0.5) == 10).all()


def test_pyramid_matches_its_formula() -> None:
    scores = scores_of((5, 1, 2, 400), 0, 2, 2)
    counts = PyramidKVBudget().counts(scores, 0.25)
    # n = 100: min = 100 / 20 = 5, max = 200 - 5 = 195, steps of 47.5
    assert counts[:, 0, 0].tolist() == [195, 148, 100, 52, 5]
    counts = PyramidKVBudget().counts(scores, 0.75)
    # n = 300: max = 585 > 396, so max = 396 and min = 204
    assert counts[:, 0, 1].tolist() == [396, 348, 300, 252, 204]


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(2, 12), heads=st.integers(1, 4), tokens=st.integers(8, 400), keep=KEEPS, sink=st.integers(0, 8),
    beta=st.floats(1.5, 40.0),
)  # fmt: skip
def test_pyramid_decreases_by_layer_or_is_uniform(
    layers: int, heads: int, tokens: int, keep: float, sink: int, beta: float
) -> None:
    scores = scores_of((layers, 2, heads, tokens), 0, min(sink, tokens))
    counts = PyramidKVBudget(beta).counts(scores, keep)
    assert (counts == counts[:, :, :1]).all()  # heads of a layer keep the same
    assert (counts[:-1] >= counts[1:]).all()
    average, always = int(tokens * keep), min(sink, tokens)
    largest = min(2 * average - average / beta, tokens - always)
    smallest = 2 * average - largest
    if not always <= smallest <= largest <= tokens:
        assert counts.equal(UniformBudget().counts(scores, keep))
    else:
        assert (counts[0] - largest).abs().max() <= 1 and (counts[-1] - smallest).abs().max() <= 1


def test_one_layer_has_no_pyramid() -> None:
    assert (PyramidKVBudget().counts(scores_of((1, 1, 2, 100), 0), 0.4) == 40).all()


def test_head_matches_its_formula() -> None:
    scores = scores_of((2, 1, 2, 1000), 0)
    counts = HeadKVBudget([[4.0, 1.0], [2.0, 1.0]], beta=1.25).counts(scores, 0.1)
    # n = 100: 100 - 80 = 20 for each, and a pool of 4 * 80 = 320 by importance
    assert counts[:, 0].tolist() == [[20 + 160, 20 + 40], [20 + 80, 20 + 40]]


def test_budget_beyond_a_heads_length_goes_to_the_others() -> None:
    counts = HeadKVBudget([[1.0, 0.0, 0.0]], beta=1.0).counts(scores_of((1, 1, 3, 60), 0), 0.5)
    assert counts[0, 0].tolist() == [60, 15, 15]


def test_static_follows_the_profile() -> None:
    shape = KVShape("llama", 2, 2, 8)
    profile = EvictionProfile(shape, "snapkv", 0.3, 4, ((0.1, 0.2), (0.3, 0.6)), ((0.05, 0.0), (0.1, 0.3)))
    scores = scores_of((2, 3, 2, 110), 0, 4, 6)  # 100 of 110 may go
    counts = StaticBudget(profile, rescale=False).counts(scores, 0.3)
    assert counts[:, 1].tolist() == [[10 + 20, 10 + 20], [10 + 50, 10 + 100]]
    # 33 per head, 10 of them forced: a mean of 0.23 where the budgets 0.2, 0.2, 0.5, 1 have 0.475
    counts = StaticBudget(profile).counts(scores, 0.3)
    assert counts.sum((0, 2)).tolist() == [132] * 3
    assert counts[:, 0].tolist() == [[20, 20], [34, 58]]  # 9.684, 9.684, 24.211 and 48.421 besides the 10
    with pytest.raises(ConfigError, match=r"made to keep 0.3, not 0.5.*rescale"):
        StaticBudget(profile, rescale=False).counts(scores, 0.5)
    with pytest.raises(ConfigError, match="profile this model"):
        StaticBudget(profile).counts(scores_of((3, 1, 2, 110), 0), 0.3)


@settings(max_examples=150, deadline=None)
@given(
    cells=st.lists(
        st.tuples(st.floats(-50, 150), st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=12
    ),
    aim=st.integers(0, 1200),
)  # fmt: skip
def test_fitted_counts_sum_to_the_total_within_bounds(cells: list[tuple[float, int, int]], aim: int) -> None:
    ideal = torch.tensor([[cell[0] for cell in cells]], dtype=torch.float64)
    low = torch.tensor([[cell[1] for cell in cells]])
    high = low + torch.tensor([[cell[2] for cell in cells]])
    counts = fit_counts(ideal, low, high, aim)
    assert (counts >= low).all() and (counts <= high).all()
    assert int(counts.sum()) == min(max(aim, int(low.sum())), int(high.sum()))
    free = [i for i in range(len(cells)) if low[0, i] < counts[0, i] < high[0, i]]
    shifts = [float(counts[0, i] - ideal[0, i]) for i in free]
    assert not shifts or max(shifts) - min(shifts) <= 1 + 1e-5  # the same shift for all that are not at a bound


def test_fitted_rounds_the_largest_remainder_up() -> None:
    ideal = torch.tensor([[2.5, 1.7, 0.3, 3.5], [1.0, 2.0, 3.0, 2.0]])
    assert fit_counts(ideal, torch.zeros(2, 4).long(), 9, 8).tolist() == [[3, 2, 0, 3], [1, 2, 3, 2]]


@pytest.mark.parametrize("keep", [0.0, 2.0, -0.5, math.nan])
def test_a_keep_outside_0_to_1_is_refused(keep: float) -> None:
    for rule in rules(2, 2, 0):
        with pytest.raises(ConfigError, match="share of a prompt"):
            rule.counts(scores_of((2, 1, 2, 10), 0), keep)


def test_rules_by_name() -> None:
    assert make_budget_rule("ada", safeguard=0.1) == AdaKVBudget(0.1)
    assert make_budget_rule("pyramid", beta=10) == PyramidKVBudget(10)
    profile = profile_of(2, 2, 0)
    assert make_budget_rule("static", profile=profile, rescale=False) == StaticBudget(profile, False)
    assert all(rule.name == name and rule.paper for name, rule in BUDGET_RULES.items())


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("adda", {}, "there is no budget rule 'adda'; did you mean 'ada'"),
        ("uniform", {"beta": 1.0}, "uniform has no parameter 'beta'; it has none"),
        ("ada", {"beta": 1.0}, "ada has no parameter 'beta'; it has safeguard"),
        ("ada", {"safeguard": "much"}, "safeguard of the budget rule ada must be a number"),
        ("ada", {"safeguard": True}, "safeguard of the budget rule ada must be a number"),
        ("ada", {"safeguard": 1.5}, "between 0 and 1"),
        ("pyramid", {"beta": 0.5}, "at least 1"),
        ("head", {}, "head needs `importance`"),
        ("head", {"importance": [[1.0, -1.0]]}, "none negative"),
        ("head", {"importance": [[1.0], [1.0, 2.0]]}, "one list per layer"),
        ("head", {"importance": [[0.0, 0.0]]}, "not all 0"),
        ("head", {"importance": "all"}, "one list per layer"),
        ("head", {"importance": [[1.0]], "beta": 0}, "at least 1"),
        ("static", {}, "static needs `profile`"),
        ("static", {"profile": "a.json"}, "`profile` of the budget rule static must be a mapping"),
    ],
)
def test_invalid_rule_parameters_are_one_sentence(name: str, parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_budget_rule(name, **parameters)


def test_importance_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 layers of 2 KV heads; this model has 2 of 2"):
        HeadKVBudget([[1.0, 2.0]]).counts(scores_of((2, 1, 2, 10), 0), 0.5)


def test_the_old_name_of_global_topk_still_works() -> None:
    with pytest.warns(FutureWarning, match="`everywhere` is now called `global-topk`"):
        assert make_budget_rule("everywhere") == GlobalTopKBudget()
