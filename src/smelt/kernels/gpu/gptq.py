"""The inner loop of GPTQ: the columns of a block rounded one after the other, rows side by side in registers.

Bit for bit what `smelt.compression.quantization.gptq` computes column by column (products and sums are rounded one by
one, so no multiplication is fused with an addition), in one launch a block instead of several a column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gptq_kernel(  # type: ignore[no-untyped-def]
    weight, factor, scale, zero, codes, errors, rows, columns, weight_stride, factor_stride, scale_stride, zero_stride,
    top, MIDDLE: tl.constexpr, FRACTION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    held = row < rows
    inside = held[:, None] & (column < columns)[None, :]
    values = tl.load(weight + row[:, None] * weight_stride + column[None, :], mask=inside, other=0.0)
    all_codes = tl.zeros([ROWS, COLUMNS], tl.float32)
    all_errors = tl.zeros([ROWS, COLUMNS], tl.float32)
    for here in range(columns):
        chosen = (column == here)[None, :]
        value = tl.sum(tl.where(chosen, values, 0.0), axis=1)  # [ROWS]
        step = tl.load(scale + row * scale_stride + here, mask=held, other=1.0)
        middle = tl.full([ROWS], MIDDLE, tl.float32)
        if zero is not None:
            middle = tl.load(zero + row * zero_stride + here, mask=held, other=0.0)
        steps = tl.div_rn(value, step)
        if FRACTION:
            steps += middle
        steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, -1048576.0), 1048576.0), 0.0)
        code = (steps + 12582912.0) - 12582912.0  # to the nearest, ties to even
        if not FRACTION:
            code += middle
        code = tl.minimum(tl.maximum(code, 0.0), top)
        diagonal = tl.load(factor + here * factor_stride + here)
        error = tl.div_rn(value - (code - middle) * step, tl.zeros([ROWS], tl.float32) + diagonal)
        after = (column > here) & (column < columns)
        line = tl.load(factor + here * factor_stride + column, mask=after, other=0.0)
        values = tl.where(after[None, :], values - error[:, None] * line[None, :], values)
        all_codes = tl.where(chosen, code[:, None], all_codes)
        all_errors = tl.where(chosen, error[:, None], all_errors)
    place = row[:, None] * columns + column[None, :]
    tl.store(codes + place, all_codes.to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(errors + place, all_errors, mask=inside)


def gptq_block(
    weight: Tensor, factor: Tensor, scale: Tensor, zero: Tensor | None, qmax: int, *, default_zero: float = 0.0,
    fractional_zero: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Round the columns of `weight` [rows, columns] in order, at most 256 of them; the block itself is left as it was.
    The tensors may be any views.

    `factor` [columns, columns] is the block on the diagonal of the upper factor; `scale` and `zero` [rows, columns] are
    those of each value's group, all float32 (`zero` None: `middle` everywhere; `fraction`: zeros are no whole numbers,
    and are added before rounding). Gives the codes (uint8) and the errors over the diagonal (float32), [rows, columns]:
    the columns after the block lose `errors @ factor_right_of_the_block`.
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
            scale.stride(0), 0 if zero is None else zero.stride(0), float(qmax), MIDDLE=default_zero,
            FRACTION=fractional_zero, ROWS=tile, COLUMNS=max(triton.next_power_of_2(columns), 16), num_warps=2,
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes, errors
