"""Device functions and kernels of integer-only networks in Triton; `integer.py` starts them.

On tensor cores int8 products are cheaper than what follows, so that 64-bit arithmetic is left out wherever the
constants show that 32 bits give the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smelt.kernels.gpu.arch import PTX

_PTX = tl.constexpr(PTX)


@triton.jit
def multiply_high(x, y):  # type: ignore[no-untyped-def]
    """Return the upper half of the product of int32 x and y."""
    if _PTX:  # where a factor comes from another layout, the compiler multiplies 64 by 64 bits
        return tl.inline_asm_elementwise("mul.hi.s32 $0, $1, $2;", "=r,r,r", [x, y], tl.int32, is_pure=True, pack=1)
    return ((x.to(tl.int64) * y.to(tl.int64)) >> 32).to(tl.int32)


@triton.jit
def multiply_shift(x, y, shift):  # type: ignore[no-untyped-def]
    """Return x * y >> shift, which fits int32, of int32 x, y and shift."""
    if _PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 p; mul.wide.s32 p, $1, $2; shr.s64 p, p, $3; cvt.u32.u64 $0, p; }", "=r,r,r,r",
            [x, y, shift], tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return ((x.to(tl.int64) * y.to(tl.int64)) >> shift.to(tl.int64)).to(tl.int32)


@triton.jit
def requantize(x, constants, channel, inside, channels, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Requantize int32 x; constants: minimum, maximum, limit, 0, multipliers [channels], shifts [channels].

    `inside`: the channels that exist. The product has 64 bits. Its upper half is enough for shifts above 32, and from
    32 on twice the result fits 32 bits before it is clamped; for smaller shifts x is clamped first, to a limit that the
    results of all channels reach.
    """
    PER_CHANNEL: tl.constexpr = (FORM - 1) % 2 == 1
    ARITHMETIC: tl.constexpr = (FORM - 1) % 8 // 2
    CLAMPED: tl.constexpr = FORM <= 8
    if PER_CHANNEL:
        multiplier = tl.load(constants + 4 + channel, mask=inside, other=33)
        shift = tl.load(constants + 4 + channels + channel, mask=inside, other=33)
    else:
        multiplier, shift = tl.load(constants + 4), tl.load(constants + 5)
    low, high = tl.load(constants), tl.load(constants + 1)
    if ARITHMETIC == 2:
        limit = tl.load(constants + 2)
        x = tl.minimum(tl.maximum(x, -limit), limit)
    if ARITHMETIC == 3:
        half = tl.full([], 1, tl.int32) << (shift - 33)
        result = (multiply_high(x, multiplier) + half) >> (shift - 32)
    else:
        if ARITHMETIC == 0:
            half = (tl.full([], 1, tl.int64) << shift.to(tl.int64)) >> 1
            result = (x.to(tl.int64) * multiplier.to(tl.int64) + half) >> shift.to(tl.int64)
            result = tl.minimum(tl.maximum(result, low.to(tl.int64)), high.to(tl.int64)).to(tl.int32)
        else:
            result = (multiply_shift(x, multiplier, shift - 1) + 1) >> 1
    if CLAMPED and ARITHMETIC > 0:
        result = tl.minimum(tl.maximum(result, low), high)
    return result


@triton.jit
def add_operand(  # type: ignore[no-untyped-def]
    x, row, channel, width, inside, in_row, operand, rows, constants, channels, FORM: tl.constexpr
):
    """Add an operand [rows, width], whose rows repeat."""
    if FORM == 0:
        return x
    other = tl.load(operand + (row % rows).to(tl.int64) * width + channel, mask=inside, other=0).to(tl.int32)
    if FORM >= 2:
        other = requantize(other, constants, channel, in_row, channels, FORM - 1)
    return x + other


