"""GEMV with a packed matrix, for the memory-bound decode phase of a language model.

A thread reads a chunk of 16 or 32 codes of each of several rows and keeps sums in registers; x is read once for all
rows of a program. A chunk lies within one group, so that its scale is applied once, to the partial sum. Several vectors
are handled by adjacent programs, which hit the codes in the cache.

With 4-bit codes, converting each code to float would make arithmetic the bottleneck. For 2, 4 and 8 bits, the values of
x for a chunk therefore become 16-bit integers with a shared power-of-two scale (see `fixed_point`), and one instruction
adds two of their products with two bytes of codes. For other widths and E2M1, codes become floats.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.dequant import (
    E2M1_UNIT,
    ENLARGED,
    INTEGER_UNIT,
    decode_scale,
    dot_pair,
    e2m1_in_place,
    fixed_point,
    integer_in_place,
    pack_pair,
    pick,
    place_value,
    row_amax,
    straddling_code,
)


@triton.jit
def load_words(row_codes, row_mask, start, num_chunks, WORDS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """Load the codes of chunks: [BLOCK_CHUNKS, BLOCK_N, WORDS]."""
    chunk = start + tl.arange(0, BLOCK_CHUNKS)
    mask = (chunk < num_chunks)[:, None, None] & row_mask[None, :, None]
    address = row_codes[:, :, None] + chunk[:, None, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    return tl.load(address, mask=mask, other=0)


@triton.jit
def load_qparams(
    pointer,
    row_groups,
    row_mask,
    start,
    num_chunks,
    CHUNK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Load the scales or zero points of the groups of the chunks: [BLOCK_CHUNKS, BLOCK_N]."""
    chunk = start + tl.arange(0, BLOCK_CHUNKS)
    group = chunk * CHUNK_SIZE // GROUP_SIZE if GROUP_SIZE else chunk * 0
    return tl.load(
        pointer + row_groups + group[:, None], mask=(chunk < num_chunks)[:, None] & row_mask[None, :], other=0
    )


