"""Nested integers: one set of 8-bit codes whose leading bits are trained to be good weights, too."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from smelt.compression.distillation.quantizers.base import WEIGHT_QUANTIZERS
from smelt.compression.distillation.quantizers.minmax import MinMax
from smelt.errors import FormatError, RecipeError
from smelt.numerics.format import QuantParams
from smelt.numerics.nested import check_nested, slice_codes


@WEIGHT_QUANTIZERS.register("nested", paper="Nair et al., 2025 (MatQuant, arXiv 2502.06786)")
@dataclass(frozen=True)
class Nested(MinMax):
    """Symmetric integers; with `slice_bits`, only the leading bits of their codes count while it trains."""

    weight_format: str = "int8/64@float16"
    slice_bits: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            check_nested(self.format, self.slice_bits or self.format.bits)
        except FormatError as error:
            raise RecipeError(f"{self.name}: {error}") from error

    def encode(self, groups: Tensor, qparams: QuantParams) -> Tensor:
        """Return codes of all bits; those that are not part of the slice are zero."""
        codes = super().encode(groups, qparams)
        if self.slice_bits is None:
            return codes
        return slice_codes(codes, self.format.bits, self.slice_bits) << (self.format.bits - self.slice_bits)
