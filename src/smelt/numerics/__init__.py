"""Number formats as pure functions: what a code stands for, what a group shares, and how both lie in memory."""

from smelt.numerics.catalogue import FORMATS, format_named, name_of
from smelt.numerics.format import Format, Grid, Quantized

__all__ = ["FORMATS", "Format", "Grid", "Quantized", "format_named", "name_of"]
