"""The interface of a number format: values are quantized to codes, with quantization parameters per group.

Everything works along the last axis. A row is split into groups of `group_size` values (`PER_ROW`: one group;
`PER_TENSOR`: all rows share one), a shorter last group is zero-padded. Edge cases are the same for all formats: an
infinity saturates and does not count for the scale, a NaN makes its group NaN and no other, a group of zeros
dequantizes to zeros. Values are converted to float32 first: what overflows is an infinity.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.errors import FormatError
from smelt.numerics.packing import pack, packed_columns, unpack
from smelt.numerics.scales import FLOAT_SCALES, STORED_BITS, ScaleDtype, load_scale, store_scale

PER_ROW, PER_TENSOR = -1, 0


@dataclass(frozen=True)
class QuantParams:
    """Quantization parameters of groups: [..., groups, 1] each, in float32, already rounded to their stored dtype."""

    scale: Tensor
    zero: Tensor | None = None  # zero point: the code of zero
    negative: Tensor | None = None  # scale of negative values, if different
    tensor: Tensor | None = None  # per-tensor factor that divides the scales of all groups

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class Format(ABC):
    """A number format. Subclasses are frozen dataclasses: equal instances are the same format."""

    group_size: int = PER_ROW
    scale_dtype: ScaleDtype = "float32"

    scale_dtypes: ClassVar[tuple[ScaleDtype, ...]] = FLOAT_SCALES

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per code."""

    @abstractmethod
    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        """Compute the parameters of groups [..., groups, size]; `clip_ratio` narrows their range."""

    @abstractmethod
    def quantize_groups(self, x: Tensor, qparams: QuantParams) -> Tensor:
        """Quantize groups [..., groups, size] to codes in uint8."""

    @abstractmethod
    def quantize_groups_stochastic(
        self, x: Tensor, qparams: QuantParams, generator: torch.Generator | None = None
    ) -> Tensor:
        """Quantize with stochastic rounding: the mean of the dequantized values is x."""

    @abstractmethod
    def dequantize_groups(self, codes: Tensor, qparams: QuantParams) -> Tensor:
        """Dequantize codes, in float32."""

    def split_groups(self, x: Tensor) -> Tensor:  # [..., columns] -> [..., groups, size]
        """Split rows into groups."""
        size = self.effective_group_size(x.shape[-1])
        padding = -x.shape[-1] % size
        padded = F.pad(x.float(), (0, padding)) if padding else x.float()
        return padded.unflatten(-1, (-1, size))

    def effective_group_size(self, columns: int) -> int:
        """Return the number of values of a row that share a scale."""
        return max(columns, 1) if self.group_size in (PER_ROW, PER_TENSOR) else min(self.group_size, max(columns, 1))

    def tensor_amax(self, x: Tensor) -> Tensor | None:
        """Return the largest magnitude of the tensor, if the parameters of groups depend on it."""
        return None

    def quantize(self, x: Tensor, *, generator: torch.Generator | None = None) -> QuantizedTensor:
        """Quantize a tensor [..., columns]: to nearest, or stochastically if a generator is given."""
        grouped = self.split_groups(x)
        qparams = self.compute_qparams(grouped, tensor_amax=self.tensor_amax(x))
        if generator is None:
            codes = self.quantize_groups(grouped, qparams)
        else:
            codes = self.quantize_groups_stochastic(grouped, qparams, generator)
        return QuantizedTensor(self, codes.flatten(-2)[..., : x.shape[-1]], qparams)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Quantize and dequantize, keeping shape and dtype."""
        limit = min(torch.finfo(dtype).max for dtype in (x.dtype, torch.float32))  # dequantized values may exceed it
        return self.quantize(x).dequantize().clamp(-limit, limit).to(x.dtype)

    def bits_per_value(self, columns: int, rows: int = 1) -> float:
        """Return bits per value with quantization parameters included, for a tensor [rows, columns]."""
        groups = 1 if self.group_size == PER_TENSOR else rows * math.ceil(columns / self.effective_group_size(columns))
        codes = 8 * rows * packed_columns(columns, self.bits)
        return (codes + self.qparams_bits * groups + self.tensor_bits) / (rows * columns)

    @property
    def qparams_bits(self) -> int:
        """Bits of the parameters of one group."""
        return STORED_BITS[self.scale_dtype]

    @property
    def tensor_bits(self) -> int:
        """Bits of the parameters of the tensor."""
        return 0

    def store_qparams(self, qparams: QuantParams) -> dict[str, Tensor]:
        """Convert parameters to their stored dtypes."""
        return {name: self._store(name, tensor) for name, tensor in qparams.tensors().items()}

    def load_qparams(self, stored: dict[str, Tensor]) -> QuantParams:
        """Invert `store_qparams`."""
        return QuantParams(**{name: self._load(name, tensor) for name, tensor in stored.items()})

    def _store(self, name: str, tensor: Tensor) -> Tensor:
        if name == "tensor":
            return tensor
        return tensor.to(torch.uint8) if name == "zero" else store_scale(tensor, self.scale_dtype)

    def _load(self, name: str, stored: Tensor) -> Tensor:
        return stored.float() if name in ("tensor", "zero") else load_scale(stored, self.scale_dtype)

    @property
    def has_scale_only(self) -> bool:
        """Whether a scale is the only parameter, so that it can be static."""
        return set(self.compute_qparams(torch.zeros(1, 1, 1)).tensors()) == {"scale"}

    @property
    def has_integer_zero_point(self) -> bool:
        """Whether the parameters are a scale and a zero point that is a code."""
        return False

    def with_group_size(self, group_size: int) -> Format:
        return replace(self, group_size=group_size)

    def check(self) -> None:
        if self.group_size < PER_ROW:
            raise FormatError(f"a group has at least one value, not {self.group_size}; -1 means one group per row.")
        if self.scale_dtype not in self.scale_dtypes:
            raise FormatError(
                f"this format stores scales in {', '.join(self.scale_dtypes)}, not in {self.scale_dtype}."
            )

    def __post_init__(self) -> None:
        self.check()


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor: codes and quantization parameters."""

    format: Format
    codes: Tensor  # uint8 [..., columns]
    qparams: QuantParams

    def dequantize(self) -> Tensor:
        """Return the values in float32."""
        columns, size = self.codes.shape[-1], self.format.effective_group_size(self.codes.shape[-1])
        grouped = F.pad(self.codes, (0, -columns % size)).unflatten(-1, (-1, size))
        return self.format.dequantize_groups(grouped, self.qparams).flatten(-2)[..., :columns]

    def pack(self) -> dict[str, Tensor]:
        """Return packed codes and stored parameters, as saved on disk."""
        return {"codes": pack(self.codes, self.format.bits), **self.format.store_qparams(self.qparams)}

    @classmethod
    def from_packed(cls, number_format: Format, stored: dict[str, Tensor], columns: int) -> QuantizedTensor:
        """Invert `pack`."""
        codes = unpack(stored["codes"], number_format.bits, columns)
        return cls(number_format, codes, number_format.load_qparams({k: v for k, v in stored.items() if k != "codes"}))


