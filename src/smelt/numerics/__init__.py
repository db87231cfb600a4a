"""Number formats as pure functions: codes, quantization parameters per group, and packing."""

from smelt.numerics.catalog import FORMATS, format_name, get_format
from smelt.numerics.format import Format, QuantizedTensor, QuantParams

__all__ = ["FORMATS", "Format", "QuantParams", "QuantizedTensor", "format_name", "get_format"]
