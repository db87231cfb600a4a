"""Terms of the loss of a student: against the labels, or against the outputs of a teacher.

A term is a frozen dataclass with a weight; a method adds up several. Logits are [batch, classes] of a classifier, or
[batch, tokens, vocabulary] of a language model, where position n predicts token n + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import within
from smelt.data import Batch
from smelt.errors import RecipeError
from smelt.registry import Registered, Registry

IGNORED = -100  # label of a position that counts for no loss
SAMPLE_WEIGHTS = "sample_weights"  # of a batch: how much each sample counts, [batch]


class LossTerm(Registered, ABC):
    """One term of the loss."""

    paper: ClassVar[str]
    summary: ClassVar[str]
    needs_teacher: ClassVar[bool] = True
    uses_own_loss: ClassVar[bool] = False  # the loss that the network computes from the labels
    logit_copies: ClassVar[int] = 0  # float32 tensors of the size of the logits, besides those of the labels' loss
    intermediates: ClassVar[tuple[str, ...]] = ()  # names in intermediates.py of what it compares besides the logits
    weight: float

    @abstractmethod
    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        """Return the term, [], from the outputs of both networks (the teacher's may be None) and the batch."""

    @classmethod
    def registry(cls) -> Registry[LossTerm]:
        return LOSSES


LOSSES: Registry[LossTerm] = Registry("loss", error=RecipeError)


@LOSSES.register("labels", paper="", needs_teacher=False)
@dataclass(frozen=True)
class Labels(LossTerm):
    """The network's own loss: cross-entropy with the labels or the next token."""

    uses_own_loss: ClassVar[bool] = True

    weight: float = 1.0

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        loss: Tensor = student.loss
        return loss


@LOSSES.register("logits", paper="Hinton et al., 2015 (arXiv 1503.02531)")
@dataclass(frozen=True)
class Logits(LossTerm):
    """KL divergence from the teacher's distribution, averaged over samples or tokens.

    A regression has one logit and no distribution: its loss is the mean squared error.
    """

    logit_copies: ClassVar[int] = 4

    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        within("logits", "temperature", self.temperature, 0.01, 100.0)

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        if student.logits.shape[-1] == 1:
            return F.mse_loss(student.logits.float(), teacher.logits.detach().float())
        divergence = kl_divergence(teacher.logits, student.logits, self.temperature)
        return self.temperature**2 * mean_over_tokens(divergence, batch)


@LOSSES.register("cosine", paper="Boo et al., 2021 (SPEQ, arXiv 2009.14502)")
@dataclass(frozen=True)
class Cosine(LossTerm):
    """One minus the cosine similarity of the softened distributions.

    Its gradient is bounded and shrinks with the teacher's confidence, where that of a KL divergence grows.
    """

    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        within("cosine", "temperature", self.temperature, 0.01, 100.0)

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        ours, theirs = (F.softmax(out.logits.float() / self.temperature, dim=-1) for out in (student, teacher))
        return mean_over_tokens(1 - F.cosine_similarity(ours, theirs.detach(), dim=-1), batch)


@LOSSES.register("token-scaled-logits", paper="Kim et al., 2023 (TSLD, arXiv 2308.06744)")
@dataclass(frozen=True)
class TokenScaledLogits(LossTerm):
    """Cross-entropy with the teacher's distribution, where tokens that the teacher is sure of count less.

    The weights of a sequence are the softmax of the teacher's own cross-entropy over its tokens. Sequences are
    averaged; the published code sums over its batches of 4.
    """

    logit_copies: ClassVar[int] = 2

    weight: float = 1.0
    temperature: float = 10.0  # of the softmax over tokens

    def __post_init__(self) -> None:
        within("token-scaled-logits", "temperature", self.temperature, 0.01, 1e6)

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        labels = batch["labels"][:, 1:]
        theirs, ours = teacher.logits[:, :-1].float().detach(), student.logits[:, :-1].float()
        scales = token_weights(theirs, labels, self.temperature)
        cross_entropy = -(F.softmax(theirs, dim=-1) * F.log_softmax(ours, dim=-1)).sum(-1)
        return (scales * cross_entropy).sum(-1).mean()


@LOSSES.register("qbc", paper="Park et al., 2024 (QAIL, arXiv 2412.01034)")
@dataclass(frozen=True)
class Qbc(LossTerm):
    """Mean squared difference from the teacher's outputs: logits of discrete actions, or the continuous action.

    Samples count by their weights, if a method gives them some (SQIL).
    """

    weight: float = 1.0

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        differences = (student.logits.float() - teacher.logits.detach().float()).square().mean(-1)
        if SAMPLE_WEIGHTS in batch:
            differences = differences * batch[SAMPLE_WEIGHTS].view(-1, *[1] * (differences.dim() - 1))
        return mean_over_tokens(differences, batch)


def token_weights(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return TSLD's weights of tokens from the teacher's logits and the labels they predict: [batch, tokens].

    They add up to 1 per sequence; ignored labels have none.
    """
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    scores = losses.view_as(labels).masked_fill(labels == IGNORED, -torch.inf) / temperature
    return F.softmax(scores, dim=-1).nan_to_num(nan=0.0)  # a sequence without labels


def kl_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) of softened distributions: [..., classes] -> [...]."""
    theirs = F.log_softmax(teacher.detach().float() / temperature, dim=-1)
    ours = F.log_softmax(student.float() / temperature, dim=-1)
    return (theirs.exp() * (theirs - ours)).sum(-1)


def mean_over_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Average over samples [batch], or over the tokens [batch, tokens] that are no padding."""
    mask = batch.get("attention_mask")
    if mask is None or values.shape != mask.shape:
        return values.mean()
    kept = mask.to(values.dtype)
    return (values * kept).sum() / kept.sum().clamp(min=1)
