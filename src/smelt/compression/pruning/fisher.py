"""Retraining-free pruning: Fisher mask search, rearrangement, mask tuning (Kwon et al., NeurIPS 2022).

The loss is expanded to second order in one mask per unit at m = 1, with the empirical Fisher as Hessian: the importance
of unit i is the sum over mini-batches of (d mean loss / d m_i)^2, and the cost of a selection is the sum over what it
removes. Rearrangement re-selects units within a layer by the block-diagonal Fisher: it minimizes || sum of the pruned
units' gradients ||^2 over mini-batches, greedily.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.compression.allocation.unit_search import KeptUnits
from smelt.compression.base import METHODS, CalibrationSize, MethodContext, ResourceEstimate, one_of
from smelt.compression.budget import Budget
from smelt.compression.calibration.gradients import all_mask_gradients, gradient_bytes
from smelt.compression.pruning.base import Scores, StructuredPruning
from smelt.compression.pruning.repair import RepairSettings, cut_and_repair
from smelt.compression.pruning.selection import checkpointed_selection
from smelt.errors import RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model


@METHODS.register(
    "fisher",
    paper="Kwon et al., A Fast Post-Training Pruning Framework for Transformers, NeurIPS 2022 (arXiv 2204.09656)",
    needs=("calibration data", "labels or text", "gradients"),
)
@dataclass(frozen=True)
class Fisher(StructuredPruning):
    """Use for the best pruned quality where gradients are affordable; prunes heads, FFN and convolution channels."""

    repair: str = "full"
    rearranged: bool = True  # re-select units within each layer by the block-diagonal Fisher
    teacher: str = "dense"  # the repair fits dense, or assistant (the same search at sqrt(budget))
    published: bool = False  # repair with the special cases of the released code

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "teacher", self.teacher, ("dense", "assistant"))
        if self.published and (self.repair, self.solver, self.teacher) != ("tune", "lsmr", "assistant"):
            raise RecipeError("fisher as published has repair: tune, solver: lsmr and teacher: assistant.")

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if self.teacher == "assistant" and any(part.kind == "channels" for part in anatomy.parts):
            raise RecipeError(
                "teacher: assistant supports attention and feed-forward parts; for convolutions use teacher: dense."
            )

    def observe(self, anatomy: Anatomy, context: MethodContext) -> list[np.ndarray]:
        """Return the mask gradients of each part: [mini-batches, units]."""
        gradients = all_mask_gradients(
            anatomy, context.batches, context.progress, context.checkpoint, context.memory_limit
        )
        return np.split(gradients, np.cumsum([part.units for part in anatomy.parts])[:-1], axis=1)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        repair = super().estimate_resources(anatomy, size, memory_limit)
        memory = gradient_bytes(anatomy, size.batch_size, size.seq_len)
        checkpointing = memory_limit is not None and memory > memory_limit
        if checkpointing:
            memory = gradient_bytes(anatomy, size.batch_size, size.seq_len, checkpointing=True)
        return ResourceEstimate(repair.passes + (3.5 if checkpointing else 2.5), max(repair.memory, memory))

    def scores(self, anatomy: Anatomy, observations: list[np.ndarray], context: MethodContext) -> Scores:
        return [np.square(gradients, dtype=np.float64).sum(0) for gradients in observations]

    def refine(self, anatomy: Anatomy, choice: KeptUnits, observations: list[np.ndarray]) -> KeptUnits:
        if not self.rearranged:
            return choice
        return [rearrange(gradients, kept) for gradients, kept in zip(observations, choice, strict=True)]

    def prune(
        self, model: Model, choice: KeptUnits, scores: Scores, observations: list[np.ndarray], context: MethodContext
    ) -> dict[str, Any]:
        if self.repair == "none" or self.teacher == "dense":
            return super().prune(model, choice, scores, observations, context)
        anatomy, larger = model.anatomy, Budget(self.budget.measure, math.sqrt(self.budget.keep))
        assistant = checkpointed_selection(
            context, anatomy, "assistant", lambda: self.select_units(anatomy, scores, context, larger)
        )
        return cut_and_repair(model, choice, self.repair_settings(model), context, assistant)

    def repair_settings(self, model: Model) -> RepairSettings:
        """Return the repair settings; `published` follows the released code.

        That code skips the first attention, fits the last feed-forward of a classifier on the first token only, and
        stops repairing at the first solve that fails.
        """
        plain = super().repair_settings(model)
        if not self.published:
            return plain
        return RepairSettings(
            mode="tune",
            solver="lsmr",
            published=True,
            first_token_at_the_end=model.task == "classification" and not model.anatomy.family.causal,
            skip_first_token=False,
        )


def rearrange(gradients: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Re-select as many units as `kept` has, given gradients [mini-batches, units].

    Each kept unit in turn joins the pruned set, and the member whose return leaves the shortest sum comes back.
    """
    units = gradients.shape[1]
    pruned_count = units - len(kept)
    if pruned_count == 0 or not len(kept):
        return kept
    gram = gradients.T.astype(np.float64) @ gradients.astype(np.float64)  # [units, units]
    length = np.diag(gram).copy()
    order = np.argsort(length, kind="stable")
    pruned = np.zeros(units, dtype=bool)
    pruned[order[:pruned_count]] = True
    # sums[i] = <gradient of i, sum over the pruned set>; removing unit i changes the squared length by:
    sums = gram[:, pruned].sum(1)
    for joining in order[pruned_count:]:
        pruned[joining] = True
        sums += gram[:, joining]
        change = np.where(pruned, length - 2 * sums, np.inf)
        leaving = int(change.argmin())
        pruned[leaving] = False
        sums -= gram[:, leaving]
    return np.flatnonzero(~pruned)
