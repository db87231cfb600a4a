"""Narrower ranges for groups of weights, found by trial: AWQ's clipping (Lin et al., 2024), for any scale search."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compression.quantization.base import BlockWork
from smelt.compression.quantization.layers import LayerGroup, is_unreached, observed
from smelt.models.anatomy import Projection
from smelt.numerics.format import Format

TOKENS = 512
SHRINKS = tuple(1 - step / 20 for step in range(10))  # of a group's largest magnitude: 1, 0.95, ..., 0.55
ROWS = 64  # whose clips are searched at once


def clip_block(work: BlockWork, number_format: Format) -> None:
    """Clip the weights of a block, each group of them to what changes the outputs least once it is rounded."""
    samples = [(group, Sample(TOKENS)) for group in work.groups]
    work.observe(samples)
    for group, sample in samples:
        if is_unreached(group, sample.rows):
            continue
        for projection in clipped_projections(group):
            clip_(projection.weight, observed(group.path, sample.rows), number_format)


def clipped_projections(group: LayerGroup) -> tuple[Projection, ...]:
    """All but queries and keys, whose product is too easily harmed."""
    if not group.writes:
        return (group.part.output,)
    return group.part.input_projections[2:] if group.part.kind == "heads" else group.part.input_projections


class Sample:
    """The first rows that come by."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        held = 0 if self.rows is None else len(self.rows)
        if held < self.count and len(x):
            taken = x[: self.count - held].float()
            self.rows = taken if self.rows is None else torch.cat([self.rows, taken])


@torch.no_grad()
def clip_(weight: Tensor, x: Tensor, number_format: Format) -> None:
    """Clip each group of a matrix [out, in] to the range that, rounded, changes its share of the output least."""
    inputs = number_format.split_groups(x).transpose(0, 1)  # [groups, tokens, size]
    whole = number_format.tensor_amax(weight)
    for start in range(0, len(weight), ROWS):
        rows = weight[start : start + ROWS]
        grouped = number_format.split_groups(rows.detach())  # [rows, groups, size]
        limits = grouped.abs().amax(-1, keepdim=True)
        best, least = limits, torch.full_like(limits, torch.inf)
        for shrink in SHRINKS:
            trial = grouped.clamp(-limits * shrink, limits * shrink)
            grid = number_format.compute_qparams(trial, tensor_amax=whole)
            wrong = number_format.dequantize_groups(number_format.quantize_groups(trial, grid), grid) - grouped
            error = torch.bmm(inputs, wrong.permute(1, 2, 0)).square().sum(1).T[..., None]  # [rows, groups, 1]
            best, least = torch.where(error < least, limits * shrink, best), torch.minimum(error, least)
        rows.copy_(grouped.clamp(-best, best).flatten(-2)[:, : weight.shape[1]])
