"""Gradient compressors, one file each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Compressor
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

COMPRESSORS: dict[str, type[Compressor]] = {
    kind.name: kind
    for kind in (
        *(ExDyna, MiCRO, DEFT, SAGE, AdaComp),
        *(TopK, CLTk, HardThreshold, DGC, SIDCo, RandomK),
        *(EFSign, OneBit, QSGD, PowerSGD),
    )
}
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def compressor_named(name: str, /, **parameters: Any) -> Compressor:
    """A compressor from its name; unknown names, unknown parameters and values of the wrong kind are errors."""
    if name not in COMPRESSORS:
        raise ConfigError(f"there is no gradient compressor {name!r}; there are {', '.join(COMPRESSORS)}.")
    declared = {field.name: str(field.type) for field in fields(COMPRESSORS[name])}
    for key, value in parameters.items():
        if key not in declared:
            raise ConfigError(f"the compressor {name} has no parameter {key!r}; it has {', '.join(declared)}.")
        kind, _, optional = declared[key].partition(" | ")
        fits = isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
        if not fits and not (optional and value is None):
            raise ConfigError(f"{key} of the compressor {name} must be {declared[key]}, not {value!r}.")
    return COMPRESSORS[name](**parameters)
