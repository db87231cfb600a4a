"""What a quantizer of quantization-aware training is: a formula for weights, or one for activations.

A quantizer is a frozen dataclass of checked parameters. What it learns, it gets as tensors by name: the module that
applies it (`fake_quantize.py`) owns them. Its fake-quantized values are those of a format of `smelt.numerics`, bit for
bit, so that a trained layer can be packed without another rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.compression.base import within
from smelt.errors import DataError, FormatError, RecipeError
from smelt.numerics.catalog import get_format
from smelt.numerics.format import Format, QuantizedTensor, QuantParams
from smelt.numerics.gradient import straight_through
from smelt.registry import Registered, Registry

Learned = dict[str, Tensor]  # by name: what a quantizer of one layer learns


class WeightQuantizer(Registered, ABC):
    """Quantizes the weight of a layer, a matrix [out, in] in float32."""

    paper: ClassVar[str]
    summary: ClassVar[str]

    @classmethod
    def registry(cls) -> Registry[WeightQuantizer]:
        return WEIGHT_QUANTIZERS

    @property
    @abstractmethod
    def format(self) -> Format:
        """The format of the packed weight."""

    def init(self, weight: Tensor) -> Learned:
        """Return the initial values of what is learned."""
        return {}

    def transform(self, weight: Tensor) -> Tensor:
        """Return what is quantized instead of the weight."""
        return weight

    @abstractmethod
    def qparams(self, groups: Tensor, learned: Learned) -> QuantParams:
        """Return the quantization parameters of groups [out, groups, size]; they may depend on what is learned."""

    def encode(self, groups: Tensor, qparams: QuantParams) -> Tensor:
        """Return the codes of groups in uint8."""
        return self.format.quantize_groups(groups, qparams)

    def pass_gradient(self, groups: Tensor, values: Tensor, qparams: QuantParams) -> Tensor:
        """Return the quantized values with a gradient: by default that of the weight, clipped or not."""
        return straight_through(groups, values)

    def fake_quantize(self, weight: Tensor, learned: Learned) -> Tensor:
        """Quantize and dequantize, differentiably."""
        groups = self.format.split_groups(self.transform(weight))
        qparams = self.qparams(groups, learned)
        with torch.no_grad():
            values = self.format.dequantize_groups(self.encode(groups, qparams), qparams)
        return self._join(self.pass_gradient(groups, values, qparams), weight)

    def quantize(self, weight: Tensor, learned: Learned) -> QuantizedTensor:
        """Return the packed form of what `fake_quantize` returns."""
        with torch.no_grad():
            groups = self.format.split_groups(self.transform(weight))
            qparams = self.qparams(groups, learned)
            codes = self.encode(groups, qparams).flatten(-2)[..., : weight.shape[-1]]
        return QuantizedTensor(self.format, codes, qparams)

    @staticmethod
    def _join(groups: Tensor, weight: Tensor) -> Tensor:
        return groups.flatten(-2)[..., : weight.shape[-1]].to(weight.dtype)


@dataclass(frozen=True)
class NamedFormatQuantizer(WeightQuantizer):
    """Quantizes weights to a format of `smelt formats`."""

    weight_format: str

    def __post_init__(self) -> None:
        try:
            get_format(self.weight_format)
        except FormatError as error:
            raise RecipeError(f"{self.name}: {error}") from error

    @property
    def format(self) -> Format:
        return get_format(self.weight_format)


class ActivationQuantizer(Registered, ABC):
    """Quantizes the inputs of a layer on a uniform grid that does not depend on them: a scale, perhaps a zero point."""

    paper: ClassVar[str]
    summary: ClassVar[str]
    trainable: ClassVar[bool] = True  # whether what `init` returns is learned
    bits: int
    signed: bool  # false: for inputs that are the output of a ReLU

    @classmethod
    def registry(cls) -> Registry[ActivationQuantizer]:
        return ACTIVATION_QUANTIZERS

    def format(self, bits: int) -> Format:
        """Return the format of packed layers' inputs, with so many bits."""
        return get_format(f"{'int' if self.signed else 'uint'}{bits}/tensor")

    def levels(self, bits: int) -> tuple[int, int]:
        """Return the smallest and the largest level in steps; integers have one more level below zero than above."""
        return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if self.signed else (0, 2**bits - 1)

    @abstractmethod
    def init(self, x: Tensor) -> Learned:
        """Return the initial values of what is learned, from the inputs of the first batch."""

    @abstractmethod
    def fake_quantize(self, x: Tensor, bits: int, learned: Learned) -> Tensor:
        """Quantize and dequantize, differentiably; `bits` may differ from the quantizer's own."""

    @abstractmethod
    def scale(self, bits: int, learned: Learned) -> Tensor:
        """Return the step of the grid, []."""

    def zero_point(self, bits: int, learned: Learned) -> Tensor | None:
        """Return the code of zero, [], if the format has a zero point."""
        return None

    def penalty(self, learned: Learned) -> Tensor | float:
        """Return a term of the loss that keeps what is learned small."""
        return 0.0

    def check_input(self, x: Tensor, path: str) -> None:
        """Raise if the quantizer does not suit the inputs of a layer."""
        if not self.signed and bool((x < 0).any()):
            raise DataError(
                f"the inputs of {path} have negative values, which unsigned {self.name} sets to zero; use pact2, "
                "or pact, lsq or minmax with `signed: true`."
            )


WEIGHT_QUANTIZERS: Registry[WeightQuantizer] = Registry("weight quantizer", key="quantizer", error=RecipeError)
ACTIVATION_QUANTIZERS: Registry[ActivationQuantizer] = Registry(
    "activation quantizer", key="quantizer", error=RecipeError
)


def round_through(x: Tensor) -> Tensor:
    """Round to the nearest integer, ties to even, with the gradient of the unrounded value."""
    return straight_through(x, x.round())


def check_bits(name: str, bits: int, low: int = 2, high: int = 8) -> None:
    within(name, "bits", bits, low, high)
