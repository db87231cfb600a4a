"""Quantization, one file per method; importing the package registers them."""

from smelt.compression.quantization import (
    aqas,
    awq,
    flexround,
    gptq,
    hqq,
    integer_only,
    kv_cache,
    mixed,
    omniquant,
    quarot,
    rilq,
    rotate,
    rtn,
    slice,
    smoothquant,
    spinquant,
)

__all__ = [
    "aqas",
    "awq",
    "flexround",
    "gptq",
    "hqq",
    "integer_only",
    "kv_cache",
    "mixed",
    "omniquant",
    "quarot",
    "rilq",
    "rotate",
    "rtn",
    "slice",
    "smoothquant",
    "spinquant",
]
