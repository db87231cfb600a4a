"""The registry of methods with every method in it: importing their packages registers them."""

from smelt.compression import channel_search, distillation, pruning, quantization, token_pruning
from smelt.compression.base import METHODS

__all__ = ["METHODS", "channel_search", "distillation", "pruning", "quantization", "token_pruning"]
