"""QAIL: imitation learning with a quantized policy, tied to the float policy's outputs by QBC (Park et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.compression.base import METHODS
from smelt.compression.distillation.imitation import ImitationLearning


@METHODS.register("qail", paper="Park et al., 2024 (QAIL, arXiv 2412.01034)", needs=("calibration data",))
@dataclass(frozen=True)
class Qail(ImitationLearning):
    """Use for policies at 4 bits and fewer, where errors of single actions add up over an episode.

    `losses: [{loss: labels}]` leaves out QBC, the difference from the float policy's outputs.
    """
