"""Kernels of integer-only networks: what they compute, and the interface that CPU and GPU implement.

The reference is `smelt.runtime.integer.ops`; integers leave no tolerance, so that every kernel returns its bits. Values
between two steps are int32, which the conversion of a network has proved to be enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.conv import ConvShape

INT_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)  # of inputs and outputs


@dataclass(frozen=True, eq=False)
class Requantize:
    """Multiply by `multiplier / 2**shift`, round half up and clamp; int32 tensors [1 or channels]."""

    multiplier: Tensor
    shift: Tensor
    minimum: int
    maximum: int


@dataclass(frozen=True)
class Gelu:
    """i-GELU."""

    q_b: int
    q_c: int
    q_one: int
    shift: int


@dataclass(frozen=True, eq=False)
class TableLookup:
    """`slopes[k] * x + intercepts[k]`, k the number of breakpoints [n] that are <= x; slopes and intercepts [n + 1]."""

    breakpoints: Tensor
    slopes: Tensor
    intercepts: Tensor


@dataclass(frozen=True)
class Tanh:
    """Integer tanh, with the constants of i-exp for twice the scale of its input."""

    levels: int
    q_ln2: int
    q_b: int
    q_c: int
    max_halvings: int
    lift: int
    drop: int


@dataclass(frozen=True, eq=False)
class Add:
    """Add the next operand of the call, requantized first if a requantization is given."""

    requantize: Requantize | None = None


Step = Requantize | Gelu | TableLookup | Tanh | Add


@dataclass(eq=False)
class Steps:
    """Elementwise steps, applied to the int32 result of a kernel while it is in registers or cache."""

    steps: tuple[Step, ...] = ()
    prepared: dict[Any, Any] = field(default_factory=dict)  # by a backend, once


@dataclass(frozen=True)
class SoftmaxConstants:
    """Constants of i-softmax."""

    levels: int
    reciprocal_bits: int
    q_ln2: int
    q_b: int
    q_c: int
    max_halvings: int
    lift: int
    drop: int


@dataclass(frozen=True, eq=False)
class NormConstants:
    """Constants of i-LayerNorm; of i-RMSNorm without a bias. int32 tensors [length]."""

    weight: Tensor
    bias: Tensor | None
    epsilon: int
    shift: int
    reciprocal_bits: int
    output_bits: int


@dataclass(eq=False)
class PackedWeight:
    """An int8 weight [channels, columns] as a backend stores it."""

    data: Tensor
    offset: Tensor | None  # int32, added to the sums of a channel
    channels: int
    columns: int
    is_unsigned: bool = False  # the activations that it multiplies are uint8


NO_STEPS = Steps()


class IntegerKernels(ABC):
    """Kernels of a device. `operands` are the tensors of `Add` steps, in order: [..., channels], rows repeat."""

    name: str
    has_convolutions = False  # and products of uint8
    has_tanh = False

    @abstractmethod
    def pack(self, weight: Tensor, is_unsigned: bool = False) -> PackedWeight:
        """Pack an int8 weight [channels, columns] for activations of int8, or of uint8."""

    def join(self, weights: Sequence[PackedWeight]) -> PackedWeight | None:
        """Return the weights of layers with the same input as one, their channels in order; None to keep them."""
        return None

    @abstractmethod
    def linear(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, steps: Steps, dtype: torch.dtype,
        operands: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """Multiply x [..., columns] by a weight, add an int32 bias [channels] and apply steps."""

    def pack_convolution(self, weight: Tensor, shape: ConvShape, is_unsigned: bool) -> PackedWeight:
        """Pack the int8 weight of a convolution for activations of int8, or of uint8."""
        raise NotImplementedError

    def convolve(
        self, x: Tensor, weight: PackedWeight, shape: ConvShape, bias: Tensor | None, steps: Steps, dtype: torch.dtype,
        operands: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """Convolve x [batch, channels, (height,) width], add an int32 bias [channels], apply steps along the channels.

        Operands have the shape of the result, whose memory has the channels last.
        """
        raise NotImplementedError

    @abstractmethod
    def matmul(self, a: Tensor, b: Tensor, transpose_b: bool, steps: Steps, dtype: torch.dtype) -> Tensor:
        """Multiply int8 a [outer, inner, m, k] and b [outer, inner, k, n], or [..., n, k] if it is transposed.

        Any strides if the last is 1. Steps requantize with a single multiplier.
        """

    @abstractmethod
    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, score_steps: Steps,
        softmax: SoftmaxConstants, steps: Steps, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Return softmax(query key^T) value of int8 [batch, heads, tokens, head_dim]; probabilities are int8.

        mask: broadcast to the scores; zero where a position is masked. The result is contiguous as
        [batch, tokens, heads, head_dim], so that joining the heads copies nothing.
        """

    @abstractmethod
    def softmax(
        self, x: Tensor, mask: Tensor | None, steps: Steps, softmax: SoftmaxConstants, dtype: torch.dtype
    ) -> Tensor:
        """Apply steps, then i-softmax over the last axis. mask: broadcast to x; zero where a position is masked."""

    @abstractmethod
    def norm(
        self, x: Tensor, steps: Steps, norm: NormConstants, outputs: Sequence[tuple[Steps, torch.dtype]],
        operands: Sequence[Tensor] = (),
    ) -> list[Tensor]:  # fmt: skip
        """Apply steps (with operands), normalize over the last axis, and return one or two requantized results."""

    @abstractmethod
    def map(self, x: Tensor, steps: Steps, dtype: torch.dtype, operands: Sequence[Tensor] = ()) -> Tensor:
        """Apply steps to x [..., channels]."""


def round_up(count: int) -> int:
    """Round up to a multiple of 16, the lanes of a register."""
    return -(-count // 16) * 16


def mask_rows(mask: Tensor | None, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Return a mask as bytes [mask rows, length padded to 16] and the number of rows of x [shape] that share one."""
    length, rows = shape[-1], prod(shape[:-1])
    if mask is None:
        visible = torch.ones(1, length, dtype=torch.bool, device=device)
    else:
        mask = mask.reshape((1,) * (len(shape) - mask.dim()) + tuple(mask.shape))
        axis = len(shape) - 1
        while axis and mask.shape[axis - 1] == 1:
            axis -= 1  # all rows of the axes from this one on share a mask
        visible = (mask != 0).expand(*shape[:axis], *mask.shape[axis:-1], length).reshape(-1, length)
    padded = F.pad(visible.to(torch.uint8), (0, round_up(length) - length))
    return padded, max(rows // max(len(padded), 1), 1)
