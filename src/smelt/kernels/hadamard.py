"""Orthonormal Hadamard transform of the last axis; the reference is the product with the full matrix.

A size n = k 2^m needs a Hadamard matrix of order k = 4 x (odd factor): Paley's two constructions and Williamson's four
circulants give one for every odd factor up to 27 and for most larger ones that occur as layer widths. The matrix is a
Kronecker product of small ones, so that the transform takes a few small products: n (k + 64 + ...) work.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

LARGEST_FACTOR = 64  # a power of two: products of this size run at full speed, and a few suffice for any n
# Orders without a Paley construction: first rows of four symmetric circulants whose squares add up to 4 n I.
# The sign of entry i (and n - i) is bit i - 1; entry 0 is one. Found by search, checked by the tests.
WILLIAMSON = {
    13: (40, 46, 46, 23),
    23: (912, 1329, 1549, 1875),
    25: (2784, 1588, 666, 433),
    43: (628624, 1987996, 814346, 282873),
}
_Rows = tuple[tuple[int, ...], ...]


@torch.compiler.assume_constant_result
def hadamard_order(size: int) -> int | None:
    """Return the order k of the base matrix for a size; None if there is no matrix of this form."""
    if size < 1:
        return None
    odd = size // (size & -size)
    order = 1 if odd == 1 else 4 * odd
    return order if size % order == 0 and _base(order) is not None else None


def hadamard_transform(x: Tensor, *, inverse: bool = False) -> Tensor:  # [..., n] -> [..., n]
    """Return x H / sqrt(n), H = (Hadamard of order 2^m) x (Hadamard of order k), computed in at least float32.

    `inverse` multiplies with the transpose, which differs only if k > 1."""
    size = x.shape[-1]
    order = _order(size)
    y = x if x.dtype == torch.float64 else x.float()
    inner = _innermost(size, order)
    matrix = _factor(inner, y.device, y.dtype)
    y = (y.unflatten(-1, (size // inner, inner)) @ (matrix.T if inverse else matrix)).flatten(-2)
    while inner < size:
        factor = min(LARGEST_FACTOR, size // inner)
        y = y.unflatten(-1, (size // (factor * inner), factor, inner))
        y = (_factor(factor, y.device, y.dtype) @ y).flatten(-3)
        inner *= factor
    return y.to(x.dtype)


def hadamard_matrix(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the full orthonormal matrix: the reference."""
    order = _order(size)
    matrix = torch.ones(1, 1, dtype=dtype)
    for _ in range((size // order).bit_length() - 1):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.kron(matrix, torch.tensor(_base(order), dtype=dtype)) / math.sqrt(size)


def _order(size: int) -> int:
    order = hadamard_order(size)
    if order is None:
        raise ValueError(f"no Hadamard matrix of order {size} is implemented")
    return order


def _innermost(size: int, order: int) -> int:
    """Return the size of the first product: the base order times the powers of two that keep it small."""
    inner = order
    while inner < size and 2 * inner <= LARGEST_FACTOR:
        inner *= 2
    return inner


@torch.compiler.assume_constant_result
def _factor(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _cached_factor(size, device, dtype)


@lru_cache(maxsize=64)
def _cached_factor(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # cached: later calls may need gradients
        return hadamard_matrix(size).to(device, dtype)


@lru_cache(maxsize=16)
def _base(order: int) -> _Rows | None:
    """Return a Hadamard matrix of order 1 or 4 x odd, as rows of +1 and -1; None if no construction applies.

    Paley's first construction needs a prime `order - 1`, 3 modulo 4; his second a prime `order / 2 - 1`, 1 modulo 4.
    """
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
    return _williamson(order // 4) if order // 4 in WILLIAMSON else None


def _williamson(size: int) -> _Rows:
    """Return four circulants A, B, C, D in the pattern of the quaternions."""
    rows = [[1] + [1 - 2 * (bits >> (min(i, size - i) - 1) & 1) for i in range(1, size)] for bits in WILLIAMSON[size]]
    pattern = (((0, 1), (1, 1), (2, 1), (3, 1)), ((1, -1), (0, 1), (3, -1), (2, 1)),
               ((2, -1), (3, 1), (0, 1), (1, -1)), ((3, -1), (2, -1), (1, 1), (0, 1)))  # fmt: skip
    return tuple(
        tuple(sign * rows[circulant][(j - i) % size] for circulant, sign in blocks for j in range(size))
        for blocks in pattern
        for i in range(size)
    )


def _conference(prime: int, corner: int) -> list[list[int]]:
    """Return a matrix of order prime + 1 with orthogonal rows, zero on the diagonal and +1 or -1 elsewhere."""
    squares = {value * value % prime for value in range(1, prime)}

    def residue(value: int) -> int:
        return 0 if value % prime == 0 else (1 if value % prime in squares else -1)

    inner = [[residue(j - i) for j in range(prime)] for i in range(prime)]
    return [[0] + [1] * prime] + [[corner, *row] for row in inner]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
