"""The registry of methods with every method in it: importing their packages registers them."""

from smelt.compression import pruning, quantization
from smelt.compression.base import METHODS

__all__ = ["METHODS", "pruning", "quantization"]
