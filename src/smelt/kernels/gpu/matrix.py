"""A packed matrix as kernel arguments: tensors and the parameters of their layout."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from smelt.kernels.linear import PackedMatrix
from smelt.numerics.elements import E2M1, ElementType
from smelt.numerics.format import PER_TENSOR, Format
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.scaled import Scaled

_SCALE_DTYPES = {"e8m0": "e8m0", "e8m0-up": "e8m0", "e4m3": "e4m3", "e5m2": "e5m2"}  # others are float dtypes of Triton


@dataclass(frozen=True)
class Matrix:
    """A packed matrix. `group_size` 0: per-row scales; `default_zero`: the zero point if none is stored."""

    codes: Tensor  # uint8 [rows, octets]
    scale: Tensor  # one-byte dtypes viewed as uint8
    zero: Tensor | None
    negative: Tensor | None
    tensor: Tensor | None
    table: Tensor | None  # values of codes for element type `table`, float32 [2^bits]
    columns: int
    bits: int
    element: str  # int, dint, e2m1, table; e4m3 in stacked matrices
    scale_dtype: str  # float, e8m0, e4m3, e5m2
    group_size: int
    default_zero: int

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def octets(self) -> int:
        return self.codes.shape[1]

    @property
    def scale_stride(self) -> int:
        """Number of scales per row; 0 if all rows share one."""
        return self.scale.shape[1] if self.scale.shape[0] == self.rows and not self.shared else 0

    @property
    def shared(self) -> bool:
        return self.scale.numel() == 1

    def arguments(self) -> tuple[object, ...]:
        """Return the fields in order, as arguments of a custom operator."""
        return tuple(getattr(self, field.name) for field in fields(self))


def describe(packed: PackedMatrix) -> Matrix:
    """Convert a packed matrix of any format; each kernel checks whether it supports it."""
    number_format, tensors = packed.format, packed.tensors
    element, default_zero, table = _element(number_format, packed.device)
    one_group = tensors["scale"].shape[-2] == 1
    return Matrix(
        codes=tensors["codes"],
        scale=_bytes(tensors["scale"]),
        zero=tensors.get("zero"),
        negative=None if "negative" not in tensors else _bytes(tensors["negative"]),
        tensor=tensors.get("tensor"),
        table=table,
        columns=packed.columns,
        bits=number_format.bits,
        element=element,
        scale_dtype=_SCALE_DTYPES.get(number_format.scale_dtype, "float"),
        group_size=0 if one_group or number_format.group_size == PER_TENSOR else number_format.group_size,
        default_zero=default_zero,
    )


def _element(number_format: Format, device: torch.device) -> tuple[str, int, Tensor | None]:
    if isinstance(number_format, DenormalInteger):
        return "dint", number_format.num_steps // 2, None
    if isinstance(number_format, Integer):
        return "int", number_format.qmax // 2 + 1, None
    assert isinstance(number_format, Scaled)
    if number_format.elements == E2M1:
        return "e2m1", 0, None
    return "table", 0, _table(number_format.elements, device)


def _table(elements: ElementType, device: torch.device) -> Tensor:
    return torch.tensor(elements.values, device=device)


def _bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.element_size() == 1 else scale
