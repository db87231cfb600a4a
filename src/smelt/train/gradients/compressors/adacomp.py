"""AdaComp: of every bin, what would be its largest element after one more such gradient, as a sign and a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Coder, Message, Step
from smelt.train.gradients.layout import Layout, Piece

_SHORT, _LONG = 1 << 6, 1 << 14  # longest bins whose places fit 6 and 14 bits beside 2 of the sign


@dataclass(frozen=True)
class AdaComp(Coder):
    """G = residue + dW, H = residue + s dW; element j of a bin goes if |H_j| >= max |G| of the bin, as sign(G_j) times
    one scale of the layer, the mean of its bins' maxima. Bins that are all zero send nothing; vectors, and layers
    shorter than a bin, go whole. The equations are known from memory and were confirmed by a simulation only.

    On the wire: the scale, how many each bin sends (1 or 2 bytes), and 1 byte (bins below 64) or 2 an element."""

    name: ClassVar[str] = "adacomp"
    paper: ClassVar[str] = (
        "Chen et al., AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training, AAAI "
        "2018 (arXiv 1712.02679)"
    )

    convolution_bin: int = 50  # elements, of tensors of three or more dimensions
    matrix_bin: int = 500
    factor: float = 2.0  # s

    def __post_init__(self) -> None:
        for key in ("convolution_bin", "matrix_bin"):
            if not 1 <= getattr(self, key) < _LONG:
                raise ConfigError(f"adacomp: {key} is {getattr(self, key)}; it must lie between 1 and {_LONG - 1}.")
        if not self.factor >= 1:
            raise ConfigError(f"adacomp: factor is {self.factor:g}; it must be at least 1.")

    def target(self, elements: int) -> float:
        return 0.0  # the count follows from the gradients

    def encode(self, step: Step) -> Message:
        memory = step.add()
        ahead = memory + (self.factor - 1) * step.gradient
        floats, counts, codes = [memory.new_empty(0)], [_no_bytes(memory)], [_no_bytes(memory)]
        for piece, values in step.layout.views(memory):
            length = self._bin(piece)
            if not length:
                floats.append(values)
                continue
            bins = _rows(values, length)  # [bins, length]
            largest = bins.abs().amax(dim=1)
            sent = (_rows(ahead[piece.start : piece.stop], length).abs() >= largest[:, None]) & (largest > 0)[:, None]
            floats.append(largest.mean()[None])
            counts.append(_narrow(sent.sum(dim=1), length))
            places = sent.nonzero()[:, 1]
            codes.append(_narrow(places << 2 | torch.where(bins[sent] < 0, 2, 1), length))
        return Message(torch.cat([torch.cat(floats).view(torch.uint8), *counts]), torch.cat(codes))

    def variable_size(self, fixed: Tensor, layout: Layout) -> int:
        return sum(int(found.sum()) * _width(length) for _, length, _, found in self._sections(fixed, layout) if length)

    def decode(self, fixed: Tensor, variable: Tensor, layout: Layout) -> Tensor:
        said = torch.zeros(layout.size, device=fixed.device)
        at = 0
        for piece, length, floats, counts in self._sections(fixed, layout):
            if not length:
                said[piece.start : piece.stop] = floats
                continue
            end = at + int(counts.sum()) * _width(length)
            codes = _wide(variable[at:end], length)
            at = end
            bins = torch.repeat_interleave(torch.arange(len(counts), device=fixed.device), counts)
            said[piece.start + bins * length + (codes >> 2)] = torch.where(codes & 3 == 2, -floats, floats)
        return said

    def _sections(self, fixed: Tensor, layout: Layout) -> list[tuple[Piece, int, Tensor, Tensor]]:
        """Of each layer: itself, its bin or 0, its values or scale, and how many each bin sends."""
        lengths = [self._bin(piece) for piece in layout.pieces]
        sizes = [1 if length else piece.size for piece, length in zip(layout.pieces, lengths, strict=True)]
        floats = fixed[: 4 * sum(sizes)].clone().view(torch.float32).split(sizes)
        at, sections = 4 * sum(sizes), []
        for piece, length, values in zip(layout.pieces, lengths, floats, strict=True):
            end = at + -(-piece.size // length) * _width(length) if length else at
            sections.append((piece, length, values, _wide(fixed[at:end], length)))
            at = end
        return sections

    def _bin(self, piece: Piece) -> int:
        length = self.convolution_bin if len(piece.shape) > 2 else self.matrix_bin
        return length if len(piece.shape) > 1 and piece.size >= length else 0


def _rows(values: Tensor, length: int) -> Tensor:
    return functional.pad(values, (0, -len(values) % length)).view(-1, length)


def _width(length: int) -> int:
    """Bytes of a place in a bin, and of a count of them."""
    return 1 if length < _SHORT else 2


def _narrow(numbers: Tensor, length: int) -> Tensor:
    """Numbers below 2^8 or 2^16 -> bytes"""
    if _width(length) == 1:
        return numbers.to(torch.uint8)
    return torch.stack([numbers & 255, numbers >> 8], dim=1).to(torch.uint8).flatten()


def _wide(data: Tensor, length: int) -> Tensor:
    """The numbers that `_narrow` wrote, int64."""
    if not length or _width(length) == 1:
        return data.long()
    low, high = data.view(-1, 2).long().unbind(dim=1)
    return low | high << 8


def _no_bytes(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)
