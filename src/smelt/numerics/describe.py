"""Describe number formats in plain values: bits, grid, scales, and the error on a sample."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from smelt.numerics.catalog import get_format
from smelt.numerics.error import signal_to_noise
from smelt.numerics.format import PER_ROW, PER_TENSOR, Format
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.scaled import Scaled, SignedScales


def describe_format(name: str, x: Tensor) -> dict[str, Any]:
    """Describe a format with its error on a sample [rows, columns], and its bits for a square matrix as wide."""
    number_format, columns = get_format(name), x.shape[-1]
    return {
        "name": name,
        "bits": number_format.bits,
        "bits_per_value": number_format.bits_per_value(columns, columns),
        "grid": grid_words(number_format),
        "scale": f"2 {number_format.scale_dtype}"
        if isinstance(number_format, SignedScales)
        else number_format.scale_dtype,
        "group": {PER_ROW: "row", PER_TENSOR: "tensor"}.get(number_format.group_size, number_format.group_size),
        "signal_to_noise": signal_to_noise(x, number_format.fake_quantize(x)),
    }


def grid_words(number_format: Format) -> str:
    """Describe the grid values that are multiplied by the scale."""
    if isinstance(number_format, Integer):
        return _integer_words(number_format)
    assert isinstance(number_format, Scaled)
    elements = number_format.elements
    if elements.name == "e2m1":
        return "±0 .5 1 1.5 2 3 4 6"
    if re.fullmatch(r"e\dm\d", elements.name):
        return f"{elements.name.upper()}, to ±{elements.max_value:g}"
    if elements.name.startswith("nf"):
        return f"{len(elements.values)} normal quantiles"
    if elements.name.startswith("uint"):
        return f"0 .. {elements.max_value:g}"
    if elements.name.startswith("int"):
        parts = 2 ** (elements.bits - 2)
        return f"-{2 * parts - 1}/{parts} .. {2 * parts - 1}/{parts}"
    return "-1, 0, 1"


def _integer_words(number_format: Integer) -> str:
    if isinstance(number_format, DenormalInteger):
        half = number_format.num_steps // 2
        return f"-{half} .. {half}, ±½" if number_format.symmetric else f"0 .. {number_format.num_steps} - zero, ±½"
    if number_format.symmetric:
        half = number_format.qmax // 2
        return f"-{half + 1} .. {half}"
    return f"0 .. {number_format.qmax} - zero"
