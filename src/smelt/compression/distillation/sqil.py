"""SQIL: imitation learning in which the states that matter to the float policy count more (Park et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.compression.base import METHODS, Batch, within
from smelt.compression.distillation.imitation import ImitationLearning
from smelt.compression.distillation.student import NetworkTeacher
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.errors import ModelError, RecipeError
from smelt.models.anatomy import Anatomy


@METHODS.register("sqil", paper="Park et al., 2025 (SQIL, arXiv 2505.15304)", needs=("calibration data",))
@dataclass(frozen=True)
class Sqil(ImitationLearning):
    """Use instead of qail if few states decide an episode: they count more in the difference from the float policy.

    The paper perturbs patches of images; here the features of an observation are replaced by their mean, one at a time.
    """

    important_fraction: float = 0.2  # of the states, those of the highest importance
    importance_weight: float = 2.0  # of these in the loss `qbc`; other states have 1

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "important_fraction", self.important_fraction, 0.0, 1.0)
        within(self.name, "importance_weight", self.importance_weight, 0.0, 1e6)
        if not any(term.name == "qbc" for term in self.losses):
            raise RecipeError("sqil weights states in the loss qbc; add `{loss: qbc}` to `losses`, or use qail.")

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if anatomy.network.main_input_name != "observations":
            raise ModelError("sqil perturbs the observations of a policy, and this model reads none; use qail.")

    def weigh_samples(self, samples: Batch, teacher: NetworkTeacher | None) -> Tensor | None:
        assert isinstance(teacher, DenseTeacher)
        importance = state_importance(teacher.network, samples["observations"])
        return importance_weights(importance, self.important_fraction, self.importance_weight)


@torch.no_grad()
def state_importance(policy: Any, observations: Tensor) -> Tensor:
    """Return how much the outputs of a policy depend on the features of each state: [states].

    This is the squared distance between the outputs for an observation and those with one feature replaced by its mean,
    averaged over the features.
    """
    outputs = policy(observations).logits.float()
    mean = observations.mean(0)
    total = torch.zeros(len(observations), device=observations.device)
    for feature in range(observations.shape[1]):
        perturbed = observations.clone()
        perturbed[:, feature] = mean[feature]
        total += (outputs - policy(perturbed).logits.float()).square().sum(-1)
    return total / observations.shape[1]


def importance_weights(importance: Tensor, fraction: float, weight: float) -> Tensor:
    """Return `weight` for the fraction of the states with the highest importance and 1 for others: [states]."""
    weights = torch.ones_like(importance)
    weights[importance.argsort(descending=True)[: round(fraction * len(importance))]] = weight
    return weights
