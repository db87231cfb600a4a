"""PACT2: two learned clipping levels, for activations below zero that are not as large as those above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
from smelt.numerics.catalog import get_format
from smelt.numerics.format import Format
from smelt.numerics.gradient import straight_through

_MIN_RANGE = 1e-6  # of all levels together


@ACTIVATION_QUANTIZERS.register("pact2", paper="Choi et al., 2018 (PACT, arXiv 1805.06085), two-sided")
@dataclass(frozen=True)
class Pact2(ActivationQuantizer):
    """Clip activations at two learned levels, -alpha_n and alpha_p: for the outputs of GELU and SiLU.

    With 2^bits - 1 = n steps, scale = (alpha_n + alpha_p) / n and zero point z = round(alpha_n / scale), so that zero
    is a level, the values are scale * (clamp(round(x / scale) + z, 0, n) - z). `gradient: pact` gives a level the
    gradients of the values that it clips; `plus` (PACT+) adds (round(x / scale) - x / scale) / n of all others.
    """

    bits: int = 4
    alpha_n: float | None = None  # initial levels; null: the extremes of the first batch
    alpha_p: float | None = None
    penalty_weight: float = 2e-4  # of alpha_n^2 + alpha_p^2 in the loss
    gradient: str = "pact"  # pact or plus

    signed: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_bits("pact2", self.bits)
        for name in ("alpha_n", "alpha_p"):
            if (alpha := getattr(self, name)) is not None:
                within("pact2", name, alpha, 1e-3, 1e4)
        within("pact2", "penalty_weight", self.penalty_weight, 0.0, 1.0)
        one_of("pact2", "gradient", self.gradient, ("pact", "plus"))

    def format(self, bits: int) -> Format:
        return get_format(f"int{bits}-asym/tensor")

    def levels(self, bits: int) -> tuple[int, int]:
        return 0, 2**bits - 1

    def init(self, x: Tensor) -> Learned:
        extremes = {"alpha_n": -x.detach().float().amin(), "alpha_p": x.detach().float().amax()}
        initial = {name: getattr(self, name) for name in extremes}
        return {
            name: extreme.clamp(min=_MIN_RANGE) if initial[name] is None else torch.full_like(extreme, initial[name])
            for name, extreme in extremes.items()
        }

    def scale(self, bits: int, learned: Learned) -> Tensor:
        return torch.add(*_positive(learned)).clamp(min=_MIN_RANGE) / self.levels(bits)[1]

    def zero_point(self, bits: int, learned: Learned) -> Tensor:
        return (_positive(learned)[0] / self.scale(bits, learned)).round()

    def fake_quantize(self, x: Tensor, bits: int, learned: Learned) -> Tensor:
        scale, (low, high) = self.scale(bits, learned), self.levels(bits)
        alpha_n, alpha_p = _positive(learned)
        if self.gradient == "plus":
            zero = round_through(alpha_n / scale)
            return round_through((x / scale).clamp(low - zero, high - zero)) * scale
        zero = self.zero_point(bits, learned)
        clipped = torch.where(x >= alpha_p, alpha_p, torch.where(x <= -alpha_n, -alpha_n, x))
        return straight_through(clipped, (((x / scale).round() + zero).clamp(low, high) - zero) * scale)

    def penalty(self, learned: Learned) -> Tensor | float:
        return self.penalty_weight * (learned["alpha_n"] ** 2 + learned["alpha_p"] ** 2)


def _positive(learned: Learned) -> tuple[Tensor, Tensor]:
    """Return alpha_n and alpha_p, at least 0; a level that an update has moved below that can come back."""
    alpha_n, alpha_p = (straight_through(learned[name], learned[name].clamp(min=0)) for name in ("alpha_n", "alpha_p"))
    return alpha_n, alpha_p
