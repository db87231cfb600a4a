"""Products of one vector with a packed matrix: the decoding phase of a language model, bound by memory.

A thread reads a chunk of codes (16 or 32 of them) of each of several rows and keeps the sums in registers; x is read
once for all rows of a program. A chunk lies within one group, so that a scale is applied once, to its partial sum.
Several vectors are several programs beside each other, which find the codes in the cache.

Even so the arithmetic, not the memory, is what takes the time of 4-bit codes if every code becomes a float. For 2, 4
and 8 bits, therefore, the 16 or 32 numbers of x that meet a chunk become 16-bit integers with a power of two in common
(see `fixed_point`), and an instruction adds two products of them with two bytes of codes. For the other widths and for
E2M1 the codes become floats.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.dequant import (
    E2M1_UNIT,
    ENLARGED,
    INTEGER_UNIT,
    dot_pair,
    e2m1_in_place,
    fixed_point,
    integer_in_place,
    largest_of,
    pair,
    pick,
    place_value,
    stored_scale,
    straddling,
)


@triton.jit
def load_words(row_codes, held, start, total, WORDS: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS, ROWS, WORDS]"""
    chunk = start + tl.arange(0, CHUNKS)
    mask = (chunk < total)[:, None, None] & held[None, :, None]
    place = row_codes[:, :, None] + chunk[:, None, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    return tl.load(place, mask=mask, other=0)


@triton.jit
def load_grid(pointer, row_groups, held, start, total, SIZE: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS, ROWS]: what the groups of the chunks hold, scales or zeros."""
    chunk = start + tl.arange(0, CHUNKS)
    group = chunk * SIZE // GROUP if GROUP else chunk * 0
    return tl.load(pointer + row_groups + group[:, None], mask=(chunk < total)[:, None] & held[None, :], other=0)


@triton.jit
def load_x(x, chunk, inside, PIECE: tl.constexpr, SIZE: tl.constexpr):
    """[CHUNKS, 8]: a sixteen-byte piece of each chunk."""
    place = x + (chunk * SIZE + PIECE * 8)[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(place, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def column_of(pieces, COLUMN: tl.constexpr):
    """[CHUNKS]: one column of each chunk."""
    return pick(pieces[COLUMN // 8], COLUMN % 8, 8)


@triton.jit
def whole_sums(x, chunk, inside, word, BITS: tl.constexpr, SIZE: tl.constexpr, PTX: tl.constexpr):
    """Of codes times x and of x, [CHUNKS, ROWS] and [CHUNKS] in int32, and their unit [CHUNKS]."""
    WORDS: tl.constexpr = SIZE * BITS // 32
    PLANES: tl.constexpr = 8 // BITS
    pieces = (load_x(x, chunk, inside, 0, SIZE), load_x(x, chunk, inside, 1, SIZE))
    largest = tl.maximum(largest_of(pieces[0]), largest_of(pieces[1]), propagate_nan=tl.PropagateNan.ALL)
    if SIZE == 32:
        pieces = (pieces[0], pieces[1], load_x(x, chunk, inside, 2, SIZE), load_x(x, chunk, inside, 3, SIZE))
        more = tl.maximum(largest_of(pieces[2]), largest_of(pieces[3]), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(largest, more, propagate_nan=tl.PropagateNan.ALL)
    into, back = fixed_point(largest)
    products = tl.zeros(word.shape[:-1], tl.int32)
    x_sum = tl.zeros(chunk.shape, tl.int32)
    ones = tl.full(chunk.shape, 0x01010101, tl.int32)
    for index in tl.static_range(WORDS):
        w = pick(word, index, WORDS)
        for plane in tl.static_range(PLANES):
            octets = w
            if BITS < 8:
                octets = (w >> (BITS * plane)) & (((1 << BITS) - 1) * 0x01010101)
            for half in tl.static_range(2):  # two bytes: columns that are PLANES apart
                first = column_of(pieces, (index * 4 + half * 2) * PLANES + plane)
                second = column_of(pieces, (index * 4 + half * 2 + 1) * PLANES + plane)
                both = pair(first * into, second * into, PTX)
                x_sum = dot_pair(both, ones, x_sum, False, PTX)
                products = dot_pair(tl.broadcast_to(both[:, None], products.shape), octets, products, half == 1, PTX)
    return products, x_sum, back


@triton.jit
def float_sums(
    x, chunk, inside, word, first_word, both, BITS: tl.constexpr, ELEMENT: tl.constexpr, SIZE: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """Of elements times x, of their magnitudes times x (where negative ones have another scale), and of x."""
    WORDS: tl.constexpr = SIZE * BITS // 32
    part = tl.zeros(both.shape, tl.float32)
    sizes = tl.zeros(both.shape, tl.float32)
    x_sum = tl.zeros(chunk.shape, tl.float32)
    for piece in tl.static_range(SIZE // 8):
        x_piece = load_x(x, chunk, inside, piece, SIZE)
        for p in tl.static_range(8):
            value = pick(x_piece, p, 8)
            if ELEMENT == "e2m1":
                signed = e2m1_in_place(pick(word, (piece * 8 + p) * 4 // 32, WORDS), (piece * 8 + p) * 4 % 32)
                large = (value * ENLARGED)[:, None]
                part += signed.to(tl.float32, bitcast=True) * large
                if SIGNED:
                    sizes += (signed & 0x01C00000).to(tl.float32, bitcast=True) * large
            else:
                x_sum += value
                w = tl.load(first_word + (piece * 8 + p) * BITS // 32, mask=both, other=0)
                if (piece * 8 + p) * BITS % 32 + BITS <= 32:
                    factor = ENLARGED * place_value((piece * 8 + p) * BITS % 32, BITS)
                    part += integer_in_place(w, (piece * 8 + p) * BITS % 32, BITS) * (value * factor)[:, None]
                else:
                    after = tl.load(first_word + (piece * 8 + p) * BITS // 32 + 1, mask=both, other=0)
                    part += straddling(w, after, (piece * 8 + p) * BITS % 32, BITS) * (value * ENLARGED)[:, None]
    return part, sizes, x_sum


@triton.jit
def gemv_kernel(
    x, codes, scale, zero, negative, tensor, bias, y, batch, rows, columns, x_stride, words, scale_stride,
    BITS: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`words` is the length of a row of codes in 32-bit words, SIZE the codes of a chunk, GROUP 0 one group a row."""
    WORDS: tl.constexpr = SIZE * BITS // 32
    LOADED: tl.constexpr = 32 % BITS == 0  # the words of a chunk, at once
    vector = tl.program_id(0) % batch
    row = (tl.program_id(0) // batch) * ROWS + tl.arange(0, ROWS)
    held = row < rows
    row_codes = codes + row.to(tl.int64)[None, :] * words
    row_groups = row[None, :] * scale_stride
    x += vector.to(tl.int64) * x_stride
    total = columns // SIZE
    sums = tl.zeros([CHUNKS, ROWS], tl.float32)
    word = tl.zeros([CHUNKS, ROWS, 1], tl.int32)
    if LOADED:
        word = load_words(row_codes, held, 0, total, WORDS, CHUNKS)
    raw = load_grid(scale, row_groups, held, 0, total, SIZE, GROUP, CHUNKS)
    second = zero if zero is not None else negative  # no format has both
    if second is not None:
        raw_second = load_grid(second, row_groups, held, 0, total, SIZE, GROUP, CHUNKS)
    if PDL:  # what the kernels before this one wrote is read from here on: x alone
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, total, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        inside = chunk < total
        both = inside[:, None] & held[None, :]
        factor = stored_scale(raw, SCALE)
        now = word
        if LOADED:
            word = load_words(row_codes, held, start + CHUNKS, total, WORDS, CHUNKS)
        raw = load_grid(scale, row_groups, held, start + CHUNKS, total, SIZE, GROUP, CHUNKS)
        if zero is not None:
            offset = raw_second.to(tl.float32)
        if negative is not None:
            other = stored_scale(raw_second, SCALE)
        if second is not None:
            raw_second = load_grid(second, row_groups, held, start + CHUNKS, total, SIZE, GROUP, CHUNKS)
        if ELEMENT == "int" and LOADED:
            products, x_sum, unit = whole_sums(x, chunk, inside, now, BITS, SIZE, PTX)
            if zero is None:
                part = (products - MIDDLE * x_sum[:, None]).to(tl.float32)
            else:
                part = products.to(tl.float32) - offset * x_sum.to(tl.float32)[:, None]
            sums += factor * (part * unit[:, None])
        else:
            SIGNED: tl.constexpr = negative is not None
            first_word = row_codes + chunk[:, None] * WORDS
            part, sizes, x_sum = float_sums(x, chunk, inside, now, first_word, both, BITS, ELEMENT, SIZE, SIGNED)
            if negative is not None:
                sums += (factor * (part + sizes) + other * (part - sizes)) * (E2M1_UNIT / 2)
            elif ELEMENT == "e2m1":
                sums += factor * (part * E2M1_UNIT)
            elif zero is None:
                sums += factor * (part * INTEGER_UNIT - MIDDLE * x_sum[:, None])
            else:
                sums += factor * (part * INTEGER_UNIT - offset * x_sum[:, None])
    result = tl.sum(sums, axis=0)
    if tensor is not None:
        result = result / tl.load(tensor)
    if bias is not None:
        result += tl.load(bias + row, mask=held, other=0.0).to(tl.float32)
    tl.store(y + vector.to(tl.int64) * rows + row, result.to(y.dtype.element_ty), mask=held)
