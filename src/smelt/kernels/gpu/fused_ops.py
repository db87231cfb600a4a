"""Small operations of a decoder layer in Triton, fused because a launch costs more than the work."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smelt.kernels.gated_activation import SILU, GatedActivation
from smelt.kernels.gpu.activations import QuantizedRows, RowQuant, store_quantized
from smelt.kernels.gpu.arch import PDL, UNALIGNED_ARGS

MAX_QUANTIZED_WIDTH = 16384  # of a row that one program holds in registers


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    hidden, residual, weight, result, scales, static_scale, width, epsilon, clip_ratio, ADD: tl.constexpr,
    NORM: tl.constexpr, AMAX_CODE: tl.constexpr, SCALE_DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add `residual` to `hidden`, then apply RMSNorm, then quantize if AMAX_CODE is not 0. One token per program."""
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = lane < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
        if AMAX_CODE > 0.0:
            rounded = scaled.to(x.dtype).to(tl.float32)
            store_quantized(
                rounded, inside, result, scales, token, width, lane, static_scale, clip_ratio, AMAX_CODE, SCALE_DTYPE
            )
        else:
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
def act_and_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up, result, scales, static_scale, row_experts, width, clip_ratio, alpha, limit, ACTIVATION: tl.constexpr,
    AMAX_CODE: tl.constexpr, SCALE_DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate) * up, concatenated in `gate_up`; quantize it if AMAX_CODE is not 0: then one token per
    program. With `row_experts`, static scales are per expert."""
    token, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_up + token * 2 * width + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + lane, mask=inside, other=0.0).to(tl.float32)
    z = gate  # the activation is gate * sigmoid(z)
    if ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif ACTIVATION == "swiglu_oai":
        gate = tl.minimum(gate, limit)
        z = alpha * gate
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    activated = gate / (1.0 + tl.exp(-z)) * up
    if AMAX_CODE > 0.0:
        rounded = activated.to(gate_up.dtype.element_ty).to(tl.float32)
        if row_experts is not None:
            static_scale += tl.load(row_experts + token)
        store_quantized(
            rounded, inside, result, scales, token, width, lane, static_scale, clip_ratio, AMAX_CODE, SCALE_DTYPE
        )
    else:
        tl.store(result + token * width + lane, activated.to(result.dtype.element_ty), mask=inside)


@triton.jit
def joint_norm_kernel(  # type: ignore[no-untyped-def]
    qkv, query_weight, key_weight, query_width, key_width, epsilon, clip, CLIP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Apply RMSNorm to all queries or all keys of a token, and clip them; values (the third part) are only clipped."""
    token, part, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    width = tl.where(part == 0, query_width, key_width)
    first = tl.where(part == 0, 0, query_width + tl.where(part == 2, key_width, 0))
    inside = lane < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    address = qkv + token * (query_width + 2 * key_width) + first + lane
    x = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    if part < 2:
        weight = tl.where(part == 0, query_weight, key_weight)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
        x = x * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
    tl.store(address, x.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def argmax_split_kernel(logits, values, tokens, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the most likely token of one split of the vocabulary; ties go to the first.

    NaN counts as -inf: a comparison with it may choose the padding, whose index is no token, and looking up its
    embedding would end the process for all requests.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
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
    result = hidden if weight is None else torch.empty_like(hidden)
    _launch_norm(hidden, residual, weight, epsilon, result, None, None)
    return result


def add_rms_norm_quantize(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, quant: RowQuant
) -> QuantizedRows:
    """Add to the hidden states in place and return their RMSNorm, quantized by rows."""
    result = QuantizedRows.empty(hidden, hidden.shape[1], quant)
    _launch_norm(hidden, residual, weight, epsilon, result.codes, result.scales, quant)
    return result


def _launch_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float, result: Tensor,
    scales: Tensor | None, quant: RowQuant | None,
) -> None:  # fmt: skip
    tokens, width = hidden.shape
    padded = triton.next_power_of_2(width)
    add_rms_norm_kernel[(tokens,)](
        hidden, residual, weight, result, scales, quant and quant.static_scale, width, epsilon,
        quant.clip_ratio if quant else 1.0, ADD=residual is not None, NORM=weight is not None, **quant_constants(quant),
        BLOCK=padded, PDL=PDL, num_warps=max(1, min(8, padded // 512)), launch_pdl=PDL,
    )  # fmt: skip


def norm_and_clip_qkv(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, epsilon: float, clip: float | None
) -> None:
    """Apply RMSNorm to the queries and to the keys of all heads together, then clip, in place: Q, K and V
    are concatenated, [tokens, widths]."""
    query_width, key_width = len(query_weight), len(key_weight)
    padded = triton.next_power_of_2(max(query_width, key_width))
    joint_norm_kernel[(len(qkv), 2 if clip is None else 3)](
        qkv, query_weight, key_weight, query_width, key_width, epsilon, clip or 0.0, CLIP=clip is not None,
        BLOCK=padded, PDL=PDL, num_warps=max(1, min(8, padded // 512)), launch_pdl=PDL,
    )  # fmt: skip


def act_and_mul(gate_up: Tensor, activation: GatedActivation = SILU) -> Tensor:
    """Compute activation(gate) * up: [tokens, 2 * width] -> [tokens, width]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    tile = min(1024, triton.next_power_of_2(width))
    act_and_mul_kernel[(tokens, triton.cdiv(width, tile))](
        gate_up, result, None, None, None, width, 1.0, activation.alpha, activation.limit, ACTIVATION=activation.name,
        **quant_constants(None), BLOCK=tile, PDL=PDL, num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
    return result


def act_and_mul_quantize(
    gate_up: Tensor, quant: RowQuant, activation: GatedActivation = SILU, row_experts: Tensor | None = None
) -> QuantizedRows:
    """Compute activation(gate) * up: [tokens, 2 * width] -> [tokens, width], quantized by rows; width is at most
    MAX_QUANTIZED_WIDTH. With the expert of each row, `row_experts`, there is a static scale for each expert."""
    width = gate_up.shape[1] // 2
    result, tile = QuantizedRows.empty(gate_up, width, quant), triton.next_power_of_2(width)
    act_and_mul_kernel[(len(gate_up), 1)](
        gate_up, result.codes, result.scales, quant.static_scale, row_experts, width, quant.clip_ratio,
        activation.alpha, activation.limit, ACTIVATION=activation.name, **quant_constants(quant), BLOCK=tile, PDL=PDL,
        num_warps=max(1, min(16, tile // 512)), launch_pdl=PDL,
    )  # fmt: skip
    return result


def quant_constants(quant: RowQuant | None) -> dict[str, Any]:
    """Return the constants of kernels that quantize rows, or do not."""
    return {"AMAX_CODE": quant.amax_code if quant else 0.0, "SCALE_DTYPE": quant.scale_dtype if quant else ""}
