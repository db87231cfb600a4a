"""The registry of methods with every method in it: importing their packages registers them."""

from smelt.compression import distillation, pruning, quantization, token_pruning
from smelt.compression.base import METHODS

__all__ = ["METHODS", "distillation", "pruning", "quantization", "token_pruning"]
