"""The default tables of NN-LUT, trained by `python benchmarks/nn_lut.py --tables` on uniform inputs."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

import torch

from smelt.errors import ConfigError
from smelt.numerics.piecewise_linear import PiecewiseLinear

TABLES = "nn_lut_tables.json"
SIZES = (8, 16, 32)  # entries of the tables


def default_table(function: str, entries: int = 16) -> PiecewiseLinear:
    """Return the float64 table of gelu, silu, tanh, exp (at most 0), reciprocal (1..2) or rsqrt (1..4)."""
    sizes = _tables().get(function)
    if sizes is None:
        raise ConfigError(f"there is no table of {function!r}; there are {', '.join(_tables())}.")
    if str(entries) not in sizes:
        raise ConfigError(f"there is no table of {function} with {entries} entries; there are {', '.join(sizes)}.")
    parts = sizes[str(entries)]
    return PiecewiseLinear(*(torch.tensor(parts[name], dtype=torch.float64) for name in PiecewiseLinear.__match_args__))


@cache
def _tables() -> dict[str, dict[str, dict[str, list[float]]]]:
    tables: dict[str, dict[str, dict[str, list[float]]]] = json.loads(
        files("smelt.numerics").joinpath(TABLES).read_text(encoding="utf-8")
    )
    return tables
