"""The list of methods with all of them on it: importing their rooms puts them there."""

from smelt.compression import pruning as prune
from smelt.compression import quantization as quantize
from smelt.compression.base import METHODS, make

__all__ = ["METHODS", "make", "prune", "quantize"]
