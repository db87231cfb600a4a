"""Kernels of integer-only networks in Triton: int8 products on tensor cores, with the elementwise steps in registers.

A kernel applies a chain of steps: a requantization, two sums, an activation and a requantization, each optional. Longer
sequences of steps continue in further passes of the elementwise kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smelt.kernels.integer_interface import (
    NO_STEPS,
    Add,
    Gelu,
    IntegerKernels,
    NormConstants,
    PackedWeight,
    Requantize,
    SoftmaxConstants,
    Step,
    Steps,
    mask_rows,
)

MAX_ATTENTION_KEYS = 512  # scores of 16 queries stay in registers; more would spill
# Codes of the kernels' constants. A requantization: with one multiplier, or one per channel. A sum: as it is, or
# requantized in one of these ways. An activation.
_NONE = 0
_PER_TENSOR, _PER_CHANNEL = 1, 2
_PLAIN = 1
_GELU, _TABLE = 1, 2


@triton.jit
def requantize(x, constants, channel, channels, PER_CHANNEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Requantize int32 x; constants: minimum, maximum, multipliers [channels], shifts [channels]."""
    if PER_CHANNEL:
        multiplier = tl.load(constants + 2 + channel).to(tl.int64)
        shift = tl.load(constants + 2 + channels + channel).to(tl.int64)
    else:
        multiplier, shift = tl.load(constants + 2).to(tl.int64), tl.load(constants + 3).to(tl.int64)
    half = (tl.full([], 1, tl.int64) << shift) >> 1
    result = (x.to(tl.int64) * multiplier + half) >> shift
    low, high = tl.load(constants).to(tl.int64), tl.load(constants + 1).to(tl.int64)
    return tl.minimum(tl.maximum(result, low), high).to(tl.int32)


