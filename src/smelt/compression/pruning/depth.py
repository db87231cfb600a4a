"""Base class of methods that remove whole blocks: the least important go until a budget is met."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from smelt.compression.base import Method, MethodContext, UndecidedWidth, within
from smelt.compression.budget import Budget
from smelt.errors import BudgetError, ModelError, RecipeError
from smelt.measure.cost import block_parameters, count_parameters
from smelt.models.anatomy import Anatomy
from smelt.models.depth import check_removable_blocks, keep_blocks
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.token_pruning import refuse_token_pruning


@dataclass(frozen=True)
class DepthPruning(Method):
    """Remove the least important blocks; what remains is a network of the same type with fewer layers."""

    budget: Budget = field(metadata={"example": "budget: {parameters: 0.75}"})
    protected: int = 0  # so many blocks at each end always stay

    def __post_init__(self) -> None:
        if self.budget.measure != "parameters":
            raise RecipeError(
                f"{self.name} removes whole blocks; give a budget of parameters, such as parameters=0.75."
            )
        within(self.name, "protected", self.protected, 0, 1000)

    @abstractmethod
    def importance(self, model: Model, context: MethodContext) -> np.ndarray:
        """Return the importance of each block, [blocks]."""

    def check(self, anatomy: Anatomy) -> None:
        check_removable_blocks(anatomy, self.name)
        if quantized_layers(anatomy.network):
            raise ModelError("this model is already quantized; prune its source model, then quantize the result.")
        refuse_token_pruning(anatomy.network, f"{self.name} removes layers, each of which has a rule")
        self.select(anatomy, np.arange(len(anatomy.blocks), dtype=np.float64))

    def select(self, anatomy: Anatomy, importance: np.ndarray) -> list[int]:
        """Return the blocks to keep, ascending: the least important go until the budget is met."""
        sizes = [count_parameters(block.module) for block in anatomy.blocks]
        allowed, blocks = self.budget.keep * sum(sizes), len(sizes)
        removable = [index for index in range(blocks) if self.protected <= index < blocks - self.protected]
        kept = set(range(blocks))
        for index in sorted(removable, key=lambda index: (importance[index], index)):
            if sum(sizes[each] for each in kept) <= allowed:
                break
            kept.remove(index)
        if not kept or sum(sizes[each] for each in kept) > allowed:
            least = max(1, 2 * self.protected) / blocks
            raise BudgetError(
                f"no choice of blocks reaches parameters={self.budget.keep:g}: "
                f"{max(1, blocks - len(removable))} of {blocks} blocks must stay; allow at least "
                f"parameters={np.ceil(100 * least) / 100:g}."
            )
        return sorted(kept)

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        """Remove as many blocks; which ones is decided during the run, and all have the same shape."""
        keep_blocks(anatomy, self.select(anatomy, np.arange(len(anatomy.blocks), dtype=np.float64)))
        return undecided

    def targets(self) -> dict[str, float]:
        return self.budget.to_json()

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        anatomy = model.anatomy
        self.check(anatomy)
        before = block_parameters(anatomy)
        saved = context.checkpoint.load("importance")
        importance = self.importance(model, context) if saved is None else saved["importance"].numpy()
        context.checkpoint.save("importance", {"importance": torch.from_numpy(importance)})
        kept = self.select(anatomy, importance)
        keep_blocks(anatomy, kept)
        return {
            "parameters_removed": before - block_parameters(model.anatomy),
            "block_parameters_before": before,
            "blocks_removed": [index for index in range(len(importance)) if index not in kept],
            "importance": importance.tolist(),
        }
