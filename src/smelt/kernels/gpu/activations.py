"""Rows of activations rounded to int8 or E4M3 with one scale each, as `numerics` does it, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def stored_float(value, KIND: tl.constexpr):
    """A scale as it would be read back from its stored type."""
    if KIND == "float16":
        stored = tl.maximum(tl.minimum(value, 65504.0).to(tl.float16).to(tl.float32), 5.9604644775390625e-08)
    elif KIND == "bfloat16":
        stored = tl.maximum(tl.minimum(value, 3.38e38).to(tl.bfloat16).to(tl.float32), 1.1754943508222875e-38)
    else:
        stored = tl.maximum(tl.minimum(value, 3.4e38), 1.1754943508222875e-38)
    return stored


@triton.jit
def magnitude(value):
    """Infinities count for nothing."""
    size = tl.abs(value)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def rounded(value, scale, DTYPE: tl.constexpr):
    steps = tl.div_rn(value, tl.zeros(value.shape, tl.float32) + scale)
    steps = tl.where(steps == steps, steps, 0.0)
    if DTYPE == tl.int8:  # noqa: SIM300
        steps = tl.minimum(tl.maximum(steps, -128.0), 127.0)
        steps = (steps + 12582912.0) - 12582912.0  # to the nearest, ties to even
    else:
        steps = tl.minimum(tl.maximum(steps, -448.0), 448.0)
    return steps.to(DTYPE)


@triton.jit
def round_rows_kernel(
    x, fixed, codes, scales, columns, x_stride, clip, SPAN: tl.constexpr, KIND: tl.constexpr, COLUMNS: tl.constexpr,
    ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program. SPAN is what the largest magnitude times `clip` becomes; `fixed` is the scale where it is not
    taken from the row. An infinity does not count for the scale, and a NaN makes its row NaN. ONCE: a tile of COLUMNS
    holds the whole row, so that it is read only once."""
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, COLUMNS)
    start_x, start_codes = x + row * x_stride + within, codes + row * columns + within
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(start_x, mask=within < columns, other=0.0).to(tl.float32)
    largest = magnitude(value)
    broken = (value != value).to(tl.int32)
    if not ONCE:
        for start in range(COLUMNS, columns, COLUMNS):
            more = tl.load(start_x + start, mask=start + within < columns, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, magnitude(more))
            broken |= (more != more).to(tl.int32)
    if fixed is not None:
        scale = tl.load(fixed).to(tl.float32)
    else:
        top = tl.max(largest, axis=0)
        scale = tl.where(top == 0.0, 1.0, stored_float(tl.div_rn(top * clip, tl.full([], SPAN, tl.float32)), KIND))
    bad = tl.max(broken, axis=0) > 0
    tl.store(scales + row, tl.where(bad, float("nan"), scale))
    tl.store(start_codes, rounded(value, scale, codes.dtype.element_ty), mask=within < columns)
    if not ONCE:
        for start in range(COLUMNS, columns, COLUMNS):
            held = start + within < columns
            more = tl.load(start_x + start, mask=held, other=0.0).to(tl.float32)
            tl.store(start_codes + start, rounded(more, scale, codes.dtype.element_ty), mask=held)
