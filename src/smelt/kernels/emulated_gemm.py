"""Matrix products with an emulated accumulator: a narrow float, rounded after every addition, optionally in chunks.

A product of two operands is exact; `accumulator <- round(accumulator + product)` follows, along the inner dimension in
order. With `chunk_size`, each chunk is summed on its own and the sums of chunks are then added with the same rounding
(chunk-based accumulation, Wang et al., 2018). Contains the reference; the fast kernels return the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.kernels.accumulation import Accumulation
from smelt.kernels.dispatch import CPU, GPU, has_triton
from smelt.kernels.dispatch import select_backend as _select_backend
from smelt.numerics.float_format import FloatFormat, Rounding, check_rounding

_WORD = 0xFFFFFFFF


@torch.no_grad()
def emulated_matmul(
    a: Tensor,
    b: Tensor,
    accumulator: FloatFormat,
    chunk_size: int | None = None,
    rounding: Rounding = "nearest",
    *,
    operands: FloatFormat | None = None,
    round_operands: bool = True,
    saturate: bool = True,
    seed: int = 0,
) -> Tensor:
    """Multiply a [..., length] by b [length, columns] with an emulated accumulator -> [..., columns] in float32.

    operands: format to which a and b are rounded to nearest first; with a small one, kernels may compute in float32.
    round_operands: false if a and b have values of that format only.
    seed: of stochastic rounding: the random bits of an addition depend on seed, output element and step only.
    No gradients pass through: a layer calls this for its forward, backward and gradient products.
    """
    _check(a, b, chunk_size, rounding, seed)
    shape, length = a.shape[:-1], a.shape[-1]
    a, b = (_operand(tensor, operands if round_operands else None, saturate) for tensor in (a, b))
    chunk_size = max(min(chunk_size or length, length), 1)
    accumulation = Accumulation(accumulator, chunk_size, rounding, saturate, seed, operands)
    matmul: Any = _kernel(a) or emulated_matmul_reference
    result: Tensor = matmul(a.reshape(math.prod(shape), length), b, accumulation)
    return result.reshape(*shape, b.shape[1])


def emulated_sum(
    x: Tensor,
    accumulator: FloatFormat,
    chunk_size: int | None = None,
    rounding: Rounding = "nearest",
    *,
    saturate: bool = True,
    seed: int = 0,
) -> Tensor:
    """Add up x [..., length] along its last dimension with an emulated accumulator -> [...] in float32."""
    shape, length = x.shape[:-1], x.shape[-1]
    columns = x.reshape(math.prod(shape), length).T  # kernels are vectorized over columns
    ones = torch.ones(1, length, device=x.device)
    result = emulated_matmul(ones, columns, accumulator, chunk_size, rounding, saturate=saturate, seed=seed)
    return result.reshape(shape)


def round_to(x: Tensor, number_format: FloatFormat) -> Tensor:
    """Round float32 values to nearest, saturating, as `FloatFormat.round`; on a GPU in one pass."""
    if select_backend(x) == GPU:
        from smelt.kernels.gpu import emulated_gemm as gpu

        if gpu.can_round(number_format):
            return gpu.round_to(x, number_format)
    return number_format.round(x)


def select_backend(x: Tensor) -> str:
    """Return the backend that multiplies such a tensor."""
    return _select_backend(
        "emulated GEMM",
        (
            (GPU, lambda: x.is_cuda and has_triton()),
            (CPU, lambda: x.device.type == "cpu" and _has_library()),
        ),
    )


def _kernel(x: Tensor) -> Any:
    """Return the fast kernel; None for the reference."""
    backend = select_backend(x)
    if backend == GPU:
        from smelt.kernels.gpu import emulated_gemm as gpu

        return gpu.emulated_matmul
    if backend == CPU:
        from smelt.kernels.cpu import emulated_gemm as cpu

        return cpu.emulated_matmul
    return None


def _has_library() -> bool:
    from smelt.kernels.cpu.emulated_gemm import library

    return library() is not None


def _check(a: Tensor, b: Tensor, chunk_size: int | None, rounding: str, seed: int) -> None:
    check_rounding(rounding)
    if a.dim() == 0 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise FormatError(f"shapes {list(a.shape)} and {list(b.shape)} do not multiply; give [..., n] and [n, m].")
    if chunk_size is not None and chunk_size < 1:
        raise FormatError(f"a chunk has at least one product, not {chunk_size}; None means no chunks.")
    if not 0 <= seed < 1 << 63:
        raise FormatError(f"a seed is between 0 and 2^63 - 1, not {seed}.")


def _operand(x: Tensor, operands: FloatFormat | None, saturate: bool) -> Tensor:
    return x.float() if operands is None else operands.round(x.float(), saturate=saturate)


def emulated_matmul_reference(a: Tensor, b: Tensor, accumulation: Accumulation) -> Tensor:
    """Multiply a [rows, length] by b [length, columns], both float32, with PyTorch operations."""
    length = a.shape[1]
    a, b = a.double(), b.double()  # so that products are exact
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for chunk, start in enumerate(range(0, length, accumulation.chunk_size)):
        partial = torch.zeros_like(total)
        for step in range(start, min(start + accumulation.chunk_size, length)):
            partial = _add(partial, a[:, step, None] * b[step], accumulation, step)
        total = _add(total, partial, accumulation, length + chunk)
    return total.float()


def _add(x: Tensor, y: Tensor, accumulation: Accumulation, step: int) -> Tensor:
    """Add and round to the accumulator's format. `step` numbers the additions of an element."""
    uniform = None
    if accumulation.rounding == "stochastic":
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
        uniform = philox(accumulation.seed, step, rows[:, None], columns[None, :]).double() / 2.0**32
    return accumulation.format.round(
        sum_to_odd(x, y), accumulation.rounding, saturate=accumulation.saturate, uniform=uniform
    )


def sum_to_odd(x: Tensor, y: Tensor) -> Tensor:
    """Add float64 tensors, rounding to odd: an inexact sum becomes the neighbor whose last bit is 1.

    Rounding that to fewer bits gives what rounding the exact sum would, in every mode (Boldo and Melquiond, 2008).
    """
    total = x + y
    virtual = total - x
    error = (x - (total - virtual)) + (y - virtual)  # exact (Knuth's TwoSum)
    bits = total.view(torch.int64)
    outward = ((error > 0) == (total > 0)).long()
    move = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    return torch.where(move, bits + 2 * outward - 1, bits).view(torch.float64)


def philox(seed: int, c0: int | Tensor, c1: Tensor, c2: Tensor) -> Tensor:
    """Return the first word of Philox-4x32-10 with counter (c0, c1, c2, 0), as int64 below 2^32."""
    x0, x1, x2 = torch.broadcast_tensors(torch.as_tensor(c0, device=c1.device), c1, c2)
    x3 = torch.zeros_like(x0)
    key0, key1 = seed & _WORD, seed >> 32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2  # modulo 2^64
        x0, x1 = (product1 >> 32 & _WORD) ^ x1 ^ key0, product1 & _WORD
        x2, x3 = (product0 >> 32 & _WORD) ^ x3 ^ key1, product0 & _WORD
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return x0
