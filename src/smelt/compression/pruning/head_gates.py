"""Head gates: hard-concrete gates, one per attention head, that are trained with the weights (Shim et al., 2021).

With a logit pi per head and u ~ U(0, 1), a gate in training is (Louizos et al., ICLR 2018)

    s = sigmoid((log u - log(1 - u) + pi) / beta)    g = clamp(s (zeta - gamma) + gamma, 0, 1)    1[g >= 0.5]

where the gradient of the step is that of g. A coefficient times the expected number of heads that are not zero,
sigmoid(pi - beta log(-gamma / zeta)), is added to the loss. In evaluation a gate is open where pi >= 0; closed heads
are removed. Three techniques of the paper keep many heads from closing for good in the first steps: `penalty_warmup`,
`initial_logit` and `scale_output`; 0, 0 and false give plain gates.

Differences from the paper: AdamW instead of LAMB, and gates with a learning rate of their own, since small data has not
the paper's number of steps. Gates are fixed after half of the training, so that the heads that stay train on without
noise; `gate_training: 1` trains them to the end, as the paper does. With a budget, the coefficient grows exponentially
while more heads are expected to be open than allowed, and shrinks otherwise; the heads with the largest logits stay.
The paper prunes all-attention networks, where a head takes its persistent vectors along; the gates work in any network
whose heads can be removed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compression.base import METHODS, within
from smelt.compression.pruning.gated import GatedPruning, Gates
from smelt.models.anatomy import Part

STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1  # gamma and zeta: a stretched sigmoid reaches 0 and 1
NOISE_MARGIN = 1e-6  # of u, from 0 and 1
FIRST_COEFFICIENT = 1e-3  # with a budget
COEFFICIENT_GROWTH = 10.0  # of its logarithm, in a whole training in which no head closed


@METHODS.register(
    "head-gates",
    paper="Shim et al., Layer-wise Pruning of Transformer Attention Heads for Efficient Language Modeling, ISOCC 2021 "
    "(arXiv 2110.03252)",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class HeadGates(GatedPruning):
    """Use when the network can be trained: gates learn which heads to remove while the weights adapt."""

    beta: float = 0.333  # temperature of the gates
    initial_logit: float = 2.0  # pi at the start: 2 is 94 % open; 0 was discarded in the paper
    penalty_warmup: float = 0.05  # fraction of the training in which the penalty rises from 0; 0: at once
    scale_output: bool = True  # multiply heads by the number of heads over the number of open ones

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "beta", self.beta, 0.01, 10.0)
        within(self.name, "initial_logit", self.initial_logit, -20.0, 20.0)
        within(self.name, "penalty_warmup", self.penalty_warmup, 0.0, 1.0)

    def make_gates(self, part: Part) -> Gates:
        return HardConcreteGates(part.units, self)

    def new_state(self) -> Tensor:
        """Return the coefficient of the next step, []."""
        return torch.tensor(FIRST_COEFFICIENT)

    def update_state(
        self, state: Tensor, gates: Sequence[Gates], costs: Sequence[float], target: float | None, step: int, steps: int
    ) -> None:
        warmup = self.penalty_warmup * steps
        strength = min(step / warmup, 1.0) if warmup else 1.0
        if target is None:
            assert self.coefficient is not None
            state.fill_(strength * self.coefficient)
            return
        excess = self._open_share(gates, costs) - (1 - strength * (1 - target))
        state.mul_((COEFFICIENT_GROWTH / steps * excess / (1 - target)).exp())

    def penalty(self, gates: Sequence[Gates], costs: Sequence[float], state: Tensor) -> Tensor:
        return state * sum(len(gate.logits) for gate in gates) * self._open_share(gates, costs)

    def _open_share(self, gates: Sequence[Gates], costs: Sequence[float]) -> Tensor:
        """Return the expected cost of the heads whose gates are not zero, relative to that of all, []."""
        pairs = list(zip(gates, costs, strict=True))
        total = sum(cost * len(gate.logits) for gate, cost in pairs)
        return (
            torch.stack([cost * open_probability(gate.logits, self.beta).sum() for gate, cost in pairs]).sum() / total
        )


class HardConcreteGates(Gates):
    """The gates of one layer."""

    def __init__(self, units: int, method: HeadGates) -> None:
        super().__init__(units, method.initial_logit)
        self._beta, self._scale_output = method.beta, method.scale_output

    def forward(self) -> Tensor:
        if self.training and not self.decided:
            noise = torch.rand_like(self.logits).clamp(NOISE_MARGIN, 1 - NOISE_MARGIN)
            gate = binarize(hard_concrete(self.logits, noise, self._beta))
        else:
            gate = (self.kept if self.decided else self.logits >= 0).to(self.logits.dtype)
        return gate * output_scale(gate) if self._scale_output else gate


def hard_concrete(logits: Tensor, noise: Tensor, beta: float) -> Tensor:
    """Return gates in [0, 1] from noise that is uniform in (0, 1)."""
    concrete = torch.sigmoid((noise.log() - (-noise).log1p() + logits) / beta)
    return (concrete * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW).clamp(0.0, 1.0)


def open_probability(logits: Tensor, beta: float) -> Tensor:
    """Return the probability that a hard-concrete gate is not zero."""
    return torch.sigmoid(logits - beta * math.log(-STRETCH_LOW / STRETCH_HIGH))


def binarize(gate: Tensor) -> Tensor:
    """Round gates to 0 or 1; the gradient is that of the gates."""
    return (gate >= 0.5).to(gate.dtype) + gate - gate.detach()


def output_scale(gate: Tensor) -> Tensor:
    """Return the number of heads over the number of open ones, without a gradient, [].

    It lies between 1 and the number of heads, also where none is open.
    """
    heads = len(gate)
    return (heads / gate.detach().round().sum()).clamp(1.0, heads)
