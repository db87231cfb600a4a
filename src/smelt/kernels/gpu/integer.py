"""Kernels of integer-only networks on a GPU: int8 products on tensor cores, with the elementwise steps in registers.

A kernel applies a chain of steps: a requantization, two sums, an activation and a requantization, each optional. Longer
sequences of steps continue in further passes of the elementwise kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from smelt.kernels.gpu.integer_chain import (
    NONE,
    PLAIN,
    PreparedStep,
    chain_of,
    prepare,
    softmax_form,
    softmax_tensor,
)
from smelt.kernels.gpu.integer_kernels import attention_kernel, gemm_kernel, map_kernel, norm_kernel, softmax_kernel
from smelt.kernels.integer_interface import (
    NO_STEPS,
    IntegerKernels,
    NormConstants,
    PackedWeight,
    Requantize,
    SoftmaxConstants,
    Steps,
    mask_rows,
)

MAX_ATTENTION_KEYS = 512  # scores of 16 queries stay in registers; more would spill
NORM_WARPS = 2  # what is computed once per row, every warp computes


@dataclass(frozen=True)
class Tile:
    """A tile of a product: its size, warps and pipeline stages.

    tma: the copy engine fetches the operands. splits: parts of the columns that are requantized one after another.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tma: bool = False
    splits: int = 1
    registers: int | None = None  # at most, per thread


TILES: dict[tuple[int, int, int], Tile] = {}  # measured on one shape (m, n, k)


