"""Number formats as pure functions: what a code stands for, what a group shares, and how both lie in memory."""

from smelt.numerics.catalog import FORMATS, format_name, get_format
from smelt.numerics.format import Format, QuantizedTensor, QuantParams

__all__ = ["FORMATS", "Format", "QuantParams", "QuantizedTensor", "format_name", "get_format"]
