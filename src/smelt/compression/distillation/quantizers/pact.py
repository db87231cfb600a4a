"""PACT: the clipping level of activations is learned (Choi et al., 2018), with the gradients of later variants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compression.base import one_of, within
from smelt.compression.distillation.quantizers.base import (
    ACTIVATION_QUANTIZERS,
    ActivationQuantizer,
    Learned,
    check_bits,
    round_through,
)
from smelt.numerics.gradient import straight_through

GRADIENTS = ("pact", "cg", "plus")
_MIN_ALPHA = 1e-3
_SHARES, _SAMPLE = 50, 2**16  # of the search for an initial level: levels, and values that they round


@ACTIVATION_QUANTIZERS.register("pact", paper="Choi et al., 2018 (PACT, arXiv 1805.06085)")
@dataclass(frozen=True)
class Pact(ActivationQuantizer):
    """Clip activations at a learned level, which an L2 penalty makes small.

    The published initial level, 10, takes thousands of steps to shrink; the default fits the first batch.
    `gradient` is that of the level alpha, with z = x / scale and n steps: `pact` has 1 above alpha and 0 below it;
    `cg` (CG-PACT) adds round(z) / n below; `plus` (PACT+) has the straight-through derivative (round(z) - z) / n there.
    """

    bits: int = 2
    alpha: float | None = None  # initial level; null: of the least squared error; published: 10, for 200 epochs
    penalty_weight: float = 2e-4  # of alpha^2 in the loss
    gradient: str = "pact"  # pact, cg or plus
    signed: bool = False  # two-sided: clip at -alpha, too, for activations that are not the output of a ReLU

    def __post_init__(self) -> None:
        check_bits("pact", self.bits)
        if self.alpha is not None:
            within("pact", "alpha", self.alpha, _MIN_ALPHA, 1e4)
        within("pact", "penalty_weight", self.penalty_weight, 0.0, 1.0)
        one_of("pact", "gradient", self.gradient, GRADIENTS)

    def init(self, x: Tensor) -> Learned:
        if self.alpha is not None:
            return {"alpha": torch.tensor(self.alpha, device=x.device)}
        return {"alpha": self._least_squares(x.detach().float()).clamp(min=_MIN_ALPHA)}

    def _least_squares(self, x: Tensor) -> Tensor:
        """Return the level of the least squared error, [], of shares of the largest magnitude."""
        alphas = torch.linspace(1 / _SHARES, 1, _SHARES, device=x.device) * x.abs().amax()
        sample = x.flatten()[:: -(-x.numel() // _SAMPLE)]
        low, high = self.levels(self.bits)
        scales = (alphas / high).clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        errors = (sample / scales).round_().clamp_(low, high).mul_(scales).sub_(sample).square_().mean(1)
        return alphas[errors.argmin()]

    def scale(self, bits: int, learned: Learned) -> Tensor:
        return learned["alpha"] / self.levels(bits)[1]

    def fake_quantize(self, x: Tensor, bits: int, learned: Learned) -> Tensor:
        alpha, scale = learned["alpha"], self.scale(bits, learned)
        low, high = self.levels(bits)
        if self.gradient == "plus":
            return round_through((x / scale).clamp(low, high)) * scale
        if self.gradient == "cg":
            return round_through((x / scale.detach()).clamp(low, high)) * scale
        clipped = torch.where(x >= alpha, alpha, torch.where(x <= low * scale, low * scale, x))
        return straight_through(clipped, (x / scale).round().clamp(low, high) * scale)

    def penalty(self, learned: Learned) -> Tensor | float:
        return self.penalty_weight * learned["alpha"] ** 2
