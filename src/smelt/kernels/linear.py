"""Products with a packed matrix: the contract of a kernel, the plain reference, and the one place that chooses.

A kernel reads the packed matrix as it is stored (codes row by row, low bits first; see `numerics.packing`), so that a
model in memory is as small as on disk. What it must derive it makes once, in `prepare`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.numerics.format import Format, QuantizedTensor, QuantParams


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [rows, columns] as it lies in memory: `codes` and the tensors of its grid."""

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
    """How the other operand is rounded before the product: a format, and its scale where that was fixed beforehand."""

    format: Format
    scale: Tensor | None = None
    clip_ratio: float = (
        1.0  # the part of each group's range that the grid covers, where the scale is taken from the input
    )

    def fake_quantize(self, x: Tensor) -> Tensor:
        if self.scale is None and self.clip_ratio == 1.0:
            return self.format.fake_quantize(x)
        grouped = self.format.split_groups(x)
        grid = QuantParams(self.scale.float()) if self.scale is not None else self._clipped(grouped, x)
        codes = self.format.quantize_groups(grouped, grid)
        return self.format.dequantize_groups(codes, grid).flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    def _clipped(self, grouped: Tensor, x: Tensor) -> QuantParams:
        return self.format.compute_qparams(grouped, clip_ratio=self.clip_ratio, tensor_amax=self.format.tensor_amax(x))


class LinearKernel(ABC):
    """One way to compute `x W^T + b` with a packed W."""

    name: ClassVar[str]

    @abstractmethod
    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        """Whether this kernel can run such a product here (format, device, type of x)."""

    def prepare(self, packed: PackedMatrix, inputs: ActivationQuant | None) -> Any:
        """What the kernel needs besides the packed tensors, made once."""
        return None

    @abstractmethod
    def run(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Any
    ) -> Tensor:
        """x [..., columns] -> [..., rows], in the dtype of x."""


class ReferenceLinear(LinearKernel):
    """Decode the matrix, round the inputs, multiply. Every other kernel is compared with this one."""

    name = "reference"

    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        return True

    def run(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Any
    ) -> Tensor:
        weight = packed.unpack().dequantize().to(x.dtype)
        return F.linear(x if inputs is None else inputs.fake_quantize(x), weight, bias)


KERNELS: list[LinearKernel] = []  # in the order of preference; the reference is always last
REFERENCE = ReferenceLinear()
_ROOMS = ["smelt.kernels.cpu", "smelt.kernels.gpu"]  # each has `register_kernels`, called once at the first choice
_forced: list[str] = []


def register(kernel: LinearKernel) -> LinearKernel:
    KERNELS.append(kernel)
    return kernel


def select_kernel(packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> LinearKernel:
    """The first kernel that takes the product, or the one that `using` asks for."""
    while _ROOMS:
        import_module(_ROOMS.pop(0)).register_kernels()
    for kernel in (*KERNELS, REFERENCE):
        if (not _forced or kernel.name == _forced[-1]) and kernel.supports(packed, inputs, dtype):
            return kernel
    raise LookupError(f"no kernel named {_forced[-1]!r} takes {packed.format} on {packed.device} in {dtype}.")


def forced_backend() -> str | None:
    """The kernel that `using` asks for, if any."""
    return _forced[-1] if _forced else None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside, every choice is the kernel of that name."""
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()
