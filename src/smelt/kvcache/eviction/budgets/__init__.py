"""Budget rules, one file each."""

from __future__ import annotations

from typing import Any

from smelt.config import warn_renamed
from smelt.kvcache.eviction.budget import BUDGET_RULES, BudgetRule
from smelt.kvcache.eviction.budgets.ada import AdaKVBudget
from smelt.kvcache.eviction.budgets.global_topk import GlobalTopKBudget
from smelt.kvcache.eviction.budgets.head import HeadKVBudget
from smelt.kvcache.eviction.budgets.pyramid import PyramidKVBudget
from smelt.kvcache.eviction.budgets.static import StaticBudget
from smelt.kvcache.eviction.budgets.uniform import UniformBudget

_RENAMED = {"everywhere": "global-topk"}


def make_budget_rule(name: str, /, **parameters: Any) -> BudgetRule:
    """Build a budget rule from its name and parameters."""
    if name in _RENAMED:
        warn_renamed(name, _RENAMED[name])
    return BUDGET_RULES.build(_RENAMED.get(name, name), **parameters)


__all__ = [
    "BUDGET_RULES", "AdaKVBudget", "GlobalTopKBudget", "HeadKVBudget", "PyramidKVBudget", "StaticBudget",
    "UniformBudget", "make_budget_rule",
]  # fmt: skip
