"""Where each parameter's gradient lies in the flat vector of a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from smelt.errors import ResourceError

_MAX_NUMEL = 2**31 - 1  # indices are sent as int32


@dataclass(frozen=True)
class ParamSlice:
    """One parameter's gradient inside the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """The gradients of one bucket, in order."""

    slices: tuple[ParamSlice, ...]

    @classmethod
    def from_tensors(cls, named: Iterable[tuple[str, Tensor]]) -> BucketLayout:
        slices, start = [], 0
        for name, tensor in named:
            slices.append(ParamSlice(name, tuple(tensor.shape), start))
            start += tensor.numel()
        if start > _MAX_NUMEL:
            raise ResourceError(f"{start:,} gradients are too many for one bucket; set bucket_cap_mb to split them.")
        return cls(tuple(slices))

    @cached_property
    def numel(self) -> int:
        return sum(part.numel for part in self.slices)

    def views(self, flat: Tensor) -> Iterator[tuple[ParamSlice, Tensor]]:
        """Yield each slice with its one-dimensional view of the flat vector."""
        for part in self.slices:
            yield part, flat[part.start : part.stop]

    def cut(self, start: int, numel: int) -> BucketLayout:
        """Return the layout of the `numel` elements from `start` on.

        A tensor that is cut becomes one row; elements past the end of the bucket become a tensor without a name.
        """
        slices, stop = [], start + numel
        for part in self.slices:
            first, last = max(part.start, start), min(part.stop, stop)
            if first < last:
                row = (last - first,) if len(part.shape) < 2 else (1, last - first)
                shape = part.shape if last - first == part.numel else row
                slices.append(ParamSlice(part.name, shape, first - start))
        filled = sum(part.numel for part in slices)
        if filled < numel:
            slices.append(ParamSlice("", (1, numel - filled), filled))
        return BucketLayout(tuple(slices))

    def __str__(self) -> str:
        return ", ".join(f"{part.name} {list(part.shape)}" for part in self.slices)
