"""How many parts a cluster's keys are split into when a token is decoded: a table, made before any prompt is seen.

Tangram (Kim et al., 2026, arXiv 2606.06302) shares the processors out in proportion to budgets, which are shares of a
prompt and so hold for every request. A figure shows 8, 5 and 3 splits for budgets of 100, 50 and 25 %; the rule behind
it is not known. Ours, floor(most * budget) + 1 and no more than `most`, gives these three with 8; more are finer.
"""

from __future__ import annotations

from torch import Tensor

from smelt.errors import ConfigError


def splits(budgets: Tensor, most: int = 64) -> Tensor:
    """For each cluster's budget [clusters]: its number of splits, from 1 to `most`, int64."""
    if most < 1:
        raise ConfigError(f"keys are split into at least 1 part, not {most}.")
    shares = (most * budgets.double().clamp(0, 1)).round(decimals=6)  # 0.3 * 10 is 3, not 2.9999999
    return (shares.floor() + 1).clamp(max=most).long()
