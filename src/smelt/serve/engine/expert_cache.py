"""Which experts are in the device's memory: policies of eviction, and the plan of a step's loads.

Every layer uses the same experts for the same tokens, so one decision serves all layers. The router has chosen the
experts of queued tokens already, so the next use of an expert is known as far as they reach: Belady's policy evicts the
expert whose next use is furthest, and the least recently used one among those with no known use. Within a step,
resident experts run first, so that a load overlaps them and no expert is evicted before it ran.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from smelt.errors import ConfigError

BELADY, LRU, RANDOM = "belady", "lru", "random"
EXPERT_POLICIES = (BELADY, LRU, RANDOM)


@dataclass(frozen=True)
class ExpertAccess:
    """One use of an expert: the slot that it is in, and whether it must be loaded there first."""

    expert: int
    slot: int
    loads: bool
    early: bool = False  # the slot is not used before in this step: the load may begin at once


class ExpertCache:
    """The experts in `slots` slots, and counts of what was found there."""

    def __init__(self, slots: int, policy: str = BELADY, seed: int = 0) -> None:
        if slots < 1:
            raise ConfigError(f"{slots} expert slots hold no expert; give at least 1.")
        if policy not in EXPERT_POLICIES:
            raise ConfigError(f"there is no expert policy {policy!r}; there are {', '.join(EXPERT_POLICIES)}.")
        self.slots, self.policy = slots, policy
        self.hits = self.misses = 0
        self._resident: dict[int, int] = {}  # expert -> slot, the least recently used first
        self._random = random.Random(seed)

    @property
    def resident(self) -> list[int]:
        """The experts in slots, the least recently used first."""
        return list(self._resident)

    def plan(self, needed: Iterable[int], next_use: Mapping[int, int]) -> list[ExpertAccess]:
        """Return the accesses of a step in the order to run them.

        `next_use` says how many known tokens later an expert is used again.
        """
        distinct = set(needed)
        ordered = [expert for expert in self._resident if expert in distinct]
        ordered += sorted(distinct.difference(ordered), key=lambda expert: next_use.get(expert, inf))
        accesses: list[ExpertAccess] = []
        used: set[int] = set()
        for expert in ordered:
            access = self.access(expert, next_use, used)
            used.add(access.slot)
            accesses.append(access)
        return accesses

    def access(
        self, expert: int, next_use: Mapping[int, int], used: frozenset[int] | set[int] = frozenset()
    ) -> ExpertAccess:
        """Use an expert now; load it if it is not in a slot. `used` are the slots that this step has used."""
        slot = self._resident.pop(expert, None)
        loads = slot is None
        if slot is None:
            self.misses += 1
            slot = self._free_slot(next_use)
        else:
            self.hits += 1
        self._resident[expert] = slot  # the most recently used is last
        return ExpertAccess(expert, slot, loads, early=loads and slot not in used)

    def _free_slot(self, next_use: Mapping[int, int]) -> int:
        if len(self._resident) < self.slots:
            return next(slot for slot in range(self.slots) if slot not in self._resident.values())
        return self._resident.pop(self._victim(next_use))

    def _victim(self, next_use: Mapping[int, int]) -> int:
        experts = list(self._resident)
        if self.policy == RANDOM:
            return self._random.choice(experts)
        if self.policy == LRU:
            return experts[0]
        return max(experts, key=lambda expert: next_use.get(expert, inf))  # the first of equals is the oldest


def next_uses(upcoming: Iterable[int], num_experts: int, limit: int | None = None) -> dict[int, int]:
    """Return when each expert is used first in a sequence of experts, of which at most `limit` are read."""
    first: dict[int, int] = {}
    for position, expert in enumerate(upcoming):
        if position == limit or len(first) == num_experts:
            break
        first.setdefault(expert, position)
    return first


def simulate(trace: Sequence[int], slots: int, policy: str, *, lookahead: int | None = None, seed: int = 0) -> int:
    """Return how many accesses of a trace find their expert in a slot; `lookahead` accesses ahead are known."""
    cache, num_experts = ExpertCache(slots, policy, seed), len(set(trace))
    for position, expert in enumerate(trace):
        ahead = trace[position + 1 :] if policy == BELADY else ()
        cache.access(expert, next_uses(ahead, num_experts, lookahead))
    return cache.hits


def group_by_expert(
    experts: Sequence[int], waits: Sequence[int], *, max_tokens: int, max_experts: int | None, max_wait: int,
    resident: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """Return which of the waiting tokens to compute in one step, in order: those of few experts.

    Each expert has a queue. Queues of tokens that have waited `max_wait` steps come first, the oldest of them before
    all; then those of `resident` experts, which need no load; then the longest. They are emptied in turn until there
    are `max_tokens` tokens of `max_experts` experts.
    """
    queues: dict[int, list[int]] = {}
    for index, expert in enumerate(experts):
        queues.setdefault(expert, []).append(index)
    for queue in queues.values():
        queue.sort(key=lambda index: -waits[index])
    longest_wait = {expert: waits[queue[0]] for expert, queue in queues.items()}

    def order(expert: int) -> tuple[int, bool, int, int]:
        overdue = longest_wait[expert] if longest_wait[expert] >= max_wait else 0
        return -overdue, expert not in resident, -len(queues[expert]), expert

    ordered = sorted(queues, key=order)
    chosen = [index for expert in ordered[:max_experts] for index in queues[expert]]
    return chosen[:max_tokens]
