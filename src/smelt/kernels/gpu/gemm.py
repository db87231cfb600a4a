"""GEMM with a packed matrix on tensor cores, codes dequantized in registers.

The matrix is the left operand, so that its dequantized values never leave the registers. Bytes hold codes of
neighboring columns; instead of interleaving them, x is deinterleaved: the first codes of all bytes are multiplied with
columns 0, 2, 4, ..., the second ones with 1, 3, 5, .... x is in half precision, or int8 with per-row scales (then sums
are integers). With few output tiles and long rows, columns are split (split-K) and a second kernel adds the splits.

Grouped, the matrices of experts are stacked, and a program takes an expert and rows of x from a list (`experts.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.codes import e4m3_numbers
from smelt.kernels.gpu.dequant import decode_scale, pick
from smelt.kernels.gpu.planes import float_plane, int8_plane


@triton.jit
def load_scales(
    pointer, offset, row_mask, groups_left, SCALE_DTYPE: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr
):
    """Load the scales of the groups of a tile [rows, GROUPS], of which the first `groups_left` exist."""
    group = tl.arange(0, GROUPS)
    raw = tl.load(
        pointer + offset[:, None] + group[None, :], mask=row_mask[:, None] & (group < groups_left)[None, :], other=0
    )
    return decode_scale(raw, SCALE_DTYPE).to(DTYPE)


@triton.jit
def repeat_per_byte(scales, BYTES: tl.constexpr):
    """Repeat per-group scales per byte: [rows, groups] -> [rows, BYTES]."""
    repeated = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], BYTES // scales.shape[1]])
    return tl.reshape(repeated, [scales.shape[0], BYTES])


@triton.jit
def load_expert_tile(expert_tiles, num_tiles):
    """Return expert, first row and number of rows of this program's tile of the list; 0 rows beyond its end."""
    tile = tl.program_id(1)
    exists = tile < tl.load(num_tiles)
    expert = tl.load(expert_tiles + tile * 4, mask=exists, other=0)
    first = tl.load(expert_tiles + tile * 4 + 1, mask=exists, other=0)
    count = tl.load(expert_tiles + tile * 4 + 2, mask=exists, other=0)
    return expert.to(tl.int64), first, count


