"""Grouped GEMMs in Triton: each row of x is multiplied with the matrix of its expert.

Rows are sorted by expert and a list on the device has tiles of them (`experts.py`), so only the matrices of experts
that have rows are read. The kernels work on any GPU; `hopper_grouped.py` has those for Hopper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu import launch
from smelt.kernels.gpu.activations import QuantizedRows, RowQuant
from smelt.kernels.gpu.arch import PDL, PTX
from smelt.kernels.gpu.experts import Routing
from smelt.kernels.gpu.gemm import gemm_kernel, load_expert_tile
from smelt.kernels.gpu.linear import HALF, EightBit, WeightOnly, amax_code
from smelt.kernels.gpu.matrix import Matrix, describe
from smelt.kernels.linear import ActivationQuant, PackedMatrix
from smelt.numerics.integer import Integer

TILE_SIZES = (16, 32, 64, 128)  # rows of x per tile


class GroupedLinear(Protocol):
    """A product with stacked matrices of experts."""

    @property
    def rows(self) -> int:
        """Return the rows of each matrix."""

    @property
    def tile_sizes(self) -> tuple[int, ...]:
        """Return the possible numbers of rows of x in a tile."""

    @property
    def quant(self) -> RowQuant | None:
        """How x must be quantized; None: not. A static scale is per expert, with one more for padding."""

    def __call__(self, x: Tensor | QuantizedRows, routing: Routing, *, shared: bool = False) -> Tensor:
        """Multiply x [pairs, columns], sorted by expert -> [pairs, rows]. `shared`: all pairs have the one row of x."""

    def kernel_sources(self, num_tokens: int, top_k: int, tile_size: int, dtype: torch.dtype) -> set[str]:
        """Return the sources of CUDA kernels for a number of tokens."""


def choose_tile_size(num_tokens: int, top_k: int, num_experts: int, sizes: Sequence[int]) -> int:
    """Return the tile size that holds the rows of most experts if tokens are spread at random: an expert with two tiles
    is read twice. The number of tokens counts as the next power of two, since every size is another kernel."""
    mean = top_k * (1 << (num_tokens - 1).bit_length()) / num_experts
    return next((size for size in sizes if size >= mean + 2 * math.sqrt(mean)), sizes[-1])


@triton.jit
def grouped_dense_kernel(  # type: ignore[no-untyped-def]
    x, matrices, y, expert_tiles, num_tiles, rows, columns, x_stride, SHARED_X: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one output tile: BLOCK_N rows of an expert's matrix times the rows of x in a tile."""
    row, lane, column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, count = load_expert_tile(expert_tiles, num_tiles)
    row_mask, lane_mask = (row < rows) & (count > 0), lane < count
    x_row = lane if SHARED_X else first + lane
    row_start = matrices + expert * rows * columns + row.to(tl.int64)[:, None] * columns + column[None, :]
    x_start = x + x_row.to(tl.int64)[:, None] * x_stride + column[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, tl.where(count > 0, columns, 0), BLOCK_K):
        inside = (start + column < columns)[None, :]
        tile = tl.load(row_start + start, mask=row_mask[:, None] & inside, other=0.0)
        x_tile = tl.load(x_start + start, mask=lane_mask[:, None] & inside, other=0.0)
        acc = tl.dot(tile, tl.trans(x_tile), acc, input_precision="ieee")
    target = y + (first + lane).to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(target, tl.trans(acc).to(y.dtype.element_ty), mask=lane_mask[:, None] & row_mask[None, :])


@dataclass(frozen=True)
class GroupedDense:
    """Matrices in the dtype of x."""

    matrices: Tensor  # [experts, rows, columns]
    quant: None = None
    tile_sizes: tuple[int, ...] = TILE_SIZES

    @property
    def rows(self) -> int:
        return self.matrices.shape[1]

    def __call__(self, x: Tensor | QuantizedRows, routing: Routing, *, shared: bool = False) -> Tensor:
        assert isinstance(x, Tensor)
        _, rows, columns = self.matrices.shape
        y = torch.empty(routing.num_pairs, rows, dtype=x.dtype, device=x.device)
        block_n, block_k, warps, stages = dense_config(routing.tile_size)
        grouped_dense_kernel[(triton.cdiv(rows, block_n), routing.max_tiles)](
            x, self.matrices, y, routing.tiles, routing.num_tiles, rows, columns, x.stride(0), SHARED_X=shared,
            BLOCK_N=block_n, BLOCK_M=routing.tile_size, BLOCK_K=block_k, PDL=PDL, num_warps=warps, num_stages=stages,
            launch_pdl=PDL,
        )  # fmt: skip
        return y

    def kernel_sources(self, num_tokens: int, top_k: int, tile_size: int, dtype: torch.dtype) -> set[str]:
        return set()