@triton.jit
def load_x(x, chunk, inside, PART: tl.constexpr, CHUNK_SIZE: tl.constexpr):
    """Load 16 bytes of x for each chunk: [BLOCK_CHUNKS, 8]."""
    address = x + (chunk * CHUNK_SIZE + PART * 8)[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(address, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def select_column(parts, COLUMN: tl.constexpr):
    """Select one column of each chunk: [BLOCK_CHUNKS]."""
    return pick(parts[COLUMN // 8], COLUMN % 8, 8)


@triton.jit
def integer_sums(x, chunk, inside, word, BITS: tl.constexpr, CHUNK_SIZE: tl.constexpr, PTX: tl.constexpr):
    """Return the sums of codes times x [BLOCK_CHUNKS, BLOCK_N] and of x [BLOCK_CHUNKS] in int32, and their unit
    [BLOCK_CHUNKS]."""
    WORDS: tl.constexpr = CHUNK_SIZE * BITS // 32
    PLANES: tl.constexpr = 8 // BITS
    x_parts = (load_x(x, chunk, inside, 0, CHUNK_SIZE), load_x(x, chunk, inside, 1, CHUNK_SIZE))
    amax = tl.maximum(row_amax(x_parts[0]), row_amax(x_parts[1]), propagate_nan=tl.PropagateNan.ALL)
    if CHUNK_SIZE == 32:
        x_parts = (
            x_parts[0],
            x_parts[1],
            load_x(x, chunk, inside, 2, CHUNK_SIZE),
            load_x(x, chunk, inside, 3, CHUNK_SIZE),
        )
        upper_amax = tl.maximum(row_amax(x_parts[2]), row_amax(x_parts[3]), propagate_nan=tl.PropagateNan.ALL)
        amax = tl.maximum(amax, upper_amax, propagate_nan=tl.PropagateNan.ALL)
    to_fixed, from_fixed = fixed_point(amax)
    products = tl.zeros(word.shape[:-1], tl.int32)
    x_sum = tl.zeros(chunk.shape, tl.int32)
    ones = tl.full(chunk.shape, 0x01010101, tl.int32)
    for index in tl.static_range(WORDS):
        packed = pick(word, index, WORDS)
        for plane in tl.static_range(PLANES):
            octets = packed
            if BITS < 8:
                octets = (packed >> (BITS * plane)) & (((1 << BITS) - 1) * 0x01010101)
            for half in tl.static_range(2):  # two bytes: columns PLANES apart
                first = select_column(x_parts, (index * 4 + half * 2) * PLANES + plane)
                second = select_column(x_parts, (index * 4 + half * 2 + 1) * PLANES + plane)
                x_pair = pack_pair(first * to_fixed, second * to_fixed, PTX)
                x_sum = dot_pair(x_pair, ones, x_sum, False, PTX)
                products = dot_pair(tl.broadcast_to(x_pair[:, None], products.shape), octets, products, half == 1, PTX)
    return products, x_sum, from_fixed


@triton.jit
def float_sums(
    x, chunk, inside, word, first_word, mask, BITS: tl.constexpr, ELEMENT: tl.constexpr, CHUNK_SIZE: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """Return sums of elements times x, of their magnitudes times x (if SIGNED), and of x."""
    WORDS: tl.constexpr = CHUNK_SIZE * BITS // 32
    part = tl.zeros(mask.shape, tl.float32)
    part_abs = tl.zeros(mask.shape, tl.float32)
    x_sum = tl.zeros(chunk.shape, tl.float32)
    for index in tl.static_range(CHUNK_SIZE // 8):
        x_part = load_x(x, chunk, inside, index, CHUNK_SIZE)
        for offset in tl.static_range(8):
            value = pick(x_part, offset, 8)
            if ELEMENT == "e2m1":
                signed = e2m1_in_place(pick(word, (index * 8 + offset) * 4 // 32, WORDS), (index * 8 + offset) * 4 % 32)
                large = (value * ENLARGED)[:, None]
                part += signed.to(tl.float32, bitcast=True) * large
                if SIGNED:
                    part_abs += (signed & 0x01C00000).to(tl.float32, bitcast=True) * large
            else:
                x_sum += value
                w = tl.load(first_word + (index * 8 + offset) * BITS // 32, mask=mask, other=0)
                if (index * 8 + offset) * BITS % 32 + BITS <= 32:
                    factor = ENLARGED * place_value((index * 8 + offset) * BITS % 32, BITS)
                    part += integer_in_place(w, (index * 8 + offset) * BITS % 32, BITS) * (value * factor)[:, None]
                else:
                    next_word = tl.load(first_word + (index * 8 + offset) * BITS // 32 + 1, mask=mask, other=0)
                    part += (
                        straddling_code(w, next_word, (index * 8 + offset) * BITS % 32, BITS)
                        * (value * ENLARGED)[:, None]
                    )
    return part, part_abs, x_sum


@triton.jit
def gemv_kernel(
    x, codes, scale, zero, negative, tensor, bias, y, batch, rows, columns, x_stride, words, scale_stride,
    BITS: tl.constexpr, ELEMENT: tl.constexpr, SCALE_DTYPE: tl.constexpr, DEFAULT_ZERO: tl.constexpr,
    GROUP_SIZE: tl.constexpr, CHUNK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs. `words`: 32-bit words per row of codes; CHUNK_SIZE: codes per chunk; GROUP_SIZE 0:
    per-row scales."""
    WORDS: tl.constexpr = CHUNK_SIZE * BITS // 32
    PRELOADED: tl.constexpr = 32 % BITS == 0  # the words of a chunk are loaded at once
    vector = tl.program_id(0) % batch
    row = (tl.program_id(0) // batch) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = row < rows
    row_codes = codes + row.to(tl.int64)[None, :] * words
    row_groups = row[None, :] * scale_stride
    x += vector.to(tl.int64) * x_stride
    num_chunks = columns // CHUNK_SIZE
    sums = tl.zeros([BLOCK_CHUNKS, BLOCK_N], tl.float32)
    word = tl.zeros([BLOCK_CHUNKS, BLOCK_N, 1], tl.int32)
    if PRELOADED:
        word = load_words(row_codes, row_mask, 0, num_chunks, WORDS, BLOCK_CHUNKS)
    raw = load_qparams(scale, row_groups, row_mask, 0, num_chunks, CHUNK_SIZE, GROUP_SIZE, BLOCK_CHUNKS)
    second_qparam = zero if zero is not None else negative  # no format has both
    if second_qparam is not None:
        raw_second = load_qparams(
            second_qparam, row_groups, row_mask, 0, num_chunks, CHUNK_SIZE, GROUP_SIZE, BLOCK_CHUNKS
        )
    if PDL:  # only x, read from here on, is written by earlier kernels
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, num_chunks, BLOCK_CHUNKS):
        chunk = start + tl.arange(0, BLOCK_CHUNKS)
        inside = chunk < num_chunks
        mask = inside[:, None] & row_mask[None, :]
        factor = decode_scale(raw, SCALE_DTYPE)
        current = word
        if PRELOADED:
            word = load_words(row_codes, row_mask, start + BLOCK_CHUNKS, num_chunks, WORDS, BLOCK_CHUNKS)
        raw = load_qparams(
            scale, row_groups, row_mask, start + BLOCK_CHUNKS, num_chunks, CHUNK_SIZE, GROUP_SIZE, BLOCK_CHUNKS
        )
        if zero is not None:
            offset = raw_second.to(tl.float32)
        if negative is not None:
            negative_scale = decode_scale(raw_second, SCALE_DTYPE)
        if second_qparam is not None:
            raw_second = load_qparams(
                second_qparam,
                row_groups,
                row_mask,
                start + BLOCK_CHUNKS,
                num_chunks,
                CHUNK_SIZE,
                GROUP_SIZE,
                BLOCK_CHUNKS,
            )
        if ELEMENT == "int" and PRELOADED:
            products, x_sum, unit = integer_sums(x, chunk, inside, current, BITS, CHUNK_SIZE, PTX)
            if zero is None:
                part = (products - DEFAULT_ZERO * x_sum[:, None]).to(tl.float32)
            else:
                part = products.to(tl.float32) - offset * x_sum.to(tl.float32)[:, None]
            sums += factor * (part * unit[:, None])
        else:
            SIGNED: tl.constexpr = negative is not None
            first_word = row_codes + chunk[:, None] * WORDS
            part, part_abs, x_sum = float_sums(
                x, chunk, inside, current, first_word, mask, BITS, ELEMENT, CHUNK_SIZE, SIGNED
            )
            if negative is not None:
                sums += (factor * (part + part_abs) + negative_scale * (part - part_abs)) * (E2M1_UNIT / 2)
            elif ELEMENT == "e2m1":
                sums += factor * (part * E2M1_UNIT)
            elif zero is None:
                sums += factor * (part * INTEGER_UNIT - DEFAULT_ZERO * x_sum[:, None])
            else:
                sums += factor * (part * INTEGER_UNIT - offset * x_sum[:, None])
    result = tl.sum(sums, axis=0)
    if tensor is not None:
        result = result / tl.load(tensor)
    if bias is not None:
        result += tl.load(bias + row, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(y + vector.to(tl.int64) * rows + row, result.to(y.dtype.element_ty), mask=row_mask)