def packed_shapes(number_format: Format, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor of a packed matrix."""
    example = number_format.quantize(torch.zeros(1, columns, device="cpu")).pack()
    shapes = {}
    for name, tensor in example.items():
        shared = number_format.group_size == PER_TENSOR or name == "tensor"
        shape = tuple(tensor.shape) if shared and name != "codes" else (rows, *tensor.shape[1:])
        shapes[name] = (shape, tensor.dtype)
    assert shapes["codes"][0] == (rows, packed_columns(columns, number_format.bits))
    return shapes


def drop_infinities(x: Tensor) -> Tensor:
    """Replace infinities by 0, so that they do not count for a range; NaN stays."""
    return x.masked_fill(x.isinf(), 0.0)


def group_amax(x: Tensor, number_format: Format) -> Tensor:
    """Return the largest magnitude of each group, or of all of them for per-tensor scales."""
    magnitudes = drop_infinities(x).abs().amax(-1, keepdim=True)
    return global_amax(magnitudes) if number_format.group_size == PER_TENSOR else magnitudes


def global_amax(magnitudes: Tensor) -> Tensor:
    """Return the largest of non-negative magnitudes as one group; zero if there are none."""
    return F.pad(magnitudes.flatten(), (0, 1)).amax().reshape([1] * magnitudes.dim())
