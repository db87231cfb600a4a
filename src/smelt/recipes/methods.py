"""The list of methods with all of them on it: importing their rooms puts them there."""

from smelt import prune, quantize
from smelt.method import METHODS, make

__all__ = ["METHODS", "make", "prune", "quantize"]
