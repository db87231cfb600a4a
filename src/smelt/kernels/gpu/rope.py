"""RoPE in Triton, fused with the Q/K norms and with storing new keys and values in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gpu.arch import PDL, UNALIGNED_ARGS
from smelt.kernels.gpu.pages import ClusteredHeadPages, head_pages, heads_per_page_of, key_rows, pointers, strides
from smelt.kernels.gpu.rows import (
    UNQUANTIZED,
    hadamard_if,
    head_dim_of,
    kernel_constants,
    padded_head_dim,
    store_kv_row,
)
from smelt.kernels.kv_quant import KVQuantFormat

MANY_TOKENS = 256  # from here on each program takes several heads, as more programs exist than run at once
HEADS_PER_PROGRAM = 8  # a power of two


@triton.jit
def apply_rope(  # type: ignore[no-untyped-def]
    source, offset, inside, norm, cos, sin, angle, lane, epsilon, head_dim, HALF: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr = False,
):  # fmt: skip
    """Load heads at source + offset [..., HEAD_DIM], normalize them if NORM, and rotate by the angle of a position, in
    float32. The partners of all values are loaded as well: neighbors if INTERLEAVED, else HALF apart. The sine of the
    values that do not turn is 0."""
    if INTERLEAVED:
        first = lane % 2 == 0
        partner = lane ^ 1
    else:
        first = lane < HALF
        partner = tl.where(first, lane + HALF, lane - HALF)
    x = tl.load(source + offset + lane, mask=inside, other=0.0).to(tl.float32)
    partner_x = tl.load(source + offset + partner, mask=inside, other=0.0).to(tl.float32)
    in_head = lane < head_dim
    if NORM:
        inv_rms = tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) / head_dim + epsilon)
        x = x * inv_rms * tl.load(norm + lane, mask=in_head, other=0.0).to(tl.float32)
        partner_x = partner_x * inv_rms * tl.load(norm + partner, mask=in_head, other=0.0).to(tl.float32)
    cos_row = tl.load(cos + angle * head_dim + lane, mask=in_head, other=0.0)
    sin_row = tl.load(sin + angle * head_dim + lane, mask=in_head, other=0.0)
    return x * cos_row + tl.where(first, -partner_x, partner_x) * sin_row


@triton.jit
def store_heads(  # type: ignore[no-untyped-def]
    pages, rows, x, written, lane, head_dim, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr,
    HALF_DIM: tl.constexpr,
):  # fmt: skip
    """Store heads [count, HEAD_DIM] in their rows [count]; quantized rows are stored one at a time."""
    if FORMAT == UNQUANTIZED:
        tl.store(pages + rows[:, None] * head_dim + lane, x, mask=written[:, None] & (lane < head_dim))
    else:
        row, row_values = tl.sum(rows, axis=0), tl.reshape(x, [HEAD_DIM])
        in_range = tl.sum(written.to(tl.int32), axis=0) > 0
        store_kv_row(pages, row, row_values, in_range, tl.arange(0, HEAD_DIM), head_dim, FORMAT, ROW_BYTES, HALF_DIM)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def rope_and_store_kv_kernel(  # type: ignore[no-untyped-def]
    qkv, positions, slot_mapping, cos, sin, query_norm, key_norm, queries, key_pages, value_pages, block_tables,
    seq_len_offsets, head_cluster, head_column, stride, table_stride, cluster_stride, offset_stride, heads, kv_heads,
    epsilon, head_dim, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_PER_PAGE: tl.constexpr, FORMAT: tl.constexpr, ROW_BYTES: tl.constexpr, HALF_DIM: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    KV_HEADS_PER_PROGRAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Handle HEADS_PER_PROGRAM query heads, or KV_HEADS_PER_PROGRAM keys or values, of one token. In `qkv`
    [tokens, stride] query heads come first, then keys, then values, to which RoPE does not apply."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, HEAD_DIM)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = qkv + token * stride
    angle = tl.load(positions + token)
    groups, kv_groups = tl.cdiv(heads, HEADS_PER_PROGRAM), tl.cdiv(kv_heads, KV_HEADS_PER_PROGRAM)
    if part < groups:
        head = (part * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM))[:, None]
        inside = (head < heads) & (lane < head_dim)
        offset = head * head_dim
        query = apply_rope(
            source, offset, inside, query_norm, cos, sin, angle, lane, epsilon, head_dim, HALF, NORM, INTERLEAVED
        )
        query = hadamard_if(query, queries.dtype.element_ty, HADAMARD_STEPS)
        tl.store(queries + (token * heads + head) * head_dim + lane, query, mask=inside)
        return
    slot = tl.load(slot_mapping + token)
    kv_head = (part - groups) % kv_groups * KV_HEADS_PER_PROGRAM + tl.arange(0, KV_HEADS_PER_PROGRAM)
    in_range = kv_head < kv_heads
    if HEADS_PER_PAGE:  # slot_mapping holds slots of requests
        table, seq_len_offset, block_rows, token_rows, first_row = head_pages(
            block_tables, seq_len_offsets, head_cluster, head_column, slot, tl.where(in_range, kv_head, 0),
            table_stride, cluster_stride, offset_stride, kv_heads, BLOCK_SIZE, HEADS_PER_PAGE,
        )  # fmt: skip
        rows = key_rows(table, angle + seq_len_offset, slot >= 0, block_rows, token_rows, first_row, BLOCK_SIZE)
    else:
        rows = slot * kv_heads + kv_head
    inside = in_range[:, None] & (lane < head_dim)
    written = in_range & (slot >= 0)
    if part < groups + kv_groups:
        offset = (heads + kv_head)[:, None] * head_dim
        key = apply_rope(
            source, offset, inside, key_norm, cos, sin, angle, lane, epsilon, head_dim, HALF, NORM, INTERLEAVED
        )
        key = hadamard_if(key, qkv.dtype.element_ty, HADAMARD_STEPS)
        store_heads(key_pages, rows, key, written, lane, head_dim, HEAD_DIM, FORMAT, ROW_BYTES, HALF_DIM)
    else:
        offset = (heads + kv_heads + kv_head)[:, None] * head_dim
        value = tl.load(source + offset + lane, mask=inside, other=0.0)
        value = hadamard_if(value, qkv.dtype.element_ty, HADAMARD_STEPS)
        store_heads(value_pages, rows, value, written, lane, head_dim, HEAD_DIM, FORMAT, ROW_BYTES, HALF_DIM)


@dataclass(frozen=True)
class RotaryParams:
    """cos and sin of every position [positions, head_dim], and the weights of the Q/K norms.

    Only the first `rotary_dim` values of a head turn (None: all); behind them, cos is 1 and sin 0.
    """

    cos: Tensor
    sin: Tensor
    qk_norms: tuple[Tensor, Tensor] | None = None  # weights of the query norm and the key norm
    eps: float = 0.0
    rotary_dim: int | None = None
    interleaved: bool = False  # neighbors turn together, not values half of rotary_dim apart

    @property
    def half(self) -> int:
        """The distance of values that turn together."""
        return (self.cos.shape[1] if self.rotary_dim is None else self.rotary_dim) // 2


def rope_and_store_kv(
    qkv: Tensor, positions: Tensor, slot_mapping: Tensor, rotary: RotaryParams, key_pages: Tensor, value_pages: Tensor,
    head_pages: ClusteredHeadPages | None = None, kv_quant: KVQuantFormat | None = None,
) -> Tensor:  # fmt: skip
    """Apply RoPE to `qkv` [tokens, (heads + 2 * kv heads) * head_dim] and store keys and values in their pages [blocks,
    block_size, kv heads, head_dim], except where the slot is -1. Returns queries [tokens, heads, head_dim], rotated as
    the keys of the KV format are. With `head_pages`, slot_mapping holds slots of requests."""
    size, kv_heads, last = key_pages.shape[1:]
    head_dim = head_dim_of(kv_quant, last)
    if head_pages is not None:
        kv_heads = len(head_pages.head_cluster)
    block_tables = slot_mapping if head_pages is None else head_pages.block_tables
    tokens, heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    queries = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm = rotary.qk_norms or (rotary.cos, rotary.cos)
    heads_per_program = HEADS_PER_PROGRAM if tokens >= MANY_TOKENS else 1
    kv_heads_per_program = heads_per_program if kv_quant is None else 1
    programs = triton.cdiv(heads, heads_per_program) + 2 * triton.cdiv(kv_heads, kv_heads_per_program)
    rope_and_store_kv_kernel[(tokens, programs)](
        qkv, positions, slot_mapping, rotary.cos, rotary.sin, query_norm, key_norm, queries, key_pages, value_pages,
        block_tables, *pointers(head_pages, block_tables), qkv.stride(0), *strides(head_pages, block_tables), heads,
        kv_heads, rotary.eps, head_dim, HEAD_DIM=padded_head_dim(kv_quant, head_dim), HALF=rotary.half,
        NORM=rotary.qk_norms is not None, BLOCK_SIZE=size, HEADS_PER_PAGE=heads_per_page_of(head_pages),
        **kernel_constants(kv_quant), INTERLEAVED=rotary.interleaved, HEADS_PER_PROGRAM=heads_per_program,
        KV_HEADS_PER_PROGRAM=kv_heads_per_program, PDL=PDL, num_warps=1, launch_pdl=PDL,
    )  # fmt: skip
    return queries
