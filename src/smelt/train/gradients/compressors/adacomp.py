"""AdaComp: of every bin, the elements that would be its largest after one more such gradient, as sign and scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep, EncodedGradient, GradientEncoder
from smelt.train.gradients.layout import BucketLayout, ParamSlice

_SHORT, _LONG = 1 << 6, 1 << 14  # longest bins whose offsets fit 6 and 14 bits beside 2 of the sign


@COMPRESSORS.register(
    "adacomp",
    paper=(
        "Chen et al., AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training, AAAI "
        "2018 (arXiv 1712.02679)"
    ),
)
@dataclass(frozen=True)
class AdaComp(GradientEncoder):
    """Select by bin without a density to tune; suits convolutions, where it sends a few elements per bin.

    G = residual + dW, H = residual + s dW; element j of a bin is sent if |H_j| >= max |G| of the bin, as sign(G_j)
    times one scale per layer, the mean of its bins' maxima. Bins that are all zero send nothing; vectors, and layers
    shorter than a bin, are sent dense. The equations are from memory and were confirmed by simulation only.

    Encoded as the scale, the count of each bin (1 or 2 bytes), and 1 byte (bins below 64) or 2 per element."""

    convolution_bin: int = 50  # elements per bin, of tensors of three or more dimensions
    matrix_bin: int = 500
    factor: float = 2.0  # s

    def __post_init__(self) -> None:
        for key in ("convolution_bin", "matrix_bin"):
            if not 1 <= getattr(self, key) < _LONG:
                raise ConfigError(f"adacomp: {key} is {getattr(self, key)}; it must lie between 1 and {_LONG - 1}.")
        if not self.factor >= 1:
            raise ConfigError(f"adacomp: factor is {self.factor:g}; it must be at least 1.")

    def target_count(self, numel: int) -> float:
        return 0.0  # the count follows from the gradients

    def encode(self, step: CompressionStep) -> EncodedGradient:
        accumulated = step.accumulate()
        lookahead = accumulated + (self.factor - 1) * step.flat_gradient
        floats, counts, codes = [accumulated.new_empty(0)], [_no_bytes(accumulated)], [_no_bytes(accumulated)]
        for part, values in step.layout.views(accumulated):
            length = self._bin_size(part)
            if not length:
                floats.append(values)
                continue
            bins = _as_bins(values, length)  # [bins, length]
            amax = bins.abs().amax(dim=1)
            sent = (_as_bins(lookahead[part.start : part.stop], length).abs() >= amax[:, None]) & (amax > 0)[:, None]
            floats.append(amax.mean()[None])
            counts.append(_to_bytes(sent.sum(dim=1), length))
            offsets = sent.nonzero()[:, 1]
            codes.append(_to_bytes(offsets << 2 | torch.where(bins[sent] < 0, 2, 1), length))
        return EncodedGradient(torch.cat([torch.cat(floats).view(torch.uint8), *counts]), torch.cat(codes))

    def variable_size(self, fixed: Tensor, layout: BucketLayout) -> int:
        sections = self._sections(fixed, layout)
        return sum(int(counts.sum()) * _width(length) for _, length, _, counts in sections if length)

    def decode(self, fixed: Tensor, variable: Tensor, layout: BucketLayout) -> Tensor:
        decoded = torch.zeros(layout.numel, device=fixed.device)
        offset = 0
        for part, length, floats, counts in self._sections(fixed, layout):
            if not length:
                decoded[part.start : part.stop] = floats
                continue
            end = offset + int(counts.sum()) * _width(length)
            codes = _from_bytes(variable[offset:end], length)
            offset = end
            bins = torch.repeat_interleave(torch.arange(len(counts), device=fixed.device), counts)
            decoded[part.start + bins * length + (codes >> 2)] = torch.where(codes & 3 == 2, -floats, floats)
        return decoded

    def _sections(self, fixed: Tensor, layout: BucketLayout) -> list[tuple[ParamSlice, int, Tensor, Tensor]]:
        """Return for each layer: its slice, bin size or 0, values or scale, and the count of each bin."""
        lengths = [self._bin_size(part) for part in layout.slices]
        sizes = [1 if length else part.numel for part, length in zip(layout.slices, lengths, strict=True)]
        floats = fixed[: 4 * sum(sizes)].clone().view(torch.float32).split(sizes)
        offset, sections = 4 * sum(sizes), []
        for part, length, values in zip(layout.slices, lengths, floats, strict=True):
            end = offset + -(-part.numel // length) * _width(length) if length else offset
            sections.append((part, length, values, _from_bytes(fixed[offset:end], length)))
            offset = end
        return sections

    def _bin_size(self, part: ParamSlice) -> int:
        length = self.convolution_bin if len(part.shape) > 2 else self.matrix_bin
        return length if len(part.shape) > 1 and part.numel >= length else 0


def _as_bins(values: Tensor, length: int) -> Tensor:
    return functional.pad(values, (0, -len(values) % length)).view(-1, length)


def _width(length: int) -> int:
    """Bytes of an offset in a bin, and of a bin's count."""
    return 1 if length < _SHORT else 2


def _to_bytes(numbers: Tensor, length: int) -> Tensor:
    """Encode numbers below 2^8 or 2^16."""
    if _width(length) == 1:
        return numbers.to(torch.uint8)
    return torch.stack([numbers & 255, numbers >> 8], dim=1).to(torch.uint8).flatten()


def _from_bytes(data: Tensor, length: int) -> Tensor:
    """Decode what `_to_bytes` wrote, int64."""
    if not length or _width(length) == 1:
        return data.long()
    low, high = data.view(-1, 2).long().unbind(dim=1)
    return low | high << 8


def _no_bytes(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)
