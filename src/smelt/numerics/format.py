"""The contract of a number format: values become codes, and what a group of values shares becomes a grid.

Everything works along the last axis. A row is cut into groups of `group` values (`WHOLE_ROW`: one group; `TENSOR`: all
rows share one), a shorter last group is filled with zeros. Edges are the same for all formats: an infinity saturates
and does not count for the scale, a NaN makes its whole group NaN and no other, a group of zeros decodes to zeros.
Values are taken as float32: what is too large for that is an infinity.
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
    """What a group shares: [..., groups, 1] each, in float32, already rounded as it will be stored."""

    scale: Tensor
    zero: Tensor | None = None  # the code of zero
    negative: Tensor | None = None  # the scale of negative values, where it is another one
    tensor: Tensor | None = None  # one number for all groups, by which their scales are divided

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class Format(ABC):
    """How values are written in few bits. Subclasses are frozen dataclasses: two equal ones are the same format."""

    group_size: int = PER_ROW
    scale_dtype: ScaleDtype = "float32"

    scale_dtypes: ClassVar[tuple[ScaleDtype, ...]] = FLOAT_SCALES

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of a code."""

    @abstractmethod
    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        """The grid of groups [..., groups, size]; `shrink` narrows its range; `whole` is the tensor's own maximum."""

    @abstractmethod
    def quantize_groups(self, x: Tensor, qparams: QuantParams) -> Tensor:
        """The codes, uint8, of groups [..., groups, size]."""

    @abstractmethod
    def quantize_groups_stochastic(
        self, x: Tensor, qparams: QuantParams, generator: torch.Generator | None = None
    ) -> Tensor:
        """As `encode`, but up or down at random, the nearer the likelier: the mean of what is read back is x."""

    @abstractmethod
    def dequantize_groups(self, codes: Tensor, qparams: QuantParams) -> Tensor:
        """The values of codes, in float32."""

    def split_groups(self, x: Tensor) -> Tensor:  # [..., columns] -> [..., groups, size]
        """Cut rows into groups."""
        size = self.effective_group_size(x.shape[-1])
        return F.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))

    def effective_group_size(self, columns: int) -> int:
        """Values that share a scale within a row."""
        return max(columns, 1) if self.group_size in (PER_ROW, PER_TENSOR) else min(self.group_size, max(columns, 1))

    def tensor_amax(self, x: Tensor) -> Tensor | None:
        """What the grid of every group must know of the tensor, if anything."""
        return None

    def quantize(self, x: Tensor, *, generator: torch.Generator | None = None) -> QuantizedTensor:
        """Write a tensor [..., columns] in this format: to nearest, or at random where a generator is given."""
        grouped = self.split_groups(x)
        grid = self.compute_qparams(grouped, tensor_amax=self.tensor_amax(x))
        if generator is None:
            codes = self.quantize_groups(grouped, grid)
        else:
            codes = self.quantize_groups_stochastic(grouped, grid, generator)
        return QuantizedTensor(self, codes.flatten(-2)[..., : x.shape[-1]], grid)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """What is read back of a tensor written in this format: the same shape and dtype."""
        limit = min(torch.finfo(kind).max for kind in (x.dtype, torch.float32))  # may be rounded up past it
        return self.quantize(x).dequantize().clamp(-limit, limit).to(x.dtype)

    def bits_per_value(self, columns: int, rows: int = 1) -> float:
        """Of all that is stored, for a tensor of that many rows and columns."""
        groups = 1 if self.group_size == PER_TENSOR else rows * math.ceil(columns / self.effective_group_size(columns))
        codes = 8 * rows * packed_columns(columns, self.bits)
        return (codes + self.qparams_bits * groups + self.tensor_bits) / (rows * columns)

    @property
    def qparams_bits(self) -> int:
        """Of what a group shares."""
        return STORED_BITS[self.scale_dtype]

    @property
    def tensor_bits(self) -> int:
        """Of what all groups share."""
        return 0

    def store_qparams(self, qparams: QuantParams) -> dict[str, Tensor]:
        """The grid as it lies on disk and in memory."""
        return {name: self._store(name, tensor) for name, tensor in qparams.tensors().items()}

    def load_qparams(self, stored: dict[str, Tensor]) -> QuantParams:
        """The inverse of `store`."""
        return QuantParams(**{name: self._read(name, tensor) for name, tensor in stored.items()})

    def _store(self, name: str, tensor: Tensor) -> Tensor:
        if name == "tensor":
            return tensor
        return tensor.to(torch.uint8) if name == "zero" else store_scale(tensor, self.scale_dtype)

    def _read(self, name: str, stored: Tensor) -> Tensor:
        return stored.float() if name in ("tensor", "zero") else load_scale(stored, self.scale_dtype)

    @property
    def has_scale_only(self) -> bool:
        """Whether a group shares a scale and nothing else, so that it can be fixed beforehand."""
        return set(self.compute_qparams(torch.zeros(1, 1, 1)).tensors()) == {"scale"}

    def with_group_size(self, group_size: int) -> Format:
        return replace(self, group_size=group_size)

    def check(self) -> None:
        if self.group_size < PER_ROW:
            raise FormatError(f"a group has at least one value, not {self.group_size}; -1 means a whole row.")
        if self.scale_dtype not in self.scale_dtypes:
            raise FormatError(
                f"this format has its scales in {', '.join(self.scale_dtypes)}, not in {self.scale_dtype}."
            )

    def __post_init__(self) -> None:
        self.check()


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor written in a format."""

    format: Format
    codes: Tensor  # uint8 [..., columns]
    qparams: QuantParams

    def dequantize(self) -> Tensor:
        """What is read back, in float32."""
        columns, size = self.codes.shape[-1], self.format.effective_group_size(self.codes.shape[-1])
        grouped = F.pad(self.codes, (0, -columns % size)).unflatten(-1, (-1, size))
        return self.format.dequantize_groups(grouped, self.qparams).flatten(-2)[..., :columns]

    def pack(self) -> dict[str, Tensor]:
        """Codes and grid as they lie on disk and in memory."""
        return {"codes": pack(self.codes, self.format.bits), **self.format.store_qparams(self.qparams)}

    @classmethod
    def from_packed(cls, number_format: Format, stored: dict[str, Tensor], columns: int) -> QuantizedTensor:
        """The inverse of `packed`."""
        codes = unpack(stored["codes"], number_format.bits, columns)
        return cls(number_format, codes, number_format.load_qparams({k: v for k, v in stored.items() if k != "codes"}))


def packed_shapes(number_format: Format, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor that a packed matrix consists of, known before there is one."""
    example = number_format.quantize(torch.zeros(1, columns, device="cpu")).pack()
    shapes = {}
    for name, tensor in example.items():
        whole = number_format.group_size == PER_TENSOR or name == "tensor"
        shape = tuple(tensor.shape) if whole and name != "codes" else (rows, *tensor.shape[1:])
        shapes[name] = (shape, tensor.dtype)
    assert shapes["codes"][0] == (rows, packed_columns(columns, number_format.bits))
    return shapes


def drop_infinities(x: Tensor) -> Tensor:
    """Infinities count for nothing when a range is taken; NaN stays, and makes the range NaN."""
    return x.masked_fill(x.isinf(), 0.0)


def group_amax(x: Tensor, number_format: Format) -> Tensor:
    """The largest magnitude of each group, or of all of them where the tensor shares one scale."""
    sizes = drop_infinities(x).abs().amax(-1, keepdim=True)
    return global_amax(sizes) if number_format.group_size == PER_TENSOR else sizes


def global_amax(sizes: Tensor) -> Tensor:
    """One number, none below zero, as a group of its own: zero where there are no sizes at all."""
    return F.pad(sizes.flatten(), (0, 1)).amax().reshape([1] * sizes.dim())