@triton.jit
def gemm_kernel(
    x, codes, scale, zero, negative, tensor, x_scale, bias, y, expert_tiles, num_tiles, batch, rows, columns, x_stride,
    octets, scale_stride, tiles, BITS: tl.constexpr, ELEMENT: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    DEFAULT_ZERO: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, SHARED_X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one output tile. `octets`: bytes per row of codes; `tiles`: tiles of BLOCK_K per program. Grouped,
    `tensor` is per row; SHARED_X: all experts of the list have the first row of x."""
    PLANES: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = BLOCK_K // PLANES
    X_DTYPE: tl.constexpr = x.dtype.element_ty
    X_E4M3: tl.constexpr = X_DTYPE == tl.uint8  # noqa: SIM300
    DTYPE: tl.constexpr = X_DTYPE if not X_E4M3 else tl.bfloat16 if PTX else tl.float16  # both have all values of E4M3
    INTEGER: tl.constexpr = DTYPE == tl.int8  # noqa: SIM300
    ACC_DTYPE: tl.constexpr = tl.int32 if INTEGER else tl.float32
    GROUPS: tl.constexpr = BLOCK_K // GROUP_SIZE if GROUP_SIZE > 0 and GROUP_SIZE < BLOCK_K else 1  # per tile
    # Products of elements and scales are exact.
    EXACT: tl.constexpr = ELEMENT == "e2m1" and SCALE_DTYPE != "float" and GROUP_SIZE > 0
    GROUPED: tl.constexpr = GROUP_SIZE > 0 and not EXACT
    ZERO_SUBTRACTED: tl.constexpr = zero is None or (INTEGER and BITS < 8)  # zero points are subtracted from the codes
    ZERO: tl.constexpr = DEFAULT_ZERO if zero is None else 0
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    vector = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask, vector_mask = row < rows, vector < batch
    x_vector = vector
    steps = tl.cdiv(columns, BLOCK_K)
    if expert_tiles is not None:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        expert, first_vector, count = load_expert_tile(expert_tiles, num_tiles)
        lane = tl.arange(0, BLOCK_M)
        vector, vector_mask, row_mask = first_vector + lane, lane < count, row_mask & (count > 0)
        x_vector = lane if SHARED_X else vector
        steps = tl.where(count > 0, steps, 0)  # beyond the list nothing is read
        codes += expert * rows * octets
        scale += expert * rows * scale_stride
        if zero is not None:
            zero += expert * rows * scale_stride
        if negative is not None:
            negative += expert * rows * scale_stride
        if tensor is not None:
            tensor += expert * rows
    row_octets = codes + row.to(tl.int64) * octets
    vector_start = x + x_vector.to(tl.int64) * x_stride
    byte = tl.arange(0, BYTES)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_M], ACC_DTYPE)  # over one group, or the full row
    x_sum = tl.zeros([BLOCK_M], tl.float32)
    offset = tl.full([BLOCK_N], DEFAULT_ZERO, tl.int32)
    if INTEGER and ZERO_SUBTRACTED and zero is not None and GROUP_SIZE == 0:
        offset = tl.load(zero + row * scale_stride, mask=row_mask, other=0).to(tl.int32)
    first = tl.program_id(2) * tiles
    group_index = row * scale_stride + (first * BLOCK_K // GROUP_SIZE if GROUP_SIZE > 0 else 0)
    if GROUPED:
        raw = tl.load(scale + group_index, mask=row_mask, other=0)
    if EXACT:
        groups_left = tl.cdiv(columns, GROUP_SIZE) - first * BLOCK_K // GROUP_SIZE
        scales = load_scales(scale, group_index, row_mask, groups_left, SCALE_DTYPE, DTYPE, GROUPS)
        if negative is not None:
            other_scales = load_scales(negative, group_index, row_mask, groups_left, SCALE_DTYPE, DTYPE, GROUPS)
    if PDL and expert_tiles is None:
        gdc_wait()
        gdc_launch_dependents()
    for tile in range(first, tl.minimum(first + tiles, steps)):
        group_index = row * scale_stride + (tile * BLOCK_K // GROUP_SIZE if GROUP_SIZE > 0 else 0)
        byte_index = tile * BYTES + byte
        inside = row_mask[:, None] & (byte_index < octets)[None, :]
        octet = tl.load(row_octets[:, None] + byte_index[None, :], mask=inside, other=0)
        column = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        inside_x = vector_mask[:, None] & (column < columns)[None, :]
        x_tile = tl.load(vector_start[:, None] + column[None, :], mask=inside_x, other=0)
        if X_E4M3:
            x_tile = e4m3_numbers(x_tile, DTYPE)
        if not ZERO_SUBTRACTED:
            if GROUPED:
                x_sum = tl.sum(x_tile.to(tl.float32), axis=1)
            else:
                x_sum += tl.sum(x_tile.to(tl.float32), axis=1)
        if INTEGER and ZERO_SUBTRACTED and zero is not None and GROUPED:
            offset = tl.load(zero + group_index, mask=row_mask, other=0).to(tl.int32)
        if EXACT:
            next_start = (tile + 1) * BLOCK_K // GROUP_SIZE
            groups_left = tl.cdiv(columns, GROUP_SIZE) - next_start
            factor = repeat_per_byte(scales, BYTES)
            scales = load_scales(
                scale, row * scale_stride + next_start, row_mask, groups_left, SCALE_DTYPE, DTYPE, GROUPS
            )
            if negative is not None:
                negative_factor = repeat_per_byte(other_scales, BYTES)
                other_scales = load_scales(
                    negative, row * scale_stride + next_start, row_mask, groups_left, SCALE_DTYPE, DTYPE, GROUPS
                )
        if GROUPED:
            acc = tl.zeros([BLOCK_N, BLOCK_M], ACC_DTYPE)
            next_start = (tile + 1) * BLOCK_K
            next_group_index = row * scale_stride + next_start // GROUP_SIZE
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
                x_plane = pick(tl.reshape(x_tile, [BLOCK_M, BYTES, PLANES]), plane, PLANES)
            else:
                x_plane = x_tile
            acc = tl.dot(operand, tl.trans(x_plane), acc, out_dtype=ACC_DTYPE)
        if GROUPED:
            part = acc.to(tl.float32)
            if not ZERO_SUBTRACTED:
                zero_point = tl.load(zero + group_index, mask=row_mask, other=0).to(tl.float32)
                if INTEGER:
                    zero_point -= 128.0
                part -= zero_point[:, None] * x_sum[None, :]
            sums += decode_scale(raw, SCALE_DTYPE)[:, None] * part
            raw = next_raw
    if not GROUPED:
        sums = acc.to(tl.float32)
        if not ZERO_SUBTRACTED:
            zero_point = tl.load(zero + row * scale_stride, mask=row_mask, other=0).to(tl.float32)
            if INTEGER:
                zero_point -= 128.0
            sums -= zero_point[:, None] * x_sum[None, :]
        if not EXACT:
            sums *= decode_scale(tl.load(scale + row * scale_stride, mask=row_mask, other=0), SCALE_DTYPE)[:, None]
    if ELEMENT == "dint":
        sums *= 0.5
    if tensor is not None and expert_tiles is not None:
        sums = sums / tl.load(tensor + row, mask=row_mask, other=1.0)[:, None]
    elif tensor is not None:
        sums = sums / tl.load(tensor)
    if x_scale is not None:
        sums *= tl.load(x_scale + x_vector, mask=vector_mask, other=0.0)[None, :]
    target = y + vector.to(tl.int64)[:, None] * rows + row[None, :]
    if SPLIT_K:
        target += tl.program_id(2).to(tl.int64) * batch * rows
    elif bias is not None:
        sums += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    tl.store(target, tl.trans(sums).to(y.dtype.element_ty), mask=vector_mask[:, None] & row_mask[None, :])


@triton.jit
def reduce_splits_kernel(partial, bias, y, count, rows, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Add the partial sums [SPLIT_K, count] into y [count]; `bias` is per row, the contiguous axis of y."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    total = tl.zeros([BLOCK], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partial + split * count.to(tl.int64) + index, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + index % rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + index, total.to(y.dtype.element_ty), mask=inside)
