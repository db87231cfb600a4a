"""Budget rules: one file each."""

from __future__ import annotations

import dataclasses
from typing import Any

from smelt.errors import ConfigError
from smelt.kvcache.eviction.budget import BudgetRule
from smelt.kvcache.eviction.budgets.ada import AdaKVBudget
from smelt.kvcache.eviction.budgets.global_topk import GlobalTopKBudget
from smelt.kvcache.eviction.budgets.head import HeadKVBudget
from smelt.kvcache.eviction.budgets.pyramid import PyramidKVBudget
from smelt.kvcache.eviction.budgets.static import StaticBudget
from smelt.kvcache.eviction.budgets.uniform import UniformBudget
from smelt.kvcache.eviction.profile import EvictionProfile

BUDGETS: dict[str, type[BudgetRule]] = {
    rule.name: rule
    for rule in (UniformBudget, PyramidKVBudget, AdaKVBudget, HeadKVBudget, GlobalTopKBudget, StaticBudget)
}

_TYPES: dict[str, tuple[type, ...]] = {"float": (int, float), "bool": (bool,), "EvictionProfile": (EvictionProfile,)}


def make_budget_rule(name: str, **parameters: Any) -> BudgetRule:
    """A budget rule by its name, with its parameters checked."""
    if name not in BUDGETS:
        raise ConfigError(f"there is no budget rule {name!r}; there are {', '.join(BUDGETS)}.")
    fields = {field.name: field for field in dataclasses.fields(BUDGETS[name])}
    for key, value in parameters.items():
        if key not in fields:
            known = f"it has {', '.join(fields)}" if fields else "it has none"
            raise ConfigError(f"the budget rule {name} has no parameter {key!r}; {known}.")
        declared = str(fields[key].type)
        wanted = _TYPES.get(declared, (object,))
        if not isinstance(value, wanted) or (declared == "float" and isinstance(value, bool)):
            raise ConfigError(f"{key} of the budget rule {name} must be a {declared}, not {value!r}.")
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and key not in parameters:
            raise ConfigError(f"the budget rule {name} needs {key}: give it one.")
    return BUDGETS[name](**parameters)


__all__ = [
    "BUDGETS",
    "AdaKVBudget",
    "GlobalTopKBudget",
    "HeadKVBudget",
    "PyramidKVBudget",
    "StaticBudget",
    "UniformBudget",
    "make_budget_rule",
]
