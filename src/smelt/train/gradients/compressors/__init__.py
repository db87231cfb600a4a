"""Gradient compressors, one file each."""

from __future__ import annotations

from typing import Any

from smelt.train.gradients.compressor import COMPRESSORS, Compressor
from smelt.train.gradients.compressors.adacomp import AdaComp
from smelt.train.gradients.compressors.cltk import CLTk
from smelt.train.gradients.compressors.deft import DEFT
from smelt.train.gradients.compressors.dgc import DGC
from smelt.train.gradients.compressors.ef_sign import EFSign
from smelt.train.gradients.compressors.exdyna import ExDyna
from smelt.train.gradients.compressors.hard_threshold import HardThreshold
from smelt.train.gradients.compressors.micro import MiCRO
from smelt.train.gradients.compressors.one_bit import OneBit
from smelt.train.gradients.compressors.powersgd import PowerSGD
from smelt.train.gradients.compressors.qsgd import QSGD
from smelt.train.gradients.compressors.randomk import RandomK
from smelt.train.gradients.compressors.sage import SAGE
from smelt.train.gradients.compressors.sidco import SIDCo
from smelt.train.gradients.compressors.topk import TopK

__all__ = [
    "COMPRESSORS",
    "DEFT",
    "DGC",
    "QSGD",
    "SAGE",
    "AdaComp",
    "CLTk",
    "EFSign",
    "ExDyna",
    "HardThreshold",
    "MiCRO",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SIDCo",
    "TopK",
    "create_compressor",
]


def create_compressor(name: str, /, **parameters: Any) -> Compressor:
    """Create a compressor by name; unknown names, unknown parameters and values of the wrong type are errors."""
    return COMPRESSORS.build(name, **parameters)
