"""Clip-range search per group of weights: AWQ's clipping (Lin et al., 2024), for any scale search."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compression.quantization.base import BlockWork
from smelt.compression.quantization.layers import LayerGroup, is_unreached, observed
from smelt.models.anatomy import Projection
from smelt.numerics.format import Format

TOKENS = 512
SHRINKS = tuple(1 - step / 20 for step in range(10))  # clip ratios: 1, 0.95, ..., 0.55
ROWS = 64  # searched at once


def clip_block(work: BlockWork, number_format: Format) -> None:
    """Clip each group of a block's weights to the range of least output error after quantization."""
    samples = [(group, Sample(TOKENS)) for group in work.groups]
    work.observe(samples)
    for group, sample in samples:
        if is_unreached(group, sample.rows):
            continue
        for projection in clipped_projections(group):
            clip_(projection.weight, observed(group.path, sample.rows), number_format)


def clipped_projections(group: LayerGroup) -> tuple[Projection, ...]:
    """Return the projections to clip: all but queries and keys, whose product is too sensitive."""
    if not group.writes:
        return (group.part.output,)
    return group.part.input_projections[2:] if group.part.kind == "heads" else group.part.input_projections


class Sample:
    """Observer that keeps the first `count` rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        stored = 0 if self.rows is None else len(self.rows)
        if stored < self.count and len(x):
            rows = x[: self.count - stored].float()
            self.rows = rows if self.rows is None else torch.cat([self.rows, rows])


@torch.no_grad()
def clip_(weight: Tensor, x: Tensor, number_format: Format) -> None:
    """Clip each group of a matrix [out, in] to the range of least output error after quantization."""
    inputs = number_format.split_groups(x).transpose(0, 1)  # [groups, tokens, size]
    amax = number_format.tensor_amax(weight)
    for start in range(0, len(weight), ROWS):
        rows = weight[start : start + ROWS]
        grouped = number_format.split_groups(rows.detach())  # [rows, groups, size]
        limits = grouped.abs().amax(-1, keepdim=True)
        best, least = limits, torch.full_like(limits, torch.inf)
        for ratio in SHRINKS:
            clipped = grouped.clamp(-limits * ratio, limits * ratio)
            grid = number_format.compute_qparams(clipped, tensor_amax=amax)
            difference = number_format.dequantize_groups(number_format.quantize_groups(clipped, grid), grid) - grouped
            error = torch.bmm(inputs, difference.permute(1, 2, 0)).square().sum(1).T[..., None]  # [rows, groups, 1]
            best, least = torch.where(error < least, limits * ratio, best), torch.minimum(error, least)
        rows.copy_(grouped.clamp(-best, best).flatten(-2)[:, : weight.shape[1]])