@triton.jit
def gelu(x, constants, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """i-GELU; constants: q_b, q_c, q_one, shift."""
    q_b, q_c = tl.load(constants), tl.load(constants + 1)
    q_one, shift = tl.load(constants + 2), tl.load(constants + 3)
    if NARROW:
        distance = q_b.to(tl.int32) - tl.minimum(tl.abs(x).to(tl.uint32), q_b.to(tl.uint32)).to(tl.int32)
        erf = q_c.to(tl.int32) - distance * distance
        erf = tl.where(x < 0, -erf, erf) >> shift.to(tl.int32)
        return x * (erf + q_one.to(tl.int32))
    wide = x.to(tl.int64)
    distance = q_b - tl.minimum(tl.abs(wide), q_b)
    erf = q_c - distance * distance
    erf = tl.where(wide < 0, -erf, erf)
    return (wide * ((erf >> shift) + q_one)).to(tl.int32)


@triton.jit
def table_lookup(x, constants, entries):  # type: ignore[no-untyped-def]
    """Piecewise linear function; constants: breakpoints [entries], slopes and intercepts [entries + 1]."""
    slopes, intercepts = constants + entries, constants + 2 * entries + 1
    wide = x.to(tl.int64)
    slope, intercept = tl.load(slopes) + wide * 0, tl.load(intercepts) + wide * 0
    for k in range(0, entries):
        reached = wide >= tl.load(constants + k)
        slope = tl.where(reached, tl.load(slopes + k + 1), slope)
        intercept = tl.where(reached, tl.load(intercepts + k + 1), intercept)
    return (slope * wide + intercept).to(tl.int32)


@triton.jit
def tanh(x, constants):  # type: ignore[no-untyped-def]
    """Return levels * tanh(x), rounded half away from zero; constants: levels and those of i-exp of twice x."""
    levels, q_ln2, q_b = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
    q_c, max_halvings = tl.load(constants + 3), tl.load(constants + 4)
    lift, drop = tl.load(constants + 5), tl.load(constants + 6)
    wide = x.to(tl.int64)
    exp = exp_of_distance(tl.abs(wide), q_ln2, q_b, q_c, max_halvings, lift, drop)
    one = (q_c << lift) >> drop
    denominator = one + exp
    magnitude = (2 * levels * (one - exp) + denominator) // (2 * denominator)
    return tl.where(wide < 0, -magnitude, magnitude).to(tl.int32)


@triton.jit
def apply_chain(  # type: ignore[no-untyped-def]
    x, row, channel, width, inside, in_row, first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2,
    add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels, FIRST: tl.constexpr,
    ADD1: tl.constexpr, ADD2: tl.constexpr, ACTIVATION: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Apply a chain of steps to int32 x, of `width` channels; `in_row`: the channels that exist."""
    if FIRST:
        x = requantize(x, first, channel, in_row, first_channels, FIRST)
    x = add_operand(x, row, channel, width, inside, in_row, add1, add1_rows, add1_constants, add1_channels, ADD1)
    x = add_operand(x, row, channel, width, inside, in_row, add2, add2_rows, add2_constants, add2_channels, ADD2)
    if ACTIVATION == 1 or ACTIVATION == 3:
        x = gelu(x, activation, ACTIVATION == 3)
    if ACTIVATION == 2:
        x = table_lookup(x, activation, entries)
    if ACTIVATION == 4:
        x = tanh(x, activation)
    if LAST:
        x = requantize(x, last, channel, in_row, last_channels, LAST)
    return x


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    acc, bias, out, batch, row, first_column, m, n, first, first_channels, add1, add1_rows, add1_constants,
    add1_channels, add2, add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels,
    FIRST: tl.constexpr, ADD1: tl.constexpr, ADD2: tl.constexpr, ACTIVATION: tl.constexpr, LAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add the bias to the sums of a tile, apply a chain and store the results."""
    column = first_column + tl.arange(0, acc.shape[1])
    row, column = row[:, None], column[None, :]
    inside = (row < m) & (column < n)
    in_row = column < n
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=in_row, other=0)
    acc = apply_chain(
        acc, row, column, n, inside, in_row, first, first_channels, add1, add1_rows, add1_constants, add1_channels,
        add2, add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels, FIRST, ADD1, ADD2,
        ACTIVATION, LAST,
    )  # fmt: skip
    tl.store(out + (batch * m + row) * n + column, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemm_kernel(  # type: ignore[no-untyped-def]
    a, b, bias, out, m, n, k, inner, a_outer, a_inner, a_row, b_outer, b_inner, b_row,
    first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2, add2_rows, add2_constants,
    add2_channels, activation, entries, last, last_channels,
    FIRST: tl.constexpr, ADD1: tl.constexpr, ADD2: tl.constexpr, ACTIVATION: tl.constexpr, LAST: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, TMA: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Multiply int8 a [batch, m, k] and b [batch, n, k] -> [batch, m, n]; TMA: by descriptors, batch 1."""
    # Programs in groups of GROUP_M rows of tiles, so that tiles of b are reused from the L2 cache.
    program, rows, columns = tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group = program // (GROUP_M * columns)
    size = tl.minimum(rows - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * columns)
    first_row = (group * GROUP_M + within % size) * BLOCK_M
    first_column = within // size * BLOCK_N
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    batch = tl.program_id(1).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    if TMA:  # zeros beyond the ends
        for start in range(0, k, BLOCK_K):
            x, y = a.load([first_row, start]), b.load([first_column, start])
            acc = tl.dot(x, tl.trans(y), acc, out_dtype=tl.int32)
    else:
        a += batch // inner * a_outer + batch % inner * a_inner
        b += batch // inner * b_outer + batch % inner * b_inner
        depth = tl.arange(0, BLOCK_K)
        a_tile = a + tl.where(row < m, row, 0).to(tl.int64)[:, None] * a_row + depth[None, :]
        b_tile = b + tl.where(column < n, column, 0).to(tl.int64)[:, None] * b_row + depth[None, :]
        for start in range(0, k, BLOCK_K):
            if EVEN_K:
                x, y = tl.load(a_tile), tl.load(b_tile)
            else:
                left = depth[None, :] < k - start
                x, y = tl.load(a_tile, mask=left, other=0), tl.load(b_tile, mask=left, other=0)
            acc = tl.dot(x, tl.trans(y), acc, out_dtype=tl.int32)
            a_tile += BLOCK_K
            b_tile += BLOCK_K
    if SPLITS == 1:
        store_tile(
            acc, bias, out, batch, row, first_column, m, n, first, first_channels, add1, add1_rows, add1_constants,
            add1_channels, add2, add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels,
            FIRST, ADD1, ADD2, ACTIVATION, LAST, HAS_BIAS,
        )  # fmt: skip
    else:  # constants of fewer channels are in registers at a time
        HALF: tl.constexpr = BLOCK_N // 2
        parts = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, HALF]), [0, 2, 1]))
        for half in tl.static_range(2):
            if SPLITS == 2:
                store_tile(
                    parts[half], bias, out, batch, row, first_column + half * HALF, m, n, first, first_channels, add1,
                    add1_rows, add1_constants, add1_channels, add2, add2_rows, add2_constants, add2_channels,
                    activation, entries, last, last_channels, FIRST, ADD1, ADD2, ACTIVATION, LAST, HAS_BIAS,
                )  # fmt: skip
            else:
                quarters = tl.split(tl.permute(tl.reshape(parts[half], [BLOCK_M, 2, HALF // 2]), [0, 2, 1]))
                for quarter in tl.static_range(2):
                    store_tile(
                        quarters[quarter], bias, out, batch, row, first_column + half * HALF + quarter * (HALF // 2),
                        m, n, first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2, add2_rows,
                        add2_constants, add2_channels, activation, entries, last, last_channels, FIRST, ADD1, ADD2,
                        ACTIVATION, LAST, HAS_BIAS,
                    )  # fmt: skip


@triton.jit
def map_kernel(  # type: ignore[no-untyped-def]
    x, out, numel, width, first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2, add2_rows,
    add2_constants, add2_channels, activation, entries, last, last_channels,
    FIRST: tl.constexpr, ADD1: tl.constexpr, ADD2: tl.constexpr, ACTIVATION: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply a chain to x [rows, width]."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    values = tl.load(x + index, mask=inside, other=0).to(tl.int32)
    values = apply_chain(
        values, index // width, index % width, width, inside, inside, first, first_channels, add1, add1_rows,
        add1_constants, add1_channels, add2, add2_rows, add2_constants, add2_channels, activation, entries, last,
        last_channels, FIRST, ADD1, ADD2, ACTIVATION, LAST,
    )  # fmt: skip
    tl.store(out + index, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def exp_of_distance(distance, q_ln2, q_b, q_c, max_halvings, lift, drop):  # type: ignore[no-untyped-def]
    """i-exp of -distance (not negative), all int64."""
    distance = tl.minimum(distance, max_halvings * q_ln2)
    halvings = distance // q_ln2
    rest = distance - halvings * q_ln2
    return ((rest * (rest - q_b) + q_c) << lift) >> tl.minimum(halvings + drop, 63)


@triton.jit
def narrow_exp(distance, constants, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """i-exp of -distance (uint32) -> int32.

    EXACT: the multiplication by the reciprocal of q_ln2 gives the quotient; otherwise it may be one too small.
    """
    q_ln2, q_b = tl.load(constants + 2).to(tl.int32), tl.load(constants + 3).to(tl.int32)
    q_c, lift = tl.load(constants + 4).to(tl.int32), tl.load(constants + 6).to(tl.int32)
    drop, furthest = tl.load(constants + 7).to(tl.int32), tl.load(constants + 8).to(tl.uint32)
    reciprocal = tl.load(constants + 9).to(tl.uint32)
    distance = tl.minimum(distance, furthest)
    halvings = tl.umulhi(distance, reciprocal + distance * 0).to(tl.int32)
    rest = distance.to(tl.int32) - halvings * q_ln2
    if not EXACT:
        halvings = tl.where(rest >= q_ln2, halvings + 1, halvings)
        rest = tl.where(rest >= q_ln2, rest - q_ln2, rest)
    return ((rest * (rest - q_b) + q_c) << lift) >> (halvings + drop)


@triton.jit
def softmax_rows(  # type: ignore[no-untyped-def]
    scores, visible, constants, NARROW: tl.constexpr
):
    """i-softmax of int32 scores [rows, length] -> int32; see `_softmax_tensor` for the constants.

    NARROW: 0 for 64 bits, 1 or 2 for 32 bits (2: exact reciprocal), in which exps, their sum and the factor fit.
    """
    levels, reciprocal_bits = tl.load(constants), tl.load(constants + 1)
    peak = tl.max(tl.where(visible, scores, -2147483648), 1)
    if NARROW:
        distance = peak[:, None].to(tl.uint32) - scores.to(tl.uint32)  # masked scores may be above the peak
        exps = tl.where(visible, narrow_exp(distance, constants, NARROW == 2), 0)
        factor = (levels << reciprocal_bits) // tl.maximum(tl.sum(exps, 1), 1).to(tl.int64)
        bits = reciprocal_bits.to(tl.int32) - 32
        half = tl.full([], 1, tl.int32) << (bits - 1)
        return (multiply_high(exps, factor.to(tl.int32)[:, None]) + half) >> bits
    q_ln2, q_b, q_c = tl.load(constants + 2), tl.load(constants + 3), tl.load(constants + 4)
    max_halvings, lift, drop = tl.load(constants + 5), tl.load(constants + 6), tl.load(constants + 7)
    distance = tl.maximum(peak.to(tl.int64)[:, None] - scores.to(tl.int64), 0)
    exps = tl.where(visible, exp_of_distance(distance, q_ln2, q_b, q_c, max_halvings, lift, drop), 0)
    factor = (levels << reciprocal_bits) // tl.maximum(tl.sum(exps, 1), 1)
    half = tl.full([], 1, tl.int64) << (reciprocal_bits - 1)
    return ((exps * factor[:, None] + half) >> reciprocal_bits).to(tl.int32)


@triton.jit
def softmax_kernel(  # type: ignore[no-untyped-def]
    x, out, mask, rows_per_mask, mask_stride, length, constants, NARROW: tl.constexpr, BLOCK: tl.constexpr
):
    """i-softmax of one row x [rows, length] per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < length
    visible = tl.load(mask + row // rows_per_mask * mask_stride + column, mask=inside, other=0) != 0
    scores = tl.load(x + row * length + column, mask=inside, other=0).to(tl.int32)
    result = softmax_rows(scores, visible, constants, NARROW)
    tl.store(out + row * length + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]
    query, key, value, out, mask, queries, keys, head_dim, heads, q_outer, q_inner, q_row, k_outer, k_inner, k_row,
    v_outer, v_inner, v_row, mask_outer, mask_inner, mask_row, constants, score, last,
    SCORE: tl.constexpr, LAST: tl.constexpr, NARROW: tl.constexpr, HAS_MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries over all keys. MASK_ROWS: queries differ in the keys that they see."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    batch, inner = head // heads, head % heads
    position, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q_inside = (row < queries)[:, None] & (channel < head_dim)[None, :]
    k_inside = (position < keys)[:, None] & (channel < head_dim)[None, :]
    q = tl.load(query + batch * q_outer + inner * q_inner + row[:, None] * q_row + channel[None, :], q_inside, 0)
    k = tl.load(key + batch * k_outer + inner * k_inner + position[:, None] * k_row + channel[None, :], k_inside, 0)
    v = tl.load(value + batch * v_outer + inner * v_inner + position[:, None] * v_row + channel[None, :], k_inside, 0)
    visible = (position < keys)[None, :]
    if HAS_MASK:
        mask += batch * mask_outer + inner * mask_inner
        if MASK_ROWS:
            visible = visible & (row < queries)[:, None]
            visible = tl.load(mask + row[:, None] * mask_row + position[None, :], visible, 0) != 0
        else:
            visible = tl.load(mask + position[None, :], visible, 0) != 0
    scores = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    if SCORE:
        scores = requantize(scores, score, 0, True, 1, SCORE)
    probabilities = softmax_rows(scores, visible, constants, NARROW).to(tl.int8)
    result = tl.dot(probabilities, v, out_dtype=tl.int32)
    if LAST:
        result = requantize(result, last, 0, True, 1, LAST)
    target = ((batch * queries + row[:, None]) * heads + inner) * head_dim + channel[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=q_inside)


@triton.jit
def floor_sqrt(value):  # type: ignore[no-untyped-def]
    """Return floor(sqrt(value)) of an int64 scalar below 2**62.

    As in the GPU's division of integers, a unit for floats gives an estimate, and integers make it exact: the rounding
    of 53 bits moves a root below 2**31 by less than one.
    """
    root = tl.sqrt(tl.maximum(value, 0).to(tl.float64)).to(tl.int64)
    root = tl.where(root * root > value, root - 1, root)
    return tl.maximum(tl.where((root + 1) * (root + 1) <= value, root + 1, root), 0)


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, out_constants, out_channels, out2, out2_constants, out2_channels, length, epsilon, shift,
    reciprocal_bits, output_bits,
    first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2, add2_rows, add2_constants,
    add2_channels, activation, entries, last, last_channels,
    FIRST: tl.constexpr, ADD1: tl.constexpr, ADD2: tl.constexpr, ACTIVATION: tl.constexpr, LAST: tl.constexpr,
    CENTERED: tl.constexpr, NARROW: tl.constexpr, OUT: tl.constexpr, OUT2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """i-LayerNorm (CENTERED) or i-RMSNorm of one row per program.

    OUT, OUT2: 0 none, 1 int32, more for a requantization. NARROW: no bits are dropped, so that squares of centered
    values fit 60 bits, and the values 31.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < length
    values = tl.load(x + row * length + channel, mask=inside, other=0).to(tl.int32)
    values = apply_chain(
        values, row, channel, length, inside, inside, first, first_channels, add1, add1_rows, add1_constants,
        add1_channels, add2, add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels, FIRST,
        ADD1, ADD2, ACTIVATION, LAST,
    )  # fmt: skip
    if not NARROW:
        values = values.to(tl.int64)
    if CENTERED:
        twice = 2 * tl.sum(tl.where(inside, values, 0).to(tl.int64), 0) + length
        mean = twice // (2 * length)  # rounds toward zero
        mean = tl.where(mean * (2 * length) > twice, mean - 1, mean)
        values -= mean.to(values.dtype)
    if NARROW:
        dropped = tl.where(inside, values, 0).to(tl.int64)
        root = floor_sqrt(tl.sum(dropped * dropped, 0) + epsilon)
    else:
        dropped = tl.where(inside, values >> shift, 0)
        root = floor_sqrt(tl.sum(dropped * dropped, 0) + epsilon) << shift
    one = tl.full([], 1, tl.int64)
    factor = (one << reciprocal_bits) // tl.maximum(root, 1)
    excess = reciprocal_bits - output_bits
    half = one << (excess - 1)
    if NARROW:
        if factor < 2147483648:
            normalized = (multiply_shift(values, factor.to(tl.int32), excess - 1) + 1) >> 1
        else:
            normalized = ((values.to(tl.int64) * factor + half) >> excess).to(tl.int32)
    else:
        normalized = ((values * factor + half) >> excess).to(tl.int32)
    result = normalized * tl.load(weight + channel, mask=inside, other=0)
    if CENTERED:
        result += tl.load(bias + channel, mask=inside, other=0)
    if OUT2 == 1:
        tl.store(out2 + row * length + channel, result.to(out2.dtype.element_ty), mask=inside)
    if OUT2 >= 2:
        second = requantize(result, out2_constants, channel, inside, out2_channels, OUT2 - 1)
        tl.store(out2 + row * length + channel, second.to(out2.dtype.element_ty), mask=inside)
    if OUT >= 2:
        result = requantize(result, out_constants, channel, inside, out_channels, OUT - 1)
    tl.store(out + row * length + channel, result.to(out.dtype.element_ty), mask=inside)
