"""Which tensors a flat vector of gradients is made of, in order: what is per layer in a method needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from smelt.errors import ResourceError

_LARGEST = 2**31 - 1  # indices travel as int32


@dataclass(frozen=True)
class Piece:
    """One tensor inside the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> Layout:
        pieces, start = [], 0
        for name, tensor in named:
            pieces.append(Piece(name, tuple(tensor.shape), start))
            start += tensor.numel()
        if start > _LARGEST:
            raise ResourceError(
                f"{start:,} gradients are too many for one flat vector; give vector_mb, so that it is cut into several."
            )
        return cls(tuple(pieces))

    @cached_property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def views(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece with its part of the flat vector, one-dimensional."""
        for piece in self.pieces:
            yield piece, flat[piece.start : piece.stop]

    def __str__(self) -> str:
        return ", ".join(f"{piece.name} {list(piece.shape)}" for piece in self.pieces)
