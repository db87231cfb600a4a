"""The inner loop of GPTQ: quantize the columns of a block in order, with rows in parallel.

Bit-identical to the plain loop over columns in `smelt.compression.quantization.gptq_rounding` (no fused multiply-add),
in one launch per block instead of several per column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gptq_kernel(  # type: ignore[no-untyped-def]
    weight, factor, scale, zero, codes, errors, rows, columns, weight_stride, factor_stride, scale_stride, zero_stride,
    qmax, DEFAULT_ZERO: tl.constexpr, FRACTIONAL_ZERO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    row_mask = row < rows
    inside = row_mask[:, None] & (column < columns)[None, :]
    values = tl.load(weight + row[:, None] * weight_stride + column[None, :], mask=inside, other=0.0)
    all_codes = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    all_errors = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in range(columns):
        is_current = (column == index)[None, :]
        value = tl.sum(tl.where(is_current, values, 0.0), axis=1)  # [BLOCK_M]
        step = tl.load(scale + row * scale_stride + index, mask=row_mask, other=1.0)
        zero_point = tl.full([BLOCK_M], DEFAULT_ZERO, tl.float32)
        if zero is not None:
            zero_point = tl.load(zero + row * zero_stride + index, mask=row_mask, other=0.0)
        steps = tl.div_rn(value, step)
        if FRACTIONAL_ZERO:
            steps += zero_point
        steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, -1048576.0), 1048576.0), 0.0)
        code = (steps + 12582912.0) - 12582912.0  # round to nearest, ties to even
        if not FRACTIONAL_ZERO:
            code += zero_point
        code = tl.minimum(tl.maximum(code, 0.0), qmax)
        diagonal = tl.load(factor + index * factor_stride + index)
        error = tl.div_rn(value - (code - zero_point) * step, tl.zeros([BLOCK_M], tl.float32) + diagonal)
        after = (column > index) & (column < columns)
        factor_row = tl.load(factor + index * factor_stride + column, mask=after, other=0.0)
        values = tl.where(after[None, :], values - error[:, None] * factor_row[None, :], values)
        all_codes = tl.where(is_current, code[:, None], all_codes)
        all_errors = tl.where(is_current, error[:, None], all_errors)
    offset = row[:, None] * columns + column[None, :]
    tl.store(codes + offset, all_codes.to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(errors + offset, all_errors, mask=inside)


def gptq_block(
    weight: Tensor, factor: Tensor, scale: Tensor, zero: Tensor | None, qmax: int, *, default_zero: float = 0.0,
    fractional_zero: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize the columns of `weight` [rows, columns] in order, at most 256, without changing it. Any views work.

    `factor` [columns, columns] is the diagonal block of the upper Cholesky factor of the inverse Hessian; `scale` and
    `zero` [rows, columns] are per value, all float32 (`zero` None: `default_zero`; `fractional_zero`: zero points are
    fractional, and added before rounding). Returns codes (uint8) and errors divided by the diagonal (float32), [rows,
    columns]: `errors @ factor_right_of_the_block` is to be subtracted from the columns after the block.
    """
    rows, columns = weight.shape
    weight, factor, scale = weight.contiguous(), factor.contiguous(), scale.contiguous()
    zero = None if zero is None else zero.contiguous()
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    errors = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
    if codes.numel():
        tile = 8
        gptq_kernel[(triton.cdiv(rows, tile),)](
            weight, factor, scale, zero, codes, errors, rows, columns, weight.stride(0), factor.stride(0),
            scale.stride(0), 0 if zero is None else zero.stride(0), float(qmax), DEFAULT_ZERO=default_zero,
            FRACTIONAL_ZERO=fractional_zero, BLOCK_M=tile, BLOCK_N=max(triton.next_power_of_2(columns), 16),
            num_warps=2,             enable_fp_fusion=False,
        )  # fmt: skip
    return codes, errors
