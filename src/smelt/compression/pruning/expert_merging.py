"""Expert merging: the most used experts absorb the others that are routed alike (M-SMoE, Li et al., ICLR 2024).

The most used experts of a mixture stay. Every other expert joins the one whose router logits are most similar to its
own (cosine over the calibration tokens), its channels are matched with those of that expert (the assignment of the
largest sum of weight products), and the group is averaged, each expert by its share of the group's tokens.

In the paper the router keeps a row for every expert, and all rows of a group lead to the same merged expert. Here the
router keeps the row of the expert that stays, as after pruning, so that the result is an ordinary smaller mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from smelt.compression.base import METHODS
from smelt.compression.calibration.expert_statistics import ExpertStatistics
from smelt.compression.pruning.expert_pruning import ExpertPruning, share_of_mixture
from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Mixture


@METHODS.register(
    "expert-merging",
    paper="Li et al., Merge, Then Compress: Demystify Efficient SMoE with Hints from Its Routing Policy, ICLR 2024 "
    "(arXiv 2310.01334), M-SMoE",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class ExpertMerging(ExpertPruning):
    """Use as a baseline for reap: averages similar experts instead of removing them."""

    align: bool = True  # match the channels of experts before they are averaged

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        for mixture in anatomy.mixtures:
            widths = {
                part.units for part in anatomy.parts if part.mixture is not None and part.mixture.path == mixture.path
            }
            if len(widths) > 1:
                raise ModelError(
                    f"the experts of {mixture.path} differ in width, so they cannot be averaged; remove some instead "
                    "(reap)."
                )

    def scores(self, anatomy: Anatomy, statistics: Sequence[ExpertStatistics], seed: int) -> list[np.ndarray]:
        return [share_of_mixture(each.tokens.numpy()) for each in statistics]

    def prepare_kept(self, mixture: Mixture, kept: np.ndarray, statistics: ExpertStatistics) -> dict[str, Any]:
        groups = group_experts(statistics.similarity.numpy(), kept)
        for leader, members in groups.items():
            if members:
                experts = [mixture.module[leader], *(mixture.module[member] for member in members)]
                merge_experts(experts, statistics.tokens[[leader, *members]], align=self.align)
        return {}


def group_experts(similarity: np.ndarray, kept: np.ndarray) -> dict[int, list[int]]:
    """Assign every expert that does not stay to the most similar one that does."""
    groups: dict[int, list[int]] = {int(leader): [] for leader in kept}
    for expert in sorted(set(range(len(similarity))) - set(groups)):
        groups[int(kept[np.argmax(similarity[expert, kept])])].append(expert)
    return groups


@torch.no_grad()
def merge_experts(experts: Sequence[nn.Module], tokens: Tensor, *, align: bool) -> None:
    """Average experts into the first one, each by its number of tokens."""
    weights = (tokens / tokens.sum() if tokens.sum() > 0 else torch.full_like(tokens, 1 / len(tokens))).tolist()
    first: Any = experts[0]
    merged = {name: weights[0] * parameter.double() for name, parameter in first.named_parameters()}
    for expert, weight in zip(experts[1:], weights[1:], strict=True):
        for name, tensor in _aligned(first, expert, align).items():
            merged[name] += weight * tensor
    for name, parameter in first.named_parameters():
        parameter.copy_(merged[name])


def _aligned(reference: Any, expert: Any, align: bool) -> dict[str, Tensor]:
    """Return the parameters of an expert in float64, its channels in the order of those they match best."""
    names = expert.names
    tensors = {name: parameter.double() for name, parameter in expert.named_parameters()}
    if not align:
        return tensors
    own = {name: parameter.double() for name, parameter in reference.named_parameters()}
    products = sum(own[f"{name}.weight"] @ tensors[f"{name}.weight"].T for name in (names.gate, names.up))
    products = products + own[f"{names.down}.weight"].T @ tensors[f"{names.down}.weight"]
    _, order = linear_sum_assignment(products.cpu().numpy(), maximize=True)
    index = torch.as_tensor(order, device=products.device)
    return {
        name: tensor[:, index]
        if name == f"{names.down}.weight"
        else tensor
        if name.startswith(f"{names.down}.")
        else tensor[index]
        for name, tensor in tensors.items()
    }
