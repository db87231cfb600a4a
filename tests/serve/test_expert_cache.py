"""Policies of the expert cache against exhaustive search, and batches of few experts against plain order."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt.errors import ConfigError
from smelt.serve.engine.expert_cache import (
    EXPERT_POLICIES,
    ExpertCache,
    group_by_expert,
    next_uses,
    simulate,
)

TRACES = st.lists(st.integers(0, 4), min_size=1, max_size=11)


def most_hits(trace: list[int], slots: int) -> int:
    """Try every victim at every miss."""

    @cache
    def best(position: int, resident: frozenset[int]) -> int:
        if position == len(trace):
            return 0
        expert = trace[position]
        if expert in resident:
            return 1 + best(position + 1, resident)
        if len(resident) < slots:
            return best(position + 1, resident | {expert})
        return max(best(position + 1, resident - {victim} | {expert}) for victim in resident)

    return best(0, frozenset())


@given(trace=TRACES, slots=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_belady_is_optimal_and_no_policy_is_better(trace: list[int], slots: int) -> None:
    optimum = most_hits(trace, slots)
    assert simulate(trace, slots, "belady") == optimum
    assert all(simulate(trace, slots, policy) <= optimum for policy in EXPERT_POLICIES)


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_cycle_of_one_more_expert_than_slots(slots: int) -> None:
    """LRU never finds an expert; Belady all but one in a round."""
    rounds = 200
    trace = [*range(slots + 1)] * rounds
    assert simulate(trace, slots, "lru") == 0
    assert simulate(trace, slots, "belady") / len(trace) == pytest.approx((slots - 1) / slots, abs=0.02)


def test_without_a_look_ahead_belady_is_lru() -> None:
    rng = random.Random(0)
    for _ in range(20):
        trace = [rng.randrange(6) for _ in range(60)]
        hits = [simulate(trace, 3, "belady", lookahead=ahead) for ahead in (0, 2, 5, None)]
        assert hits[0] == simulate(trace, 3, "lru")
        assert hits[-1] == max(hits)


def test_policies_differ_on_real_looking_traces() -> None:
    rng = random.Random(1)
    trace = [rng.choices(range(6), [8, 4, 2, 1, 1, 1])[0] for _ in range(2000)]
    belady, lru, at_random = (simulate(trace, 3, policy) for policy in EXPERT_POLICIES)
    assert belady > lru > at_random


def test_lru_evicts_the_least_recently_used() -> None:
    cache = ExpertCache(2, "lru")
    assert [cache.access(expert, {}).loads for expert in (1, 2, 1, 3, 1, 2)] == [True, True, False, True, False, True]
    assert cache.resident == [1, 2] and (cache.hits, cache.misses) == (2, 4)


def test_an_unknown_next_use_is_later_than_any_known_one() -> None:
    cache = ExpertCache(2)
    for expert in (1, 2):
        cache.access(expert, {})
    cache.access(3, {1: 10**6})
    assert cache.resident == [1, 3]


def test_residents_run_first_and_load_early_only_into_unused_slots() -> None:
    cache = ExpertCache(2)
    cache.plan([0, 1], {})
    plan = cache.plan([3, 1, 2, 1], {1: 1, 2: 4, 3: 9})
    assert [(access.expert, access.loads) for access in plan] == [(1, False), (2, True), (3, True)]
    assert plan[1].early and not plan[2].early  # the slot of 2 or 1 was used in this step before 3
    slots = {access.slot for access in plan}
    assert slots == {0, 1} and len(cache.resident) == 2


@given(steps=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=12), slots=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_a_plan_runs_every_expert_once_from_a_slot_that_holds_it(steps: list[set[int]], slots: int) -> None:
    cache, held = ExpertCache(slots), dict[int, int]()
    for step in steps:
        used = set[int]()
        plan = cache.plan(step, {})
        assert sorted(access.expert for access in plan) == sorted(step)
        for access in plan:
            assert 0 <= access.slot < slots
            assert access.loads == (held.get(access.slot) != access.expert)
            assert access.early == (access.loads and access.slot not in used)
            held[access.slot] = access.expert
            used.add(access.slot)
    assert cache.hits + cache.misses == sum(map(len, steps))


def test_next_uses() -> None:
    assert next_uses([2, 0, 2, 1], 3) == {2: 0, 0: 1, 1: 3}
    assert next_uses([2, 0, 2, 1], 3, limit=2) == {2: 0, 0: 1}
    endless = iter(lambda: 7, None)
    assert next_uses(endless, 1) == {7: 0}


def test_bad_settings_of_the_cache() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ExpertCache(0)
    with pytest.raises(ConfigError, match="belady, lru, random"):
        ExpertCache(1, "fifo")


def test_the_longest_queue_runs_first_and_the_oldest_of_it() -> None:
    experts, waits = [0, 1, 1, 2, 1, 0], [1, 0, 3, 0, 1, 0]
    assert group_by_expert(experts, waits, max_tokens=9, max_experts=None, max_wait=8) == [2, 4, 1, 0, 5, 3]
    assert group_by_expert(experts, waits, max_tokens=9, max_experts=1, max_wait=8) == [2, 4, 1]
    assert group_by_expert(experts, waits, max_tokens=4, max_experts=2, max_wait=8) == [2, 4, 1, 0]


def test_tokens_that_waited_long_come_first() -> None:
    experts, waits = [0, 0, 0, 1, 2], [0, 0, 0, 8, 9]
    assert group_by_expert(experts, waits, max_tokens=9, max_experts=1, max_wait=8) == [4]
    assert group_by_expert(experts, waits, max_tokens=9, max_experts=2, max_wait=8) == [4, 3]


def test_resident_experts_run_before_longer_queues_but_not_before_overdue_ones() -> None:
    experts, waits = [0, 0, 0, 1, 2], [0, 0, 0, 0, 8]
    settings = {"max_tokens": 9, "max_wait": 8, "resident": [1]}
    assert group_by_expert(experts, waits, max_experts=None, **settings) == [4, 3, 0, 1, 2]
    assert group_by_expert(experts, [0] * 5, max_experts=1, **settings) == [3]


def test_batches_have_fewer_experts_than_in_plain_order_and_waiting_is_bounded() -> None:
    """A simulation of 48 requests that each need an expert per step, of which 16 run in each."""
    rng, experts, budget, max_wait = random.Random(0), 6, 16, 8
    waits, needs, longest, distinct = [0] * 48, [rng.randrange(experts) for _ in range(48)], 0, Counter[str]()
    plain_needs, first = list(needs), 0
    for _ in range(400):
        chosen = group_by_expert(needs, waits, max_tokens=budget, max_experts=None, max_wait=max_wait)
        assert len(chosen) == budget and len(set(chosen)) == budget
        distinct["grouped"] += len({needs[index] for index in chosen})
        for index in range(48):
            waits[index] = 0 if index in chosen else waits[index] + 1
        longest = max(longest, *waits)
        for index in chosen:
            needs[index] = rng.randrange(experts)
        in_order = [(first + step) % 48 for step in range(budget)]
        distinct["plain"] += len({plain_needs[index] for index in in_order})
        for index in in_order:
            plain_needs[index] = rng.randrange(experts)
        first += budget
    assert distinct["grouped"] < 0.6 * distinct["plain"]
    assert longest <= max_wait + experts
