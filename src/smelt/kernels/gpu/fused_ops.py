"""Small operations of a decoder layer in Triton, fused because a launch costs more than the work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smelt.kernels.gpu.arch import UNALIGNED_ARGS


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    hidden, residual, weight, result, width, epsilon, ADD: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Add `residual` to `hidden`, then apply RMSNorm. One token per program."""
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = lane < width
    address = hidden + token * width + lane
    x = tl.load(address, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual + token * width + lane, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(address, x, mask=inside)
    if NORM:
        x32 = x.to(tl.float32)
        normed = x32 * tl.rsqrt(tl.sum(x32 * x32, axis=0) / width + epsilon)
        scaled = normed * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + token * width + lane, scaled.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def embed_kernel(token_ids, slots, last_tokens, embeddings, result, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Look up the embedding of a token, or of the last token of its slot if the id is negative."""
    position, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + position)
    if token < 0:
        token = tl.load(last_tokens + tl.load(slots + position))
    inside = lane < width
    row = tl.load(embeddings + token * width + lane, mask=inside, other=0.0)
    tl.store(result + position * width + lane, row, mask=inside)


@triton.jit
def silu_and_mul_kernel(gate_up, result, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute silu(gate) * up, concatenated in `gate_up`."""
    token, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    gate = tl.load(gate_up + token * 2 * width + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + lane, mask=inside, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + token * width + lane, activated.to(result.dtype.element_ty), mask=inside)


@triton.jit
def argmax_split_kernel(logits, values, tokens, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the most likely token of one split of the vocabulary; ties go to the first."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    value, index = tl.max(x, axis=0, return_indices=True)
    tl.store(values + row * tl.num_programs(1) + split, value)
    tl.store(tokens + row * tl.num_programs(1) + split, split * BLOCK + index)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGS)
def argmax_merge_kernel(values, tokens, slots, last_tokens, result, num_splits, MAX_SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the most likely token over all splits and store it as the last token of the row's slot."""
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, MAX_SPLITS)
    x = tl.load(values + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    _, index = tl.max(x, axis=0, return_indices=True)
    token = tl.load(tokens + row * num_splits + index)
    tl.store(result + row, token)
    tl.store(last_tokens + tl.load(slots + row), token)


def argmax_tokens(logits: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    """Return the argmax tokens [rows] of logits [rows, vocab_size], stored as the last tokens of their slots too."""
    rows, vocab_size = logits.shape
    num_splits = triton.cdiv(vocab_size, 4096)
    values = torch.empty(rows, num_splits, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, num_splits, dtype=torch.int64, device=logits.device)
    result = torch.empty(rows, dtype=torch.int64, device=logits.device)
    argmax_split_kernel[(rows, num_splits)](logits, values, tokens, vocab_size, BLOCK=4096, num_warps=8)
    padded = triton.next_power_of_2(num_splits)
    argmax_merge_kernel[(rows,)](values, tokens, slots, last_tokens, result, num_splits, MAX_SPLITS=padded, num_warps=1)
    return result


def embed(token_ids: Tensor, slots: Tensor, last_tokens: Tensor, embeddings: Tensor) -> Tensor:
    """Look up embeddings [vocab_size, width] of tokens [tokens]; a negative id means the last token of its slot."""
    tokens, width = len(token_ids), embeddings.shape[1]
    result = torch.empty(tokens, width, dtype=embeddings.dtype, device=token_ids.device)
    embed_kernel[(tokens, triton.cdiv(width, 1024))](
        token_ids, slots, last_tokens, embeddings, result, width, BLOCK=1024
    )
    return result


def add_rms_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Tensor:
    """Add to the hidden states [tokens, width] in place and return their RMSNorm (unchanged without a weight)."""
    tokens, width = hidden.shape
    result = hidden if weight is None else torch.empty_like(hidden)
    padded = triton.next_power_of_2(width)
    add_rms_norm_kernel[(tokens,)](
        hidden, residual, weight, result, width, epsilon, ADD=residual is not None, NORM=weight is not None,
        BLOCK=padded, num_warps=max(1, min(8, padded // 512)),
    )  # fmt: skip
    return result


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up: [tokens, 2 * width] -> [tokens, width]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    tile = min(1024, triton.next_power_of_2(width))
    silu_and_mul_kernel[(tokens, triton.cdiv(width, tile))](gate_up, result, width, BLOCK=tile, num_warps=4)
    return result