def dense_config(tile_size: int) -> tuple[int, int, int, int]:
    """Return rows, columns, warps and stages."""
    if tile_size <= 32:
        return 64, 128, 4, 4
    return (128, 64, 4, 4) if tile_size == 64 else (128, 64, 8, 4)


@dataclass(frozen=True)
class GroupedPacked:
    """Packed matrices, one below the other, dequantized in registers; x in half precision, int8 or E4M3."""

    stacked: Matrix
    num_experts: int
    inputs: ActivationQuant | None
    tile_sizes: tuple[int, ...] = TILE_SIZES

    @classmethod
    def stack(
        cls, experts: Sequence[Sequence[PackedMatrix]], inputs: ActivationQuant | None, dtype: torch.dtype
    ) -> GroupedPacked | None:
        """Stack the matrices of experts, each in one or more parts of the same format; None if the kernel does not
        support them."""
        if not supports(experts[0][0], inputs, dtype):
            return None
        parts = [_by_rows(describe(packed)) for expert in experts for packed in expert]
        tensors: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("codes", "scale", "zero", "negative", "tensor")
            if getattr(parts[0], name) is not None
        }
        return cls(replace(parts[0], **tensors), len(experts), inputs)

    @property
    def rows(self) -> int:
        return self.stacked.rows // self.num_experts

    @cached_property
    def quant(self) -> RowQuant | None:
        return None if self.inputs is None else row_quant(self.inputs)

    def __call__(self, x: Tensor | QuantizedRows, routing: Routing, *, shared: bool = False) -> Tensor:
        codes, x_scale, dtype = (x, None, x.dtype) if isinstance(x, Tensor) else (x.codes, x.scales, x.dtype)
        codes = codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
        matrix, size = self.stacked, routing.tile_size
        block_k = launch.gemm_block_k(matrix, 32 if codes.dtype == torch.int8 else 16)
        assert block_k is not None
        block_n, _, warps, stages = launch.gemm_config(size, matrix, codes.dtype == torch.int8)
        y = torch.empty(routing.num_pairs, self.rows, dtype=dtype, device=codes.device)
        gemm_kernel[(triton.cdiv(self.rows, block_n), routing.max_tiles)](
            codes, matrix.codes, matrix.scale, matrix.zero, matrix.negative, matrix.tensor, x_scale, None, y,
            routing.tiles, routing.num_tiles, routing.num_pairs, self.rows, matrix.columns, codes.stride(0),
            matrix.octets, matrix.scale_stride, triton.cdiv(matrix.columns, block_k), BITS=matrix.bits,
            ELEMENT=matrix.element, SCALE_DTYPE=matrix.scale_dtype, DEFAULT_ZERO=matrix.default_zero,
            GROUP_SIZE=matrix.group_size, BLOCK_N=block_n, BLOCK_M=size, BLOCK_K=block_k, SPLIT_K=False,
            SHARED_X=shared, PTX=PTX, PDL=PDL, num_warps=warps, num_stages=stages, launch_pdl=PDL,
        )  # fmt: skip
        return y

    def kernel_sources(self, num_tokens: int, top_k: int, tile_size: int, dtype: torch.dtype) -> set[str]:
        return set()


def supports(packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
    """Return whether `GroupedPacked` supports a matrix and the quantization of its inputs."""
    matrix = describe(packed)
    if inputs is None:
        is_supported = WeightOnly().supports(packed, None, dtype) and matrix.element not in ("dint", "table")
        return is_supported and launch.gemm_block_k(matrix, 16) is not None
    one_scale = replace(inputs, scale=None if inputs.scale is None else inputs.scale.flatten()[:1])
    return dtype in HALF and EightBit().supports(packed, one_scale, torch.bfloat16)  # float16 is fine for E4M3 as well


def row_quant(inputs: ActivationQuant) -> RowQuant:
    dtype = torch.int8 if isinstance(inputs.format, Integer) else torch.float8_e4m3fn
    return RowQuant(dtype, amax_code(inputs), inputs.format.scale_dtype, inputs.scale, inputs.clip_ratio)


def _by_rows(matrix: Matrix) -> Matrix:
    """Give every row its scales, also that of the tensor, and name E4M3 elements, whose table the kernel does not
    need."""
    spread: dict[str, Any] = {}
    if matrix.scale.shape[0] != matrix.rows:
        for name in ("scale", "zero"):
            tensor = getattr(matrix, name)
            if tensor is not None:
                spread[name] = tensor.expand(matrix.rows, *tensor.shape[1:]).contiguous()
    tensor = None if matrix.tensor is None else matrix.tensor.float().reshape(1).expand(matrix.rows)
    if matrix.element == "table" and matrix.bits == 8:
        return replace(matrix, **spread, tensor=tensor, element="e4m3", table=None)
    return replace(matrix, **spread, tensor=tensor)
