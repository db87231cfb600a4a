"""GEMM with a packed matrix on tensor cores, codes dequantized in registers.

The matrix is the left operand, so that its dequantized values never leave the registers. Bytes hold codes of
neighboring columns; instead of interleaving them, x is deinterleaved: the first codes of all bytes are multiplied with
columns 0, 2, 4, ..., the second ones with 1, 3, 5, .... x is in half precision, or int8 with per-row scales (then sums
are integers). With few output tiles and long rows, columns are split (split-K) and a second kernel adds the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.dequant import pick, stored_scale
from smelt.kernels.gpu.planes import float_plane, int8_plane


@triton.jit
def load_scales(pointer, place, held, left, KIND: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr):
    """Load the scales of the groups of a tile [rows, GROUPS], of which the first `left` exist."""
    group = tl.arange(0, GROUPS)
    raw = tl.load(pointer + place[:, None] + group[None, :], mask=held[:, None] & (group < left)[None, :], other=0)
    return stored_scale(raw, KIND).to(DTYPE)


@triton.jit
def for_each_byte(scales, BYTES: tl.constexpr):
    """Repeat per-group scales per byte: [rows, groups] -> [rows, BYTES]."""
    repeated = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], BYTES // scales.shape[1]])
    return tl.reshape(repeated, [scales.shape[0], BYTES])


@triton.jit
def gemm_kernel(
    x, codes, scale, zero, negative, tensor, x_scale, bias, y, batch, rows, columns, x_stride, octets, scale_stride,
    tiles, BITS: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BATCH: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one output tile. `octets`: bytes per row of codes; `tiles`: tiles of COLUMNS per program."""
    PLANES: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = COLUMNS // PLANES
    DTYPE: tl.constexpr = x.dtype.element_ty
    INTEGER: tl.constexpr = DTYPE == tl.int8  # noqa: SIM300
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    GROUPS: tl.constexpr = COLUMNS // GROUP if GROUP > 0 and GROUP < COLUMNS else 1  # per tile
    EXACT: tl.constexpr = ELEMENT == "e2m1" and SCALE != "float" and GROUP > 0  # elements times scales are exact
    GROUPED: tl.constexpr = GROUP > 0 and not EXACT
    ZERO_SUBTRACTED: tl.constexpr = zero is None or (INTEGER and BITS < 8)  # zero points are subtracted from the codes
    ZERO: tl.constexpr = MIDDLE if zero is None else 0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    vector = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    row_mask, vector_mask = row < rows, vector < batch
    row_octets = codes + row.to(tl.int64) * octets
    vector_start = x + vector.to(tl.int64) * x_stride
    byte = tl.arange(0, BYTES)
    sums = tl.zeros([ROWS, BATCH], tl.float32)
    acc = tl.zeros([ROWS, BATCH], SUM)  # over one group, or the full row
    x_sum = tl.zeros([BATCH], tl.float32)
    offset = tl.full([ROWS], MIDDLE, tl.int32)
    if INTEGER and ZERO_SUBTRACTED and zero is not None and GROUP == 0:
        offset = tl.load(zero + row * scale_stride, mask=row_mask, other=0).to(tl.int32)
    first = tl.program_id(2) * tiles
    group_index = row * scale_stride + (first * COLUMNS // GROUP if GROUP > 0 else 0)
    if GROUPED:
        raw = tl.load(scale + group_index, mask=row_mask, other=0)
    if EXACT:
        groups_left = tl.cdiv(columns, GROUP) - first * COLUMNS // GROUP
        scales = load_scales(scale, group_index, row_mask, groups_left, SCALE, DTYPE, GROUPS)
        if negative is not None:
            other_scales = load_scales(negative, group_index, row_mask, groups_left, SCALE, DTYPE, GROUPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for tile in range(first, tl.minimum(first + tiles, tl.cdiv(columns, COLUMNS))):
        group_index = row * scale_stride + (tile * COLUMNS // GROUP if GROUP > 0 else 0)
        byte_index = tile * BYTES + byte
        inside = row_mask[:, None] & (byte_index < octets)[None, :]
        octet = tl.load(row_octets[:, None] + byte_index[None, :], mask=inside, other=0)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside_x = vector_mask[:, None] & (column < columns)[None, :]
        x_tile = tl.load(vector_start[:, None] + column[None, :], mask=inside_x, other=0)
        if not ZERO_SUBTRACTED:
            if GROUPED:
                x_sum = tl.sum(x_tile.to(tl.float32), axis=1)
            else:
                x_sum += tl.sum(x_tile.to(tl.float32), axis=1)
        if INTEGER and ZERO_SUBTRACTED and zero is not None and GROUPED:
            offset = tl.load(zero + group_index, mask=row_mask, other=0).to(tl.int32)
        if EXACT:
            next_start = (tile + 1) * COLUMNS // GROUP
            groups_left = tl.cdiv(columns, GROUP) - next_start
            factor = for_each_byte(scales, BYTES)
            scales = load_scales(scale, row * scale_stride + next_start, row_mask, groups_left, SCALE, DTYPE, GROUPS)
            if negative is not None:
                negative_factor = for_each_byte(other_scales, BYTES)
                other_scales = load_scales(
                    negative, row * scale_stride + next_start, row_mask, groups_left, SCALE, DTYPE, GROUPS
                )
        if GROUPED:
            acc = tl.zeros([ROWS, BATCH], SUM)
            next_start = (tile + 1) * COLUMNS
            next_group_index = row * scale_stride + next_start // GROUP
            next_raw = tl.load(scale + next_group_index, mask=row_mask & (next_start < columns), other=0)
        for plane in tl.static_range(PLANES):
            if INTEGER:
                operand = int8_plane(octet, offset, plane, BITS, ELEMENT, PTX)
            else:
                operand = float_plane(octet, plane, BITS, ELEMENT, ZERO, DTYPE, PTX)
            if EXACT:
                if negative is not None:
                    operand = operand * tl.where(operand > 0, factor, negative_factor)
                else:
                    operand = operand * factor
            if PLANES > 1:
                x_plane = pick(tl.reshape(x_tile, [BATCH, BYTES, PLANES]), plane, PLANES)
            else:
                x_plane = x_tile
            acc = tl.dot(operand, tl.trans(x_plane), acc, out_dtype=SUM)
        if GROUPED:
            part = acc.to(tl.float32)
            if not ZERO_SUBTRACTED:
                middle = tl.load(zero + group_index, mask=row_mask, other=0).to(tl.float32)
                if INTEGER:
                    middle -= 128.0
                part -= middle[:, None] * x_sum[None, :]
            sums += stored_scale(raw, SCALE)[:, None] * part
            raw = next_raw
    if not GROUPED:
        sums = acc.to(tl.float32)
        if not ZERO_SUBTRACTED:
            middle = tl.load(zero + row * scale_stride, mask=row_mask, other=0).to(tl.float32)
            if INTEGER:
                middle -= 128.0
            sums -= middle[:, None] * x_sum[None, :]
        if not EXACT:
            sums *= stored_scale(tl.load(scale + row * scale_stride, mask=row_mask, other=0), SCALE)[:, None]
    if ELEMENT == "dint":
        sums *= 0.5
    if tensor is not None:
        sums = sums / tl.load(tensor)
    if x_scale is not None:
        sums *= tl.load(x_scale + vector, mask=vector_mask, other=0.0)[None, :]
    target = y + vector.to(tl.int64)[:, None] * rows + row[None, :]
    if SPLIT:
        target += tl.program_id(2).to(tl.int64) * batch * rows
    elif bias is not None:
        sums += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    tl.store(target, tl.trans(sums).to(y.dtype.element_ty), mask=vector_mask[:, None] & row_mask[None, :])


@triton.jit
def add_parts_kernel(parts, bias, y, count, rows, COUNT: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Add parts [COUNT, count] into y [count]; `bias` is per row, the contiguous axis of y."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    total = tl.zeros([SIZE], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for part in tl.static_range(COUNT):
        total += tl.load(parts + part * count.to(tl.int64) + index, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + index % rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + index, total.to(y.dtype.element_ty), mask=inside)