@triton.jit
def add_operand(x, row, channel, width, inside, operand, rows, constants, channels, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add an operand [rows, width], whose rows repeat."""
    if FORM == 0:
        return x
    other = tl.load(operand + (row % rows).to(tl.int64) * width + channel, mask=inside, other=0).to(tl.int32)
    if FORM >= 2:
        other = requantize(other, constants, channel, channels, FORM == 3)
    return x + other


@triton.jit
def gelu(x, constants):  # type: ignore[no-untyped-def]
    """i-GELU; constants: q_b, q_c, q_one, shift."""
    q_b, q_c = tl.load(constants), tl.load(constants + 1)
    wide = x.to(tl.int64)
    distance = q_b - tl.minimum(tl.abs(wide), q_b)
    erf = q_c - distance * distance
    erf = tl.where(wide < 0, -erf, erf)
    return (wide * ((erf >> tl.load(constants + 3)) + tl.load(constants + 2))).to(tl.int32)


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
def apply_chain(  # type: ignore[no-untyped-def]
    x, row, channel, width, inside, first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2,
    add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels, FIRST: tl.constexpr,
    ADD1: tl.constexpr, ADD2: tl.constexpr, ACTIVATION: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Apply a chain of steps to int32 x, of `width` channels."""
    if FIRST:
        x = requantize(x, first, channel, first_channels, FIRST == 2)
    x = add_operand(x, row, channel, width, inside, add1, add1_rows, add1_constants, add1_channels, ADD1)
    x = add_operand(x, row, channel, width, inside, add2, add2_rows, add2_constants, add2_channels, ADD2)
    if ACTIVATION == 1:
        x = gelu(x, activation)
    if ACTIVATION == 2:
        x = table_lookup(x, activation, entries)
    if LAST:
        x = requantize(x, last, channel, last_channels, LAST == 2)
    return x


@triton.jit
def gemm_kernel(  # type: ignore[no-untyped-def]
    a, b, bias, out, m, n, k, inner, a_outer, a_inner, a_row, b_outer, b_inner, b_row,
    first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2, add2_rows, add2_constants,
    add2_channels, activation, entries, last, last_channels,
    FIRST: tl.constexpr, ADD1: tl.constexpr, ADD2: tl.constexpr, ACTIVATION: tl.constexpr, LAST: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiply int8 a [batch, m, k] and b [batch, n, k] -> [batch, m, n]."""
    # Programs in groups of GROUP_M rows of tiles, so that tiles of b are reused from the L2 cache.
    program, rows, columns = tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group = program // (GROUP_M * columns)
    size = tl.minimum(rows - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * columns)
    row = (group * GROUP_M + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.program_id(1).to(tl.int64)
    a += batch // inner * a_outer + batch % inner * a_inner
    b += batch // inner * b_outer + batch % inner * b_inner
    depth = tl.arange(0, BLOCK_K)
    a_tile = a + tl.where(row < m, row, 0).to(tl.int64)[:, None] * a_row + depth[None, :]
    b_tile = b + tl.where(column < n, column, 0).to(tl.int64)[:, None] * b_row + depth[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            x, y = tl.load(a_tile), tl.load(b_tile)
        else:
            left = depth[None, :] < k - start
            x, y = tl.load(a_tile, mask=left, other=0), tl.load(b_tile, mask=left, other=0)
        acc = tl.dot(x, tl.trans(y), acc, out_dtype=tl.int32)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    row, column = row[:, None], column[None, :]
    inside = (row < m) & (column < n)
    channel = tl.where(column < n, column, 0)
    if HAS_BIAS:
        acc += tl.load(bias + channel)
    acc = apply_chain(
        acc, row, channel, n, inside, first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2,
        add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels, FIRST, ADD1, ADD2,
        ACTIVATION, LAST,
    )  # fmt: skip
    tl.store(out + (batch * m + row) * n + column, acc.to(out.dtype.element_ty), mask=inside)


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
        values, index // width, index % width, width, inside, first, first_channels, add1, add1_rows, add1_constants,
        add1_channels, add2, add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels,
        FIRST, ADD1, ADD2, ACTIVATION, LAST,
    )  # fmt: skip
    tl.store(out + index, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def exp_of_distance(distance, q_ln2, q_b, q_c, max_halvings, lift, drop, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """i-exp of -distance (int64, not negative) -> int64; in 32 bits if the constants permit."""
    distance = tl.minimum(distance, max_halvings.to(tl.int64) * q_ln2)
    if NARROW:
        x, divisor = distance.to(tl.uint32), q_ln2.to(tl.uint32)
        halvings = tl.umulhi(x, tl.full([], 0xFFFFFFFF, tl.uint32) // divisor + x * 0)  # or one less, as x < 2^31
        rest = x - halvings * divisor
        more = rest >= divisor
        rest = tl.where(more, rest - divisor, rest).to(tl.int32)
        halvings = tl.where(more, halvings + 1, halvings).to(tl.int32)
        value = (rest * (rest - q_b.to(tl.int32)) + q_c.to(tl.int32)) << lift
        return (value >> tl.minimum(halvings + drop, 31)).to(tl.int64)
    halvings = distance // q_ln2
    rest = distance - halvings * q_ln2
    return ((rest * (rest - q_b) + q_c) << lift.to(tl.int64)) >> tl.minimum(halvings + drop, 63)


@triton.jit
def softmax_rows(  # type: ignore[no-untyped-def]
    scores, visible, constants, NARROW: tl.constexpr
):
    """i-softmax of int32 scores [rows, length] -> int32; see `_softmax_tensor` for the constants."""
    levels, reciprocal_bits = tl.load(constants), tl.load(constants + 1)
    q_ln2, q_b, q_c = tl.load(constants + 2), tl.load(constants + 3), tl.load(constants + 4)
    max_halvings, lift = tl.load(constants + 5), tl.load(constants + 6).to(tl.int32)
    drop = tl.load(constants + 7).to(tl.int32)
    peak = tl.max(tl.where(visible, scores, -2147483648), 1)
    distance = tl.maximum(peak.to(tl.int64)[:, None] - scores.to(tl.int64), 0)
    exps = tl.where(visible, exp_of_distance(distance, q_ln2, q_b, q_c, max_halvings, lift, drop, NARROW), 0)
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
    rows_per_mask, mask_stride, constants, score, last,
    SCORE: tl.constexpr, LAST: tl.constexpr, NARROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries over all keys. value: [batch, heads, head_dim, keys]: keys are contiguous."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    batch, inner = head // heads, head % heads
    position, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q_inside = (row < queries)[:, None] & (channel < head_dim)[None, :]
    k_inside = (position < keys)[:, None] & (channel < head_dim)[None, :]
    v_inside = (channel < head_dim)[:, None] & (position < keys)[None, :]
    q = tl.load(query + batch * q_outer + inner * q_inner + row[:, None] * q_row + channel[None, :], q_inside, 0)
    k = tl.load(key + batch * k_outer + inner * k_inner + position[:, None] * k_row + channel[None, :], k_inside, 0)
    scores = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    if SCORE:
        scores = requantize(scores, score, 0, 1, False)
    mask_row = (head * queries + tl.minimum(row, queries - 1)) // rows_per_mask
    in_mask = (position < keys)[None, :] & (row < queries)[:, None]
    visible = tl.load(mask + mask_row[:, None] * mask_stride + position[None, :], in_mask, 0) != 0
    probabilities = softmax_rows(scores, visible, constants, NARROW).to(tl.int8)
    v = tl.load(value + (head * head_dim + channel[:, None]) * keys + position[None, :], v_inside, 0)
    result = tl.dot(probabilities, tl.trans(v), out_dtype=tl.int32)
    if LAST:
        result = requantize(result, last, 0, 1, False)
    target = ((batch * queries + row[:, None]) * heads + inner) * head_dim + channel[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=q_inside)


@triton.jit
def floor_sqrt(value):  # type: ignore[no-untyped-def]
    """Return floor(sqrt(value)) of an int64 scalar by Newton's iteration from a power of two above the root."""
    positive = tl.maximum(value, 1)
    root = positive * 0 + 1
    for bits in tl.static_range(1, 32):
        root = tl.where((positive >> (2 * bits - 2)) != 0, (positive * 0 + 1) << bits, root)
    for _ in tl.static_range(7):  # the error is at most 1 of 1, then 1/4, 1/40, 3e-4, 5e-8, 1e-15
        root = tl.minimum(root, (root + positive // root) >> 1)
    return tl.where(value > 0, root, 0)


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, out_constants, out_channels, out2, out2_constants, out2_channels, length, epsilon, shift,
    reciprocal_bits, output_bits,
    first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2, add2_rows, add2_constants,
    add2_channels, activation, entries, last, last_channels,
    FIRST: tl.constexpr, ADD1: tl.constexpr, ADD2: tl.constexpr, ACTIVATION: tl.constexpr, LAST: tl.constexpr,
    CENTERED: tl.constexpr, OUT: tl.constexpr, OUT2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """i-LayerNorm (CENTERED) or i-RMSNorm of one row per program.

    OUT, OUT2: 0 none, 1 int32, 2 requantized, 3 requantized per channel.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < length
    values = tl.load(x + row * length + channel, mask=inside, other=0).to(tl.int32)
    index = tl.where(inside, channel, 0)
    values = apply_chain(
        values, row, index, length, inside, first, first_channels, add1, add1_rows, add1_constants, add1_channels, add2,
        add2_rows, add2_constants, add2_channels, activation, entries, last, last_channels, FIRST, ADD1, ADD2,
        ACTIVATION, LAST,
    ).to(tl.int64)  # fmt: skip
    if CENTERED:
        twice = 2 * tl.sum(tl.where(inside, values, 0), 0) + length
        mean = twice // (2 * length)  # rounds toward zero
        values -= tl.where(mean * (2 * length) > twice, mean - 1, mean)
    dropped = tl.where(inside, values >> shift, 0)
    root = floor_sqrt(tl.sum(dropped * dropped, 0) + epsilon) << shift
    one = tl.full([], 1, tl.int64)
    factor = (one << reciprocal_bits) // tl.maximum(root, 1)
    excess = reciprocal_bits - output_bits
    normalized = (values * factor + (one << (excess - 1))) >> excess
    result = normalized * tl.load(weight + index)
    if CENTERED:
        result += tl.load(bias + index)
    result = result.to(tl.int32)
    if OUT2 == 1:
        tl.store(out2 + row * length + channel, result.to(out2.dtype.element_ty), mask=inside)
    if OUT2 >= 2:
        second = requantize(result, out2_constants, index, out2_channels, OUT2 == 3)
        tl.store(out2 + row * length + channel, second.to(out2.dtype.element_ty), mask=inside)
    if OUT >= 2:
        result = requantize(result, out_constants, index, out_channels, OUT == 3)
    tl.store(out + row * length + channel, result.to(out.dtype.element_ty), mask=inside)


@dataclass
class Chain:
    """The arguments of `apply_chain`, and how many steps and operands it takes."""

    arguments: dict[str, Any]
    steps: int = 0
    operands: int = 0


class GpuKernels(IntegerKernels):
    """Triton kernels."""

    name = "gpu"

    def pack(self, weight: Tensor, is_unsigned: bool = False) -> PackedWeight:
        channels, columns = weight.shape
        return PackedWeight(weight.contiguous(), None, channels, columns, is_unsigned)

    def linear(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, steps: Steps, dtype: torch.dtype,
        operands: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        rows = x.contiguous().view(1, 1, prod(x.shape[:-1]), weight.columns)
        data = weight.data.view(1, 1, weight.channels, weight.columns)
        return self._gemm(rows, data, bias, steps, dtype, operands).view(*x.shape[:-1], weight.channels)

    def matmul(self, a: Tensor, b: Tensor, transpose_b: bool, steps: Steps, dtype: torch.dtype) -> Tensor:
        return self._gemm(a, b if transpose_b else b.transpose(2, 3), None, steps, dtype, ())

    def _gemm(
        self, a: Tensor, b: Tensor, bias: Tensor | None, steps: Steps, dtype: torch.dtype, operands: Sequence[Tensor]
    ) -> Tensor:
        a, b = (x if x.stride(3) == 1 else x.contiguous() for x in (a, b))
        (outer, inner, m, k), n = a.shape, b.shape[2]
        chain = _chain(steps, operands, a.device)
        rest = Steps(steps.steps[chain.steps :])
        out = torch.empty(outer, inner, m, n, dtype=torch.int32 if rest.steps else dtype, device=a.device)
        if not out.numel():
            return out.to(dtype)
        block_m, block_n, block_k, warps, stages = tile_for(outer * inner, m, n, k)
        gemm_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n), outer * inner)](
            a, b, bias if bias is not None else out, out, m, n, k, inner, *a.stride()[:3], *b.stride()[:3],
            **chain.arguments, HAS_BIAS=bias is not None, EVEN_K=k % block_k == 0, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=block_k, GROUP_M=8, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return self.map(out, rest, dtype, operands[chain.operands :]) if rest.steps else out

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, score_steps: Steps,
        softmax: SoftmaxConstants, steps: Steps, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        (batch, heads, queries, head_dim), keys = query.shape, key.shape[2]
        if (
            keys > MAX_ATTENTION_KEYS
            or not _is_simple(score_steps)
            or not _is_simple(steps)
            or not query.numel()
            or not keys
        ):
            scores = self.matmul(query, key, True, score_steps, torch.int32)
            weights = self.softmax(scores, mask, NO_STEPS, softmax, torch.int8)
            return self.matmul(weights, value, False, steps, dtype)
        query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
        value = value.transpose(2, 3).contiguous()
        mask_bytes, rows_per_mask = mask_rows(mask, (batch, heads, queries, keys), query.device)
        out = torch.empty(batch, queries, heads, head_dim, dtype=dtype, device=query.device)
        block_n = max(triton.next_power_of_2(keys), 32)
        block_m = 64 if block_n <= 128 else 32 if block_n <= 256 else 16
        constants = [_constants(s, query.device)[0] if s.steps else out for s in (score_steps, steps)]
        attention_kernel[(triton.cdiv(queries, block_m), batch * heads)](
            query, key, value, out, mask_bytes, queries, keys, head_dim, heads, *query.stride()[:3], *key.stride()[:3],
            rows_per_mask, mask_bytes.shape[1], _softmax_tensor(softmax, query.device), *constants,
            SCORE=bool(score_steps.steps), LAST=bool(steps.steps), NARROW=_is_narrow(softmax), BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_D=max(triton.next_power_of_2(head_dim), 32), num_warps=4,
        )  # fmt: skip
        return out.transpose(1, 2)

    def softmax(
        self, x: Tensor, mask: Tensor | None, steps: Steps, softmax: SoftmaxConstants, dtype: torch.dtype
    ) -> Tensor:
        x = (self.map(x, steps, torch.int32) if steps.steps else x).contiguous()
        mask_bytes, rows_per_mask = mask_rows(mask, tuple(x.shape), x.device)
        out, length = torch.empty(x.shape, dtype=dtype, device=x.device), x.shape[-1]
        if x.numel():
            softmax_kernel[(prod(x.shape[:-1]),)](
                x, out, mask_bytes, rows_per_mask, mask_bytes.shape[1], length, _softmax_tensor(softmax, x.device),
                NARROW=_is_narrow(softmax), BLOCK=triton.next_power_of_2(length), num_warps=4,
            )  # fmt: skip
        return out

    def norm(
        self, x: Tensor, steps: Steps, norm: NormConstants, outputs: Sequence[tuple[Steps, torch.dtype]],
        operands: Sequence[Tensor] = (),
    ) -> list[Tensor]:  # fmt: skip
        chain, x = _chain(steps, operands, x.device), x.contiguous()
        if chain.steps < len(steps.steps):
            x, chain = self.map(x, steps, torch.int32, operands), _chain(NO_STEPS, (), x.device)
        fused = [
            len(after.steps) <= 1 and all(isinstance(step, Requantize) for step in after.steps) for after, _ in outputs
        ]
        results = [
            torch.empty(x.shape, dtype=dtype if is_fused else torch.int32, device=x.device)
            for is_fused, (_, dtype) in zip(fused, outputs, strict=True)
        ]
        if x.numel():
            targets, forms = [], [_NONE, _NONE]
            for index, (out, is_fused, (after, _)) in enumerate(zip(results, fused, outputs, strict=True)):
                step = after.steps[0] if is_fused and after.steps else None
                forms[index] = _PLAIN
                targets += [out, out, 1]
                if isinstance(step, Requantize):
                    forms[index] += _form(step)
                    targets[-2:] = [_constants(after, x.device)[0], _channels(step)]
            targets += [results[0], results[0], 1] if len(results) == 1 else []
            length = x.shape[-1]
            norm_kernel[(x.numel() // length,)](
                x, norm.weight, norm.weight if norm.bias is None else norm.bias, *targets, length,
                *_norm_scalars(norm), **chain.arguments, CENTERED=norm.bias is not None, OUT=forms[0],
                OUT2=forms[1], BLOCK=triton.next_power_of_2(length), num_warps=4,
            )  # fmt: skip
        return [
            result if is_fused else self.map(result, after, dtype)
            for result, is_fused, (after, dtype) in zip(results, fused, outputs, strict=True)
        ]

    def map(self, x: Tensor, steps: Steps, dtype: torch.dtype, operands: Sequence[Tensor] = ()) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        chain = _chain(steps, operands, x.device)
        rest = Steps(steps.steps[chain.steps :])
        out = torch.empty(x.shape, dtype=torch.int32 if rest.steps else dtype, device=x.device)
        if x.numel():
            map_kernel[(triton.cdiv(x.numel(), 1024),)](
                x, out, x.numel(), width, **chain.arguments, BLOCK=1024, num_warps=4
            )
        return self.map(out, rest, dtype, operands[chain.operands :]) if rest.steps else out


def tile_for(batch: int, m: int, n: int, k: int) -> tuple[int, int, int, int, int]:
    """Return rows, columns and depth of a tile, warps and pipeline stages."""
    block_k = 128 if k >= 128 else max(triton.next_power_of_2(k), 32)
    if batch * triton.cdiv(m, 128) * triton.cdiv(n, 128) >= 128:
        return 128, 128, block_k, 8, 4  # 128 x 256 would spill the 64-bit products of the requantization
    if m <= 16:
        return 16, 64, block_k, 4, 4
    return 64, 64, block_k, 4, 4


def _chain(steps: Steps, operands: Sequence[Tensor], device: torch.device) -> Chain:
    """Return the chain of the first steps, as many as it has places for."""
    empty = _empty(device)
    chain = Chain(
        {
            "first": empty, "first_channels": 1, "add1": empty, "add1_rows": 1, "add1_constants": empty,
            "add1_channels": 1, "add2": empty, "add2_rows": 1, "add2_constants": empty, "add2_channels": 1,
            "activation": empty, "entries": 0, "last": empty, "last_channels": 1, "FIRST": _NONE, "ADD1": _NONE,
            "ADD2": _NONE, "ACTIVATION": _NONE, "LAST": _NONE,
        }
    )  # fmt: skip
    places = iter(("first", "add1", "add2", "activation", "last"))
    for step, constants in zip(steps.steps, _constants(steps, device), strict=True):
        place = next((name for name in places if _fits(step, name)), None)
        if place is None:
            return chain
        _set_place(chain, place, step, constants, operands)
        chain.steps += 1
    return chain


def _fits(step: Step, place: str) -> bool:
    if isinstance(step, Requantize):
        return place in ("first", "last")
    return place.startswith("add") if isinstance(step, Add) else place == "activation"


def _set_place(chain: Chain, place: str, step: Step, constants: Tensor, operands: Sequence[Tensor]) -> None:
    arguments = chain.arguments
    if isinstance(step, Requantize):
        arguments |= {place: constants, f"{place}_channels": _channels(step), place.upper(): _form(step)}
    elif isinstance(step, Add):
        if chain.operands >= len(operands):
            raise ValueError(f"the steps add more operands than the {len(operands)} given")
        operand = operands[chain.operands].contiguous()
        chain.operands += 1
        arguments |= {place: operand, f"{place}_rows": operand.numel() // operand.shape[-1], place.upper(): _PLAIN}
        if step.requantize is not None:
            arguments |= {f"{place}_constants": constants, f"{place}_channels": _channels(step.requantize)}
            arguments[place.upper()] = _PLAIN + _form(step.requantize)
    else:
        kind = _GELU if isinstance(step, Gelu) else _TABLE
        entries = 0 if isinstance(step, Gelu) else step.breakpoints.numel()
        arguments |= {"activation": constants, "entries": entries, "ACTIVATION": kind}


def _channels(step: Requantize) -> int:
    return max(step.multiplier.numel(), step.shift.numel())


def _form(step: Requantize) -> int:
    return _PER_CHANNEL if _channels(step) > 1 else _PER_TENSOR


def _constants(steps: Steps, device: torch.device) -> list[Tensor]:
    """Return the constants of every step as one tensor each, as its device function reads them."""
    if device not in steps.prepared:
        steps.prepared[device] = [_pack(step).to(device) for step in steps.steps]
    tensors: list[Tensor] = steps.prepared[device]
    return tensors


def _pack(step: Step) -> Tensor:
    if isinstance(step, Add):
        return torch.zeros(2, dtype=torch.int32) if step.requantize is None else _pack(step.requantize)
    if isinstance(step, Requantize):
        multiplier, shift = torch.broadcast_tensors(step.multiplier.flatten(), step.shift.flatten())
        limits = torch.tensor([step.minimum, step.maximum], dtype=torch.int32)
        return torch.cat([limits, multiplier.to("cpu", torch.int32), shift.to("cpu", torch.int32)])
    if isinstance(step, Gelu):
        return torch.tensor([step.q_b, step.q_c, step.q_one, step.shift])
    return torch.cat([tensor.to("cpu", torch.int64) for tensor in (step.breakpoints, step.slopes, step.intercepts)])


@lru_cache(maxsize=1024)
def _softmax_tensor(softmax: SoftmaxConstants, device: torch.device) -> Tensor:
    names = ("levels", "reciprocal_bits", "q_ln2", "q_b", "q_c", "max_halvings", "lift", "drop")
    return torch.tensor([getattr(softmax, name) for name in names], device=device)


@lru_cache
def _empty(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def _is_narrow(softmax: SoftmaxConstants) -> bool:
    """Return whether i-exp fits 32 bits."""
    limit = max(softmax.q_c << softmax.lift, softmax.max_halvings * softmax.q_ln2, softmax.q_b)
    return limit < 1 << 31


def _is_simple(steps: Steps) -> bool:
    """Return whether there is at most one step, a requantization with one multiplier."""
    return not steps.steps or (
        len(steps.steps) == 1 and isinstance(steps.steps[0], Requantize) and _channels(steps.steps[0]) == 1
    )


def _norm_scalars(norm: NormConstants) -> tuple[int, int, int, int]:
    return norm.epsilon, norm.shift, norm.reciprocal_bits, norm.output_bits
