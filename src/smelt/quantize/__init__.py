"""Quantisation: one file a method, all in one frame. Importing this room puts them on the list."""

from smelt.quantize import (
    aqas,
    awq,
    flexround,
    gptq,
    hqq,
    mixed,
    omniquant,
    quarot,
    rilq,
    rotate,
    rtn,
    smoothquant,
    spinquant,
)

__all__ = [
    "aqas",
    "awq",
    "flexround",
    "gptq",
    "hqq",
    "mixed",
    "omniquant",
    "quarot",
    "rilq",
    "rotate",
    "rtn",
    "smoothquant",
    "spinquant",
]
