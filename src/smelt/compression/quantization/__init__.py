"""Quantisation: one file a method, all in one frame. Importing this room puts them on the list."""

from smelt.compression.quantization import (
    aqas,
    awq,
    flexround,
    gptq,
    hqq,
    kv_cache,
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
    "kv_cache",
    "mixed",
    "omniquant",
    "quarot",
    "rilq",
    "rotate",
    "rtn",
    "smoothquant",
    "spinquant",
]
