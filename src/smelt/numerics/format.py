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
from smelt.numerics.scales import ROUNDED, STORED_BITS, ScaleType, read_scale, store_scale

WHOLE_ROW, TENSOR = -1, 0


@dataclass(frozen=True)
class Grid:
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

    group: int = WHOLE_ROW
    scale: ScaleType = "float32"

    scale_types: ClassVar[tuple[ScaleType, ...]] = ROUNDED

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of a code."""

    @abstractmethod
    def fit(self, x: Tensor, *, shrink: Tensor | float = 1.0, whole: Tensor | None = None) -> Grid:
        """The grid of groups [..., groups, size]; `shrink` narrows its range; `whole` is the tensor's own maximum."""

    @abstractmethod
    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        """The codes, uint8, of groups [..., groups, size]."""

    @abstractmethod
    def encode_stochastic(self, x: Tensor, grid: Grid, generator: torch.Generator | None = None) -> Tensor:
        """As `encode`, but up or down at random, the nearer the likelier: the mean of what is read back is x."""

    @abstractmethod
    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """The values of codes, in float32."""

    def groups(self, x: Tensor) -> Tensor:  # [..., columns] -> [..., groups, size]
        """Cut rows into groups."""
        size = self.size(x.shape[-1])
        return F.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))

    def size(self, columns: int) -> int:
        """Values that share a scale within a row."""
        return max(columns, 1) if self.group in (WHOLE_ROW, TENSOR) else min(self.group, max(columns, 1))

    def whole(self, x: Tensor) -> Tensor | None:
        """What the grid of every group must know of the tensor, if anything."""
        return None

    def quantize(self, x: Tensor, *, stochastic: torch.Generator | None = None) -> Quantized:
        """Write a tensor [..., columns] in this format: to nearest, or at random where a generator is given."""
        grouped = self.groups(x)
        grid = self.fit(grouped, whole=self.whole(x))
        if stochastic is None:
            codes = self.encode(grouped, grid)
        else:
            codes = self.encode_stochastic(grouped, grid, stochastic)
        return Quantized(self, codes.flatten(-2)[..., : x.shape[-1]], grid)

    def rounded(self, x: Tensor) -> Tensor:
        """What is read back of a tensor written in this format: the same shape and dtype."""
        limit = min(torch.finfo(kind).max for kind in (x.dtype, torch.float32))  # may be rounded up past it
        return self.quantize(x).values().clamp(-limit, limit).to(x.dtype)

    def bits_per_value(self, columns: int, rows: int = 1) -> float:
        """Of all that is stored, for a tensor of that many rows and columns."""
        groups = 1 if self.group == TENSOR else rows * math.ceil(columns / self.size(columns))
        codes = 8 * rows * packed_columns(columns, self.bits)
        return (codes + self.grid_bits * groups + self.tensor_bits) / (rows * columns)

    @property
    def grid_bits(self) -> int:
        """Of what a group shares."""
        return STORED_BITS[self.scale]

    @property
    def tensor_bits(self) -> int:
        """Of what all groups share."""
        return 0

    def store(self, grid: Grid) -> dict[str, Tensor]:
        """The grid as it lies on disk and in memory."""
        return {name: self._store(name, tensor) for name, tensor in grid.tensors().items()}

    def read(self, stored: dict[str, Tensor]) -> Grid:
        """The inverse of `store`."""
        return Grid(**{name: self._read(name, tensor) for name, tensor in stored.items()})

    def _store(self, name: str, tensor: Tensor) -> Tensor:
        if name == "tensor":
            return tensor
        return tensor.to(torch.uint8) if name == "zero" else store_scale(tensor, self.scale)

    def _read(self, name: str, stored: Tensor) -> Tensor:
        return stored.float() if name in ("tensor", "zero") else read_scale(stored, self.scale)

    @property
    def has_one_number(self) -> bool:
        """Whether a group shares a scale and nothing else, so that it can be fixed beforehand."""
        return set(self.fit(torch.zeros(1, 1, 1)).tensors()) == {"scale"}

    def with_group(self, group: int) -> Format:
        return replace(self, group=group)

    def check(self) -> None:
        if self.group < WHOLE_ROW:
            raise FormatError(f"a group has at least one value, not {self.group}; -1 means a whole row.")
        if self.scale not in self.scale_types:
            raise FormatError(f"this format has its scales in {', '.join(self.scale_types)}, not in {self.scale}.")

    def __post_init__(self) -> None:
        self.check()


@dataclass(frozen=True)
class Quantized:
    """A tensor written in a format."""

    format: Format
    codes: Tensor  # uint8 [..., columns]
    grid: Grid

    def values(self) -> Tensor:
        """What is read back, in float32."""
        columns, size = self.codes.shape[-1], self.format.size(self.codes.shape[-1])
        grouped = F.pad(self.codes, (0, -columns % size)).unflatten(-1, (-1, size))
        return self.format.decode(grouped, self.grid).flatten(-2)[..., :columns]

    def packed(self) -> dict[str, Tensor]:
        """Codes and grid as they lie on disk and in memory."""
        return {"codes": pack(self.codes, self.format.bits), **self.format.store(self.grid)}

    @classmethod
    def unpacked(cls, number_format: Format, stored: dict[str, Tensor], columns: int) -> Quantized:
        """The inverse of `packed`."""
        codes = unpack(stored["codes"], number_format.bits, columns)
        return cls(number_format, codes, number_format.read({k: v for k, v in stored.items() if k != "codes"}))


def packed_shapes(number_format: Format, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor that a packed matrix consists of, known before there is one."""
    example = number_format.quantize(torch.zeros(1, columns, device="cpu")).packed()
    shapes = {}
    for name, tensor in example.items():
        whole = number_format.group == TENSOR or name == "tensor"
        shape = tuple(tensor.shape) if whole and name != "codes" else (rows, *tensor.shape[1:])
        shapes[name] = (shape, tensor.dtype)
    assert shapes["codes"][0] == (rows, packed_columns(columns, number_format.bits))
    return shapes


def finite(x: Tensor) -> Tensor:
    """Infinities count for nothing when a range is taken; NaN stays, and makes the range NaN."""
    return x.masked_fill(x.isinf(), 0.0)


def magnitude(x: Tensor, number_format: Format) -> Tensor:
    """The largest magnitude of each group, or of all of them where the tensor shares one scale."""
    sizes = finite(x).abs().amax(-1, keepdim=True)
    return largest_of_all(sizes) if number_format.group == TENSOR else sizes


def largest_of_all(sizes: Tensor) -> Tensor:
    """One number, none below zero, as a group of its own: zero where there are no sizes at all."""
    return F.pad(sizes.flatten(), (0, 1)).amax().reshape([1] * sizes.dim())
