"""Random bit flips in stored tensors at a bit error rate (BER), undone exactly.

The number of flips is binomial over all stored bits; their positions are distinct and uniform. Flipped tensors are
copies that replace the originals inside a context, so the originals keep every bit, and kernels that prepared data from
them prepare again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from smelt.errors import ConfigError
from smelt.measure.robustness.storage import StoredTensor


def sample_flips(
    tensors: Sequence[StoredTensor], ber: float, generator: np.random.Generator, *, bit: int | None = None
) -> np.ndarray:
    """Sample the bits to flip, numbered through all tensors in order; with `bit` only that bit of every element."""
    check_ber(ber)
    sizes = np.array([entry.num_bits if bit is None else entry.num_elements for entry in tensors], dtype=np.int64)
    count = int(generator.binomial(int(sizes.sum()), ber))
    chosen = distinct_positions(int(sizes.sum()), count, generator)
    if bit is None:
        return chosen
    positions, bits_before, elements_before = [], 0, 0
    for entry, size in zip(tensors, sizes, strict=True):
        elements = chosen[(chosen >= elements_before) & (chosen < elements_before + size)] - elements_before
        positions.append(bits_before + entry.bit_positions(elements, bit))
        bits_before, elements_before = bits_before + entry.num_bits, elements_before + int(size)
    return np.concatenate(positions) if positions else np.zeros(0, dtype=np.int64)


def distinct_positions(total: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Sample `count` distinct integers below `total`, sorted, without allocating `total` of them. [count]"""
    if 2 * count > total:  # rejection would take many rounds
        return np.sort(generator.permutation(total)[:count])
    chosen = np.zeros(0, dtype=np.int64)
    while len(chosen) < count:
        new = generator.integers(0, total, count - len(chosen))
        chosen = np.union1d(chosen, new)
    return chosen


@contextmanager
def flipped_bits(tensors: Sequence[StoredTensor], positions: np.ndarray) -> Iterator[None]:
    """Flip these bits, numbered through all tensors in order, inside the context."""
    ends = np.cumsum([entry.num_bits for entry in tensors], dtype=np.int64)
    owner = np.searchsorted(ends, positions, side="right")
    originals: list[tuple[StoredTensor, Tensor]] = []
    try:
        for index in np.unique(owner):
            entry = tensors[index]
            begin = 0 if index == 0 else int(ends[index - 1])
            original = entry.tensor.data if isinstance(entry.tensor, nn.Parameter) else entry.tensor
            _assign(entry, flip(original, positions[owner == index] - begin))
            originals.append((entry, original))
        yield
    finally:
        for entry, original in originals:
            _assign(entry, original)


def flip(tensor: Tensor, positions: np.ndarray) -> Tensor:
    """Return a copy with these distinct bits flipped, numbered from the lowest bit of the first byte."""
    octets, index = np.unique(positions // 8, return_inverse=True)
    masks = np.zeros(len(octets), dtype=np.uint8)
    np.bitwise_xor.at(masks, index, (1 << (positions % 8)).astype(np.uint8))
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    stored = result.reshape(-1).view(torch.uint8)
    where = torch.from_numpy(octets).to(stored.device)
    stored[where] ^= torch.from_numpy(masks).to(stored.device)
    return result


def check_ber(ber: float) -> None:
    if not 0 <= ber <= 1:
        raise ConfigError(f"a bit error rate is between 0 and 1, not {ber:g}; 1e-6 flips one bit of a million.")


def _assign(entry: StoredTensor, tensor: Tensor) -> None:
    """Replace the stored tensor. A parameter stays the same object, since tied modules share it."""
    value = getattr(entry.module, entry.attribute)
    if isinstance(value, nn.Parameter):
        value.data = tensor
    else:
        setattr(entry.module, entry.attribute, tensor)
