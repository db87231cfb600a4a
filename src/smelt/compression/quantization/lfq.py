"""LFQ: fit the last block to the logits of the original network (Lee et al., 2026, arXiv 2605.29756).

A small error of the last hidden state may flip the next token. So the last block's loss includes the unchanged final
norm and head: the cross-entropy between the full distributions of the original and the quantized network, not the next
token of the text. Its minimum is the entropy of the original distribution.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.quantization.chunked_loss import sum_in_chunks
from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy


class LogitLoss:
    """Mean over the unmasked tokens of -sum_v p(v) log q(v), from the outputs of the last block."""

    def __init__(self, anatomy: Anatomy, device: torch.device) -> None:
        norm, head = anatomy.final_norm, anatomy.network.get_output_embeddings()
        self.norm = nn.Identity() if norm is None else copy.deepcopy(norm).to(device).float().requires_grad_(False)
        self.weight = head.weight.detach().to(device).float()  # [vocabulary, hidden size]
        self.bias = None if head.bias is None else head.bias.detach().to(device).float()

    @staticmethod
    def check(anatomy: Anatomy) -> None:
        """Raise unless the logits are computed from the last block by a norm and a linear head."""
        head = anatomy.network.get_output_embeddings() if anatomy.family.causal else None
        hidden = anatomy.hidden_size
        if not isinstance(head, nn.Linear) or head.in_features != hidden:
            raise ModelError(
                "lfq needs a language model whose head reads the last block; leave `lfq` out for this one."
            )

    def __call__(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        student, teacher = (x.flatten(0, -2) if mask is None else x[mask] for x in (output, target))  # [tokens, hidden]
        return sum_in_chunks(self._cross_entropy, student, teacher, len(self.weight)) / len(student)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.weight, self.bias)

    def _cross_entropy(self, student: Tensor, teacher: Tensor) -> Tensor:
        with torch.no_grad():
            probabilities = self.logits(teacher).softmax(-1)
        return -(probabilities * self.logits(student).log_softmax(-1)).sum()
