"""Small operations of a decoder layer in Triton, fused because a launch costs more than the work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smelt.kernels.gpu.arch import UNALIGNED_ARGS


@triton.jit
def add_norm_kernel(  # type: ignore[no-untyped-def]
    hidden, given, weight, result, width, epsilon, ADD: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr
):
    """Add `given` to `hidden`, then apply RMSNorm. One token per program."""
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = lane < width
    address = hidden + token * width + lane
    x = tl.load(address, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(given + token * width + lane, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(address, x, mask=inside)
    if NORM:
        x32 = x.to(tl.float32)
        normed = x32 * tl.rsqrt(tl.sum(x32 * x32, axis=0) / width + epsilon)
        scaled = normed * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + token * width + lane, scaled.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def embed_kernel(known, slots, last, embeddings, result, width, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Look up the embedding of a known token, or of the last token of its slot if it is negative."""
    position, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = tl.load(known + position)
    if token < 0:
        token = tl.load(last + tl.load(slots + position))
    inside = lane < width
    row = tl.load(embeddings + token * width + lane, mask=inside, other=0.0)
    tl.store(result + position * width + lane, row, mask=inside)


@triton.jit
def gate_kernel(both, result, width, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute silu(gate) * up, concatenated in `both`."""
    token, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = lane < width
    gate = tl.load(both + token * 2 * width + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + token * 2 * width + width + lane, mask=inside, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + token * width + lane, activated.to(result.dtype.element_ty), mask=inside)


@triton.jit
def largest_part_kernel(logits, values, tokens, vocabulary, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the most likely token of one part of the vocabulary; ties go to the first."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    value, index = tl.max(x, axis=0, return_indices=True)
    tl.store(values + row * tl.num_programs(1) + part, value)
    tl.store(tokens + row * tl.num_programs(1) + part, part * TILE + index)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def largest_kernel(values, tokens, slots, last, result, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the most likely token over all parts and store it as the last token of the row's slot."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    x = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    _, index = tl.max(x, axis=0, return_indices=True)
    token = tl.load(tokens + row * parts + index)
    tl.store(result + row, token)
    tl.store(last + tl.load(slots + row), token)


def argmax_tokens(logits: Tensor, slots: Tensor, last: Tensor) -> Tensor:
    """Return the argmax tokens [rows] of logits [rows, vocabulary], stored as the last tokens of their slots too."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, 4096)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    result = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest_part_kernel[(rows, parts)](logits, values, tokens, vocabulary, TILE=4096, num_warps=8)
    padded = triton.next_power_of_2(parts)
    largest_kernel[(rows,)](values, tokens, slots, last, result, parts, PARTS=padded, num_warps=1)
    return result


def embed(known: Tensor, slots: Tensor, last: Tensor, embeddings: Tensor) -> Tensor:
    """Look up embeddings [vocabulary, width] of tokens [tokens], some of which are known only on the device."""
    tokens, width = len(known), embeddings.shape[1]
    result = torch.empty(tokens, width, dtype=embeddings.dtype, device=known.device)
    embed_kernel[(tokens, triton.cdiv(width, 1024))](known, slots, last, embeddings, result, width, TILE=1024)
    return result


def add_rms_norm(hidden: Tensor, given: Tensor | None, weight: Tensor | None, epsilon: float) -> Tensor:
    """Add to the hidden states [tokens, width] in place and return their RMSNorm (unchanged without a weight)."""
    tokens, width = hidden.shape
    result = hidden if weight is None else torch.empty_like(hidden)
    padded = triton.next_power_of_2(width)
    add_norm_kernel[(tokens,)](
        hidden, given, weight, result, width, epsilon, ADD=given is not None, NORM=weight is not None, WIDTH=padded,
        num_warps=max(1, min(8, padded // 512)),
    )  # fmt: skip
    return result


def silu_and_mul(both: Tensor) -> Tensor:
    """Compute silu(gate) * up: [tokens, 2 * width] -> [tokens, width]."""
    tokens, width = both.shape[0], both.shape[1] // 2
    result = torch.empty(tokens, width, dtype=both.dtype, device=both.device)
    tile = min(1024, triton.next_power_of_2(width))
    gate_kernel[(tokens, triton.cdiv(width, tile))](both, result, width, TILE=tile, num_warps=4)
    return result
