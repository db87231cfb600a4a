"""Activations of gated feed-forwards: the plain reference. The compiled paths fuse them with what surrounds them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class GatedActivation:
    """The product of an activation of the gate and the outputs of the up projection.

    `swiglu_oai` is GPT-OSS's: gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit` and up within it.
    """

    name: Literal["silu", "gelu_tanh", "swiglu_oai"] = "silu"
    alpha: float = 1.0  # of swiglu_oai
    limit: float = math.inf  # of swiglu_oai

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.name == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        if self.name == "silu":
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1.0)


SILU = GatedActivation()
