"""Structured pruning, one file per method; importing the package registers them."""

from smelt.compression.pruning import (
    fisher,
    flap,
    magnitude,
    minitron,
    minitron_depth,
    random,
    shortgpt,
    slicegpt,
    taylor,
    wanda_sp,
)

__all__ = [
    "fisher",
    "flap",
    "magnitude",
    "minitron",
    "minitron_depth",
    "random",
    "shortgpt",
    "slicegpt",
    "taylor",
    "wanda_sp",
]
