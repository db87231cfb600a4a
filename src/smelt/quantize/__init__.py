"""Quantisation: one file a method, all in one frame. Importing this room puts them on the list."""

from smelt.quantize import gptq, hqq, rtn

__all__ = ["gptq", "hqq", "rtn"]
