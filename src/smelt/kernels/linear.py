"""Linear layers with packed weights: the interface of a kernel, the plain reference and the selection of a kernel.

A kernel reads the packed matrix as stored (codes row by row, low bits first; see `numerics.packing`), so that a model
takes as little memory as on disk. Whatever else it needs is computed once, in `prepare`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels import dispatch
from smelt.numerics.format import Format, QuantizedTensor, QuantParams


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
    """How input activations are quantized: a format, and a static scale if calibrated."""

    format: Format
    scale: Tensor | None = None
    clip_ratio: float = 1.0  # fraction of each group's range that is represented, with dynamic scales

    def fake_quantize(self, x: Tensor) -> Tensor:
        if self.scale is None and self.clip_ratio == 1.0:
            return self.format.fake_quantize(x)
        grouped = self.format.split_groups(x)
        qparams = QuantParams(self.scale.float()) if self.scale is not None else self._clipped_qparams(grouped, x)
        codes = self.format.quantize_groups(grouped, qparams)
        return self.format.dequantize_groups(codes, qparams).flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    def _clipped_qparams(self, grouped: Tensor, x: Tensor) -> QuantParams:
        return self.format.compute_qparams(grouped, clip_ratio=self.clip_ratio, tensor_amax=self.format.tensor_amax(x))


class LinearKernel(ABC):
    """One way to compute `x W^T + b` with a packed W."""

    name: ClassVar[str]
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


REFERENCE = ReferenceLinear()
BACKENDS = ("cpu-integer", "cpu-float", "triton-weight-only", "triton-eight-bit")
_kernels: dict[str, LinearKernel] = {}  # in order of preference
_unloaded = ["smelt.kernels.cpu", "smelt.kernels.gpu"]  # each has `register_kernels`, called at the first selection


def register(kernel: LinearKernel) -> LinearKernel:
    _kernels[kernel.name] = kernel
    return kernel


def select_kernel(packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> LinearKernel:
    """Return the first kernel that supports the product, or the forced one."""
    while _unloaded:
        import_module(_unloaded.pop(0)).register_kernels()
    backends = [(name, partial(kernel.supports, packed, inputs, dtype)) for name, kernel in _kernels.items()]
    if (forced := dispatch.forced_backend()) in BACKENDS and forced not in _kernels:
        raise LookupError(f"The backend {forced!r} is not available on this machine; use another one.")
    name = dispatch.select_backend(f"product with {packed.format} on {packed.device} in {dtype}", backends)
    return REFERENCE if name == dispatch.REFERENCE else _kernels[name]