class GpuKernels(IntegerKernels):
    """Triton kernels."""

    name = "gpu"
    has_tanh = True

    def pack(self, weight: Tensor, is_unsigned: bool = False) -> PackedWeight:
        channels, columns = weight.shape
        return PackedWeight(weight.contiguous(), None, channels, columns, is_unsigned)

    def join(self, weights: Sequence[PackedWeight]) -> PackedWeight | None:
        if any(weight.is_unsigned for weight in weights):
            return None
        return self.pack(torch.cat([weight.data for weight in weights]))

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
        chain = chain_of(steps, operands, a.device)
        rest = Steps(steps.steps[chain.steps :])
        out = torch.empty(outer, inner, m, n, dtype=torch.int32 if rest.steps else dtype, device=a.device)
        if not out.numel():
            return out.to(dtype)
        tile = tile_for(outer * inner, m, n, k)
        is_described = tile.tma and outer * inner == 1 and all(_has_descriptor(x) for x in (a, b))
        gemm_kernel[(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns), outer * inner)](
            _descriptor(a, tile.rows, tile.depth) if is_described else a,
            _descriptor(b, tile.columns, tile.depth) if is_described else b,
            bias if bias is not None else out, out, m, n, k, inner, *a.stride()[:3], *b.stride()[:3],
            **chain.arguments, HAS_BIAS=bias is not None, EVEN_K=k % tile.depth == 0, BLOCK_M=tile.rows,
            BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP_M=8, TMA=is_described, SPLITS=tile.splits,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
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
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
        out = torch.empty(batch, queries, heads, head_dim, dtype=dtype, device=query.device)
        visible = out if mask is None else mask.expand(batch, heads, queries, keys)
        if mask is not None and visible.stride(3) != 1:
            visible = visible.contiguous()
        block_n = max(triton.next_power_of_2(keys), 32)
        block_m, warps = attention_tile(block_n)
        score, last = (
            prepare(s, query.device)[0] if s.steps else PreparedStep(out, NONE) for s in (score_steps, steps)
        )
        attention_kernel[(triton.cdiv(queries, block_m), batch * heads)](
            query, key, value, out, visible, queries, keys, head_dim, heads, *query.stride()[:3], *key.stride()[:3],
            *value.stride()[:3], *visible.stride()[:3], softmax_tensor(softmax, query.device), score.constants,
            last.constants, SCORE=score.form, LAST=last.form, NARROW=softmax_form(softmax, keys),
            HAS_MASK=mask is not None, MASK_ROWS=visible.stride(2) != 0, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_D=max(triton.next_power_of_2(head_dim), 32), num_warps=warps,
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
                x, out, mask_bytes, rows_per_mask, mask_bytes.shape[1], length, softmax_tensor(softmax, x.device),
                NARROW=softmax_form(softmax, length), BLOCK=triton.next_power_of_2(length), num_warps=4,
            )  # fmt: skip
        return out

    def norm(
        self, x: Tensor, steps: Steps, norm: NormConstants, outputs: Sequence[tuple[Steps, torch.dtype]],
        operands: Sequence[Tensor] = (),
    ) -> list[Tensor]:  # fmt: skip
        chain, x = chain_of(steps, operands, x.device), x.contiguous()
        if chain.steps < len(steps.steps):
            x, chain = self.map(x, steps, torch.int32, operands), chain_of(NO_STEPS, (), x.device)
        fused = [
            len(after.steps) <= 1 and all(isinstance(step, Requantize) for step in after.steps) for after, _ in outputs
        ]
        results = [
            torch.empty(x.shape, dtype=dtype if is_fused else torch.int32, device=x.device)
            for is_fused, (_, dtype) in zip(fused, outputs, strict=True)
        ]
        if x.numel():
            targets, forms = [], [NONE, NONE]
            for index, (out, is_fused, (after, _)) in enumerate(zip(results, fused, outputs, strict=True)):
                forms[index] = PLAIN
                targets += [out, out, 1]
                if is_fused and after.steps:
                    prepared = prepare(after, x.device)[0]
                    forms[index] += prepared.form
                    targets[-2:] = [prepared.constants, prepared.channels]
            targets += [results[0], results[0], 1] if len(results) == 1 else []
            length = x.shape[-1]
            norm_kernel[(x.numel() // length,)](
                x, norm.weight, norm.weight if norm.bias is None else norm.bias, *targets, length,
                *_norm_scalars(norm), **chain.arguments, CENTERED=norm.bias is not None,
                NARROW=norm.shift == 0, OUT=forms[0], OUT2=forms[1], BLOCK=triton.next_power_of_2(length),
                num_warps=NORM_WARPS,
            )  # fmt: skip
        return [
            result if is_fused else self.map(result, after, dtype)
            for result, is_fused, (after, dtype) in zip(results, fused, outputs, strict=True)
        ]

    def map(self, x: Tensor, steps: Steps, dtype: torch.dtype, operands: Sequence[Tensor] = ()) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        chain = chain_of(steps, operands, x.device)
        rest = Steps(steps.steps[chain.steps :])
        out = torch.empty(x.shape, dtype=torch.int32 if rest.steps else dtype, device=x.device)
        if x.numel():
            map_kernel[(triton.cdiv(x.numel(), 1024),)](
                x, out, x.numel(), width, **chain.arguments, BLOCK=1024, num_warps=4
            )
        return self.map(out, rest, dtype, operands[chain.operands :]) if rest.steps else out


def tile_for(batch: int, m: int, n: int, k: int) -> Tile:
    """Return the tile of a product of `batch` matrices."""
    if batch == 1 and (m, n, k) in TILES:
        return TILES[m, n, k]
    depth = 128 if k >= 128 else max(triton.next_power_of_2(k), 32)
    if batch * triton.cdiv(m, 128) * triton.cdiv(n, 128) >= 128:
        # Two programs per multiprocessor: one multiplies, one requantizes; without splits, registers would spill.
        return Tile(128, 128, depth, 4, 3, splits=4)
    if m <= 16:
        return Tile(16, 64, depth, 4, 4)
    return Tile(64, 64, depth, 4, 4)


def attention_tile(keys: int) -> tuple[int, int]:
    """Return the queries and warps of a program of attention over so many keys."""
    return (64 if keys <= 128 else 32 if keys <= 256 else 16), 4


def _has_descriptor(x: Tensor) -> bool:
    """Return whether the copy engine can read the matrices of x."""
    return x.data_ptr() % 16 == 0 and x.stride(2) % 16 == 0


def _descriptor(x: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape[2:]), [x.stride(2), 1], [rows, columns])


def _is_simple(steps: Steps) -> bool:
    """Return whether there is at most one step, a requantization with one multiplier."""
    if not steps.steps:
        return True
    step = steps.steps[0]
    return len(steps.steps) == 1 and isinstance(step, Requantize) and step.multiplier.numel() == step.shift.numel() == 1


def _norm_scalars(norm: NormConstants) -> tuple[int, int, int, int]:
    return norm.epsilon, norm.shift, norm.reciprocal_bits, norm.output_bits
