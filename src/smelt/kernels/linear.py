"""Linear layers with packed weights: the interface of a kernel, the plain reference and the selection of a kernel.

A kernel reads the packed matrix as stored (codes row by row, low bits first; see `numerics.packing`), so that a model
takes as little memory as on disk. Whatever else it needs is computed once, in `prepare`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels import dispatch
from smelt.numerics.format import PER_TENSOR, Format, QuantizedTensor, QuantParams
from smelt.numerics.integer import Integer
from smelt.numerics.scaled import Unsigned


@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix [rows, columns] as stored: `codes` and the tensors of its quantization parameters."""

    format: Format
    rows: int
    columns: int
    tensors: dict[str, Tensor]

    def unpack(self) -> QuantizedTensor:
        return QuantizedTensor.from_packed(self.format, self.tensors, self.columns)

    @property
    def device(self) -> torch.device:
        return self.tensors["codes"].device


@dataclass(frozen=True)
class ActivationQuant:
    """How input activations are quantized: a format, and a static scale and zero point if calibrated."""

    format: Format
    scale: Tensor | None = None
    clip_ratio: float = 1.0  # fraction of each group's range that is represented, with dynamic scales
    zero: Tensor | None = None  # the code of zero, beside a static scale

    def fake_quantize(self, x: Tensor) -> Tensor:
        if self.scale is None and self.clip_ratio == 1.0:
            return self.format.fake_quantize(x)
        grouped = self.format.split_groups(x)
        qparams = self._static_qparams() if self.scale is not None else self._clipped_qparams(grouped, x)
        codes = self.format.quantize_groups(grouped, qparams)
        return self.format.dequantize_groups(codes, qparams).flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    def without_zero_point(self) -> ActivationQuant | None:
        """Return the symmetric quantization whose products `shift` prepares; None without a static zero point."""
        if self.zero is None or type(self.format) is not Integer:
            return None
        return ActivationQuant(replace(self.format, symmetric=True), self.scale)

    def as_signed(self) -> ActivationQuant | None:
        """Return symmetric integers of a bit more, which have the levels of unsigned ones and as many below zero.

        None for other formats, for 8 bits and for dynamic scales.
        """
        unsigned = type(self.format) is Unsigned and self.format.group_size == PER_TENSOR and self.format.bits < 8
        if not unsigned or self.scale is None:
            return None
        return ActivationQuant(Integer(PER_TENSOR, "float32", self.format.bits + 1), self.scale)

    def shift(self, x: Tensor) -> Tensor:
        """Return the values of the codes of x as if zero were the middle code: `fake_quantize` less `offset`."""
        qparams = self._static_qparams()
        codes = self.format.quantize_groups(self.format.split_groups(x), qparams)
        values = (codes.float() - (1 << (self.format.bits - 1))) * qparams.scale
        return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    @property
    def offset(self) -> Tensor:
        """The value of the middle code, [1, 1, 1]."""
        qparams = self._static_qparams()
        assert qparams.zero is not None
        return ((1 << (self.format.bits - 1)) - qparams.zero) * qparams.scale

    def _static_qparams(self) -> QuantParams:
        assert self.scale is not None
        return QuantParams(self.scale.float(), None if self.zero is None else self.zero.float())

    def _clipped_qparams(self, grouped: Tensor, x: Tensor) -> QuantParams:
        return self.format.compute_qparams(grouped, clip_ratio=self.clip_ratio, tensor_amax=self.format.tensor_amax(x))


