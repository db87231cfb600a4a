"""The small operations of a decoder layer in Triton, fused with their neighbours: a launch costs more than they do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_norm_kernel(  # type: ignore[no-untyped-def]
    hidden, given, weight, result, width, epsilon, ADD: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr
):
    """hidden += given, then the root-mean-square norm of the sum. A token a program."""
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = lane < width
    here = hidden + token * width + lane
    x = tl.load(here, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(given + token * width + lane, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(here, x, mask=inside)
    if NORM:
        wide = x.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
        found = normed * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + token * width + lane, found.to(result.dtype.element_ty), mask=inside)


@triton.jit
def turned(low, high, weight, cosines, sines, angle, lane, inside, epsilon, HALF: tl.constexpr, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of a head, normed if asked, turned by the angle of a position."""
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        over = tl.rsqrt(tl.sum(wide_low * wide_low + wide_high * wide_high, axis=0) / (2 * HALF) + epsilon)
        wide_low = wide_low * over * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
        wide_high = wide_high * over * tl.load(weight + HALF + lane, mask=inside, other=0.0).to(tl.float32)
    cosine_low = tl.load(cosines + angle, mask=inside, other=0.0)
    sine_low = tl.load(sines + angle, mask=inside, other=0.0)
    cosine_high = tl.load(cosines + angle + HALF, mask=inside, other=0.0)
    sine_high = tl.load(sines + angle + HALF, mask=inside, other=0.0)
    return wide_low * cosine_low - wide_high * sine_low, wide_high * cosine_high + wide_low * sine_high


@triton.jit
def rotate_write_kernel(  # type: ignore[no-untyped-def]
    mixed, positions, places, cosines, sines, query_weight, key_weight, key_pages, value_pages, stride, heads,
    kv_heads, epsilon, HALF: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A head of a token a program: queries are turned in place, keys are turned and written to their page, values are
    written as they are. Of `mixed` [tokens, stride] the heads of queries come first, then those of keys, then those of
    values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, PADDED)
    inside = lane < HALF
    source = mixed + token * stride + head * 2 * HALF + lane
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    place = tl.load(places + token)
    angle = tl.load(positions + token) * 2 * HALF + lane
    written = inside & (place >= 0)
    if head < heads:
        low, high = turned(low, high, query_weight, cosines, sines, angle, lane, inside, epsilon, HALF, NORM)
        tl.store(source, low.to(mixed.dtype.element_ty), mask=inside)
        tl.store(source + HALF, high.to(mixed.dtype.element_ty), mask=inside)
    elif head < heads + kv_heads:
        low, high = turned(low, high, key_weight, cosines, sines, angle, lane, inside, epsilon, HALF, NORM)
        to = key_pages + (place * kv_heads + head - heads) * 2 * HALF + lane
        tl.store(to, low.to(key_pages.dtype.element_ty), mask=written)
        tl.store(to + HALF, high.to(key_pages.dtype.element_ty), mask=written)
    else:
        to = value_pages + (place * kv_heads + head - heads - kv_heads) * 2 * HALF + lane
        tl.store(to, low.to(value_pages.dtype.element_ty), mask=written)
        tl.store(to + HALF, high.to(value_pages.dtype.element_ty), mask=written)


@triton.jit
def gate_kernel(both, result, width, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up, where gate and up lie side by side."""
    token, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = lane < width
    gate = tl.load(both + token * 2 * width + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + token * 2 * width + width + lane, mask=inside, other=0.0).to(tl.float32)
    found = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + token * width + lane, found.to(result.dtype.element_ty), mask=inside)


def add_norm(hidden: Tensor, given: Tensor | None, weight: Tensor | None, epsilon: float) -> Tensor:
    """Add to the hidden states [tokens, width], in place, and give their norm (nothing new without a weight)."""
    tokens, width = hidden.shape
    result = hidden if weight is None else torch.empty_like(hidden)
    padded = triton.next_power_of_2(width)
    add_norm_kernel[(tokens,)](
        hidden, given, weight, result, width, epsilon, ADD=given is not None, NORM=weight is not None, WIDTH=padded,
        num_warps=max(1, min(8, padded // 512)),
    )  # fmt: skip
    return result


def rotate_write(
    mixed: Tensor, positions: Tensor, places: Tensor, cosines: Tensor, sines: Tensor, key_pages: Tensor,
    value_pages: Tensor, heads: int, norms: tuple[Tensor, Tensor] | None = None, epsilon: float = 0.0,
) -> None:  # fmt: skip
    """Queries in place, keys and values to their pages [blocks, size, kv heads, width]."""
    kv_heads, width = key_pages.shape[2:]
    query_weight, key_weight = norms or (cosines, cosines)
    rotate_write_kernel[(mixed.shape[0], heads + 2 * kv_heads)](
        mixed, positions, places, cosines, sines, query_weight, key_weight, key_pages, value_pages, mixed.stride(0),
        heads, kv_heads, epsilon, HALF=width // 2, PADDED=triton.next_power_of_2(width // 2), NORM=norms is not None,
        num_warps=1,
    )  # fmt: skip


def gate(both: Tensor) -> Tensor:
    """[tokens, 2 * width] -> [tokens, width]"""
    tokens, width = both.shape[0], both.shape[1] // 2
    result = torch.empty(tokens, width, dtype=both.dtype, device=both.device)
    tile = min(1024, triton.next_power_of_2(width))
    gate_kernel[(tokens, triton.cdiv(width, tile))](both, result, width, TILE=tile, num_warps=4)
    return result
