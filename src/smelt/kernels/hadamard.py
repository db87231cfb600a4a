"""The Hadamard transform of the last axis, orthonormal: the plain reference is the product with the whole matrix.

A size n = k 2^m needs a Hadamard matrix of order k, which Paley's two constructions give for the odd factors that the
widths of networks have. A transform costs n log n.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def hadamard_order(size: int) -> int | None:
    """The order k of the stored factor for a size, or None where there is no matrix of this form."""
    odd = size // (size & -size)
    order = 1 if odd == 1 else 4 * odd
    return order if size % order == 0 and _base(order) is not None else None


def hadamard_transform(x: Tensor) -> Tensor:  # [..., n] -> [..., n]
    """x H / sqrt(n), H = (Hadamard of order 2^m) x (Hadamard of order k), in the dtype of x but at least float32."""
    size = x.shape[-1]
    order = hadamard_order(size)
    if order is None:
        raise ValueError(f"there is no Hadamard matrix of order {size} here")
    y = x if x.dtype == torch.float64 else x.float()
    y = y.unflatten(-1, (size // order, order))
    if order > 1:
        y = y @ _base_tensor(order, y.device, y.dtype)
    half = 1
    while half < size // order:
        y = y.unflatten(-2, (-1, 2, half))
        y = torch.stack((y[..., 0, :, :] + y[..., 1, :, :], y[..., 0, :, :] - y[..., 1, :, :]), dim=-3).flatten(-4, -2)
        half *= 2
    return (y.flatten(-2) / math.sqrt(size)).to(x.dtype)


def hadamard_matrix(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The whole orthonormal matrix: the reference."""
    order = hadamard_order(size)
    if order is None:
        raise ValueError(f"there is no Hadamard matrix of order {size} here")
    matrix = torch.ones(1, 1, dtype=dtype)
    for _ in range(int(math.log2(size // order))):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.kron(matrix, _base_tensor(order, torch.device("cpu"), dtype)) / math.sqrt(size)


@lru_cache(maxsize=64)
def _base_tensor(order: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(_base(order), device=device, dtype=dtype)


@lru_cache(maxsize=16)
def _base(order: int) -> tuple[tuple[int, ...], ...] | None:
    """Paley's constructions: the first for a prime `order - 1` (3 modulo 4), the second for a prime `order / 2 - 1`
    (1 modulo 4)."""
    if order == 1:
        return ((1,),)
    first, second = order - 1, order // 2 - 1
    if first % 4 == 3 and _is_prime(first):
        core = _conference(first, corner=-1)
        return tuple(tuple(value + (i == j) for j, value in enumerate(row)) for i, row in enumerate(core))
    if second % 4 == 1 and _is_prime(second):
        core = _conference(second, corner=1)
        off, on = ((1, 1), (1, -1)), ((1, -1), (-1, -1))
        return tuple(
            tuple(core[i][j] * off[a][b] + (i == j) * on[a][b] for j in range(second + 1) for b in range(2))
            for i in range(second + 1)
            for a in range(2)
        )
    return None


def _conference(prime: int, corner: int) -> list[list[int]]:
    """A matrix of order prime + 1 with zeros on the diagonal, else plus and minus one, and orthogonal rows."""
    squares = {value * value % prime for value in range(1, prime)}

    def residue(value: int) -> int:
        return 0 if value % prime == 0 else (1 if value % prime in squares else -1)

    inner = [[residue(j - i) for j in range(prime)] for i in range(prime)]
    return [[0] + [1] * prime] + [[corner, *row] for row in inner]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