class LinearKernel(ABC):
    """One way to compute `x W^T + b` with a packed W."""

    name: str
    quantizes_inputs: ClassVar[bool] = False  # multiplies the codes of weights and inputs, not their values

    @abstractmethod
    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        """Return whether this kernel supports the formats, the device and the dtype of x."""

    def prepare(self, packed: PackedMatrix, inputs: ActivationQuant | None) -> Any:
        """Compute once what the kernel needs besides the packed tensors."""
        return None

    def dequantizes(self, packed: PackedMatrix) -> bool:
        """Return whether every product dequantizes the matrix first: doing it once is faster, if memory allows."""
        return False

    def dequantize(self, packed: PackedMatrix, prepared: Any, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix [rows, columns]."""
        return packed.unpack().dequantize().to(dtype)

    @abstractmethod
    def run(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Any
    ) -> Tensor:
        """Compute x [..., columns] -> [..., rows], in the dtype of x."""


class ReferenceLinear(LinearKernel):
    """Dequantize the matrix, fake-quantize the inputs, multiply. All other kernels are compared with this one."""

    name = dispatch.REFERENCE

    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        return True

    def dequantizes(self, packed: PackedMatrix) -> bool:
        return True

    def run(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Any
    ) -> Tensor:
        weight = packed.unpack().dequantize().to(x.dtype)
        return F.linear(x if inputs is None else inputs.fake_quantize(x), weight, bias)


class ZeroPointLinear(LinearKernel):
    """Multiply inputs that have a static zero point by a kernel for symmetric integers.

    With zero point z and middle code c, x = (q - z) s = (q - c) s + (c - z) s. The kernel multiplies the first term;
    the second is the same for all inputs, so that its product with the matrix is added to the bias.
    """

    quantizes_inputs = True

    def __init__(self, kernel: LinearKernel) -> None:
        self.kernel, self.name = kernel, kernel.name

    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        shifted = None if inputs is None else inputs.without_zero_point()
        return shifted is not None and self.kernel.supports(packed, shifted, dtype)

    def prepare(self, packed: PackedMatrix, inputs: ActivationQuant | None) -> tuple[Any, ActivationQuant, Tensor]:
        """Return what the kernel needs, its inputs, and what is added to the bias."""
        shifted = None if inputs is None else inputs.without_zero_point()
        assert inputs is not None and shifted is not None
        return self.kernel.prepare(packed, shifted), shifted, offset_products(packed, inputs)

    def dequantize(self, packed: PackedMatrix, prepared: Any, dtype: torch.dtype) -> Tensor:
        return self.kernel.dequantize(packed, prepared[0], dtype)

    def run(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Any
    ) -> Tensor:
        assert inputs is not None
        of_kernel, shifted, products = prepared
        return self.kernel.run(
            inputs.shift(x), packed, shifted, products if bias is None else products + bias, of_kernel
        )


def offset_products(packed: PackedMatrix, inputs: ActivationQuant) -> Tensor:
    """Return the products of a matrix with the offset of inputs that have a static zero point: [rows] in float32."""
    return packed.unpack().dequantize().sum(-1) * inputs.offset.reshape(())


REFERENCE = ReferenceLinear()
BACKENDS = ("cpu-integer", "cpu-float", "triton-weight-only", "triton-eight-bit")
_kernels: dict[str, LinearKernel] = {}  # in order of preference
_unloaded = ["smelt.kernels.cpu", "smelt.kernels.gpu"]  # each has `register_kernels`, called at the first selection


def register(kernel: LinearKernel) -> LinearKernel:
    _kernels[kernel.name] = kernel
    return kernel


def select_kernel(packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> LinearKernel:
    """Return the first kernel that supports the product, or the forced one.

    Inputs with a static zero point are multiplied by an integer kernel for inputs without one.
    """
    shifted = None if inputs is None else inputs.without_zero_point()
    if shifted is not None and (kernel := select_kernel(packed, shifted, dtype)).quantizes_inputs:
        return ZeroPointLinear(kernel)
    while _unloaded:
        import_module(_unloaded.pop(0)).register_kernels()
    backends = [(name, partial(kernel.supports, packed, inputs, dtype)) for name, kernel in _kernels.items()]
    if (forced := dispatch.forced_backend()) in BACKENDS and forced not in _kernels:
        raise LookupError(f"The backend {forced!r} is not available on this machine; use another one.")
    name = dispatch.select_backend(f"product with {packed.format} on {packed.device} in {dtype}", backends)
    return REFERENCE if name == dispatch.REFERENCE else _kernels[name]
