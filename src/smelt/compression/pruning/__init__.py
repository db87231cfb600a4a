"""Structured pruning: one file a method. Importing this room puts its methods on the list."""

from smelt.compression.pruning import fisher, flap, magnitude, random, taylor, wanda_sp

__all__ = ["fisher", "flap", "magnitude", "random", "taylor", "wanda_sp"]
