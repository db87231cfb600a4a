"""Products of several vectors with a packed matrix on the tensor cores, the codes decoded in registers.

The matrix is the left operand, so that its decoded values never leave the registers. Bytes hold codes of neighbouring
columns; instead of interleaving them, x is taken apart: the first codes of all bytes meet the columns 0, 2, 4, ..., the
second ones 1, 3, 5, .... x is either in half precision, or int8 with one scale a row (then the sums are whole numbers).
Few rows and long sums are cut along the columns; a second kernel adds the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.dequant import pick, stored_scale
from smelt.kernels.gpu.planes import float_plane, int8_plane


@triton.jit
def load_scales(pointer, place, held, left, KIND: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr):
    """[rows, GROUPS]: the scales of a tile's groups, of which `left` are there."""
    group = tl.arange(0, GROUPS)
    raw = tl.load(pointer + place[:, None] + group[None, :], mask=held[:, None] & (group < left)[None, :], other=0)
    return stored_scale(raw, KIND).to(DTYPE)


@triton.jit
def for_each_byte(scales, BYTES: tl.constexpr):
    """[rows, groups] -> [rows, BYTES]"""
    wide = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], BYTES // scales.shape[1]])
    return tl.reshape(wide, [scales.shape[0], BYTES])


@triton.jit
def gemm_kernel(
    x, codes, scale, zero, negative, tensor, x_scale, bias, y, batch, rows, columns, x_stride, octets, scale_stride,
    tiles, BITS: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BATCH: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`octets` is the length of a row of codes in bytes, `tiles` how many tiles of COLUMNS a program takes."""
    PLANES: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = COLUMNS // PLANES
    DTYPE: tl.constexpr = x.dtype.element_ty
    INTEGER: tl.constexpr = DTYPE == tl.int8  # noqa: SIM300
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    GROUPS: tl.constexpr = COLUMNS // GROUP if GROUP > 0 and GROUP < COLUMNS else 1  # of a tile
    EXACT: tl.constexpr = ELEMENT == "e2m1" and SCALE != "float" and GROUP > 0  # elements times scales are exact
    GROUPED: tl.constexpr = GROUP > 0 and not EXACT
    TAKEN_OFF: tl.constexpr = zero is None or (INTEGER and BITS < 8)  # the zeros, from the codes
    OFF: tl.constexpr = MIDDLE if zero is None else 0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    vector = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    held, wanted = row < rows, vector < batch
    row_octets = codes + row.to(tl.int64) * octets
    vector_start = x + vector.to(tl.int64) * x_stride
    byte = tl.arange(0, BYTES)
    sums = tl.zeros([ROWS, BATCH], tl.float32)
    counts = tl.zeros([ROWS, BATCH], SUM)  # of one group, or of the whole row
    x_sum = tl.zeros([BATCH], tl.float32)
    offset = tl.full([ROWS], MIDDLE, tl.int32)
    if INTEGER and TAKEN_OFF and zero is not None and GROUP == 0:
        offset = tl.load(zero + row * scale_stride, mask=held, other=0).to(tl.int32)
    first = tl.program_id(2) * tiles
    place = row * scale_stride + (first * COLUMNS // GROUP if GROUP > 0 else 0)
    if GROUPED:
        raw = tl.load(scale + place, mask=held, other=0)
    if EXACT:
        left = tl.cdiv(columns, GROUP) - first * COLUMNS // GROUP
        scales = load_scales(scale, place, held, left, SCALE, DTYPE, GROUPS)
        if negative is not None:
            other_scales = load_scales(negative, place, held, left, SCALE, DTYPE, GROUPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for tile in range(first, tl.minimum(first + tiles, tl.cdiv(columns, COLUMNS))):
        place = row * scale_stride + (tile * COLUMNS // GROUP if GROUP > 0 else 0)
        there = tile * BYTES + byte
        inside = held[:, None] & (there < octets)[None, :]
        octet = tl.load(row_octets[:, None] + there[None, :], mask=inside, other=0)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside_x = wanted[:, None] & (column < columns)[None, :]
        x_tile = tl.load(vector_start[:, None] + column[None, :], mask=inside_x, other=0)
        if not TAKEN_OFF:
            if GROUPED:
                x_sum = tl.sum(x_tile.to(tl.float32), axis=1)
            else:
                x_sum += tl.sum(x_tile.to(tl.float32), axis=1)
        if INTEGER and TAKEN_OFF and zero is not None and GROUPED:
            offset = tl.load(zero + place, mask=held, other=0).to(tl.int32)
        if EXACT:
            later = (tile + 1) * COLUMNS // GROUP
            left = tl.cdiv(columns, GROUP) - later
            factor = for_each_byte(scales, BYTES)
            scales = load_scales(scale, row * scale_stride + later, held, left, SCALE, DTYPE, GROUPS)
            if negative is not None:
                below = for_each_byte(other_scales, BYTES)
                other_scales = load_scales(negative, row * scale_stride + later, held, left, SCALE, DTYPE, GROUPS)
        if GROUPED:
            counts = tl.zeros([ROWS, BATCH], SUM)
            later = (tile + 1) * COLUMNS
            next_place = row * scale_stride + later // GROUP
            next_raw = tl.load(scale + next_place, mask=held & (later < columns), other=0)
        for plane in tl.static_range(PLANES):
            if INTEGER:
                operand = int8_plane(octet, offset, plane, BITS, ELEMENT, PTX)
            else:
                operand = float_plane(octet, plane, BITS, ELEMENT, OFF, DTYPE, PTX)
            if EXACT:
                if negative is not None:
                    operand = operand * tl.where(operand > 0, factor, below)
                else:
                    operand = operand * factor
            if PLANES > 1:
                part_of_x = pick(tl.reshape(x_tile, [BATCH, BYTES, PLANES]), plane, PLANES)
            else:
                part_of_x = x_tile
            counts = tl.dot(operand, tl.trans(part_of_x), counts, out_dtype=SUM)
        if GROUPED:
            part = counts.to(tl.float32)
            if not TAKEN_OFF:
                middle = tl.load(zero + place, mask=held, other=0).to(tl.float32)
                if INTEGER:
                    middle -= 128.0
                part -= middle[:, None] * x_sum[None, :]
            sums += stored_scale(raw, SCALE)[:, None] * part
            raw = next_raw
    if not GROUPED:
        sums = counts.to(tl.float32)
        if not TAKEN_OFF:
            middle = tl.load(zero + row * scale_stride, mask=held, other=0).to(tl.float32)
            if INTEGER:
                middle -= 128.0
            sums -= middle[:, None] * x_sum[None, :]
        if not EXACT:
            sums *= stored_scale(tl.load(scale + row * scale_stride, mask=held, other=0), SCALE)[:, None]
    if ELEMENT == "dint":
        sums *= 0.5
    if tensor is not None:
        sums = sums / tl.load(tensor)
    if x_scale is not None:
        sums *= tl.load(x_scale + vector, mask=wanted, other=0.0)[None, :]
    target = y + vector.to(tl.int64)[:, None] * rows + row[None, :]
    if SPLIT:
        target += tl.program_id(2).to(tl.int64) * batch * rows
    elif bias is not None:
        sums += tl.load(bias + row, mask=held, other=0.0).to(tl.float32)[:, None]
    tl.store(target, tl.trans(sums).to(y.dtype.element_ty), mask=wanted[:, None] & held[None, :])


@triton.jit
def add_parts_kernel(parts, bias, y, count, rows, COUNT: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr):
    """parts [COUNT, count] -> y [count]; `bias` has an entry for each of the rows, along which y is contiguous."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    held = place < count
    total = tl.zeros([SIZE], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for part in tl.static_range(COUNT):
        total += tl.load(parts + part * count.to(tl.int64) + place, mask=held, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % rows, mask=held, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=held)
