"""Terms of the loss that compare intermediate outputs of student and teacher, added up over the blocks.

Both networks need blocks of the same shapes. Padding counts nowhere; the published code averages squared errors over
padding, too, so that their size depends on the longest text of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.compression.distillation.intermediates import HIDDEN_STATES, MAPS, OUTPUTS, SCORES
from smelt.compression.distillation.losses import LOSSES, LossTerm, mean_over_tokens
from smelt.data import Batch

MIN_PROBABILITY = 1e-8
MASKED = -100.0  # attention scores up to this belong to pairs of tokens that are masked

_TERNARYBERT = "Zhang et al., 2020 (TernaryBERT, arXiv 2009.12812)"
_KD_QAT = "Kim et al., 2022 (KD for QAT of encoders, arXiv 2211.11014)"


@LOSSES.register("hidden-states", paper=_TERNARYBERT, intermediates=(HIDDEN_STATES,))
@dataclass(frozen=True)
class HiddenStates(LossTerm):
    """Mean squared error of the input of the first block and the output of every block."""

    weight: float = 1.0

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        return _squared_errors(HIDDEN_STATES, student, teacher, batch)


@LOSSES.register("attention-output", paper=_KD_QAT, intermediates=(OUTPUTS,))
@dataclass(frozen=True)
class AttentionOutput(LossTerm):
    """Mean squared error of what leaves attention, residual included; tasks prefer it or attention-map."""

    weight: float = 1.0

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        return _squared_errors(OUTPUTS, student, teacher, batch)


@LOSSES.register("attention-map", paper=_KD_QAT, intermediates=(MAPS,))
@dataclass(frozen=True)
class AttentionMap(LossTerm):
    """KL divergence of the attention probabilities, averaged over queries, heads and samples."""

    weight: float = 1.0

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        return _sum(_map_divergence(ours, theirs, batch) for ours, theirs in _pairs(MAPS, student, teacher))


@LOSSES.register("attention-score", paper=_TERNARYBERT, intermediates=(SCORES,))
@dataclass(frozen=True)
class AttentionScore(LossTerm):
    """Mean squared error of the attention scores before the softmax, as TernaryBERT and Teacher Intervention use."""

    weight: float = 1.0

    def compute(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        return _sum(_score_error(ours, theirs, batch) for ours, theirs in _pairs(SCORES, student, teacher))


def _pairs(name: str, student: Any, teacher: Any) -> Any:
    """Return the intermediate outputs of each block in float32: the student's and the teacher's."""
    taught = [tensor.detach().float() for tensor in teacher.intermediates[name]]
    return zip([tensor.float() for tensor in student.intermediates[name]], taught, strict=True)


def _sum(terms: Any) -> Tensor:
    return torch.stack(list(terms)).sum()


def _squared_errors(name: str, student: Any, teacher: Any, batch: Batch) -> Tensor:
    pairs = _pairs(name, student, teacher)
    return _sum(mean_over_tokens((ours - theirs).square().mean(-1), batch) for ours, theirs in pairs)


def _map_divergence(ours: Tensor, theirs: Tensor, batch: Batch) -> Tensor:
    """Return KL(theirs || ours) of maps [batch, heads, queries, keys]; keys that are masked in both add nothing."""
    ours, theirs = ours.clamp(min=MIN_PROBABILITY), theirs.clamp(min=MIN_PROBABILITY)
    rows = (theirs * (theirs.log() - ours.log())).sum(-1).mean(1)  # [batch, queries]
    mask = batch.get("attention_mask")
    if mask is None:
        return rows.mean()
    return ((rows * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def _score_error(ours: Tensor, theirs: Tensor, batch: Batch) -> Tensor:
    """Return the mean squared error of scores [batch, heads, queries, keys] over pairs that are not masked."""
    attended = theirs > MASKED
    if "attention_mask" in batch:
        attended = attended & batch["attention_mask"][:, None, :, None].bool()
    errors = (ours - theirs).masked_fill(~attended, 0.0).square()
    return errors.sum() / attended.sum().clamp(min=1)
