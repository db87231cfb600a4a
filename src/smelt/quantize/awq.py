"""AWQ: scale up the weights of channels with large inputs before rounding, then clip (Lin et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.method import method
from smelt.models.anatomy import Projection
from smelt.numerics.format import Format
from smelt.quantize.frame import BlockWork
from smelt.quantize.layers import Group, never_reached, observed
from smelt.quantize.scale_search import STEPS, Candidate, ScaleSearch, power_family

CLIP_TOKENS = 512
SHRINKS = tuple(1 - step / 20 for step in range(10))  # of a group's largest magnitude: 1, 0.95, ..., 0.55
ROWS = 64  # whose clips are searched at once


@method("awq", paper="Lin et al., 2024 (arXiv 2306.00978)", needs=("calibration data",))
@dataclass(frozen=True)
class Awq(ScaleSearch):
    """Protect the channels with large inputs by a scale, found by trial, and clip each group of weights."""

    clip: bool = True  # narrow the range of each group; never of queries and keys

    def candidates(self, group: Group, mean: Tensor, largest: Tensor) -> Iterator[Candidate]:
        for step in range(STEPS):
            yield Candidate("mean", step / STEPS, power_family(mean, step / STEPS))

    def adjust(self, work: BlockWork) -> None:
        if not self.clip:
            return
        samples = [(group, Sample(CLIP_TOKENS)) for group in work.groups]
        work.observe(samples)
        for group, sample in samples:
            if never_reached(group, sample.rows):
                continue
            for projection in clipped_projections(group):
                clip_(projection.weight, observed(group.path, sample.rows), self.weight_format)


def clipped_projections(group: Group) -> tuple[Projection, ...]:
    """All but queries and keys, whose product is too easily harmed."""
    if not group.writes:
        return (group.part.output,)
    return group.part.writers[2:] if group.part.kind == "heads" else group.part.writers


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
    inputs = number_format.groups(x).transpose(0, 1)  # [groups, tokens, size]
    whole = number_format.whole(weight)
    for start in range(0, len(weight), ROWS):
        rows = weight[start : start + ROWS]
        grouped = number_format.groups(rows.detach())  # [rows, groups, size]
        limits = grouped.abs().amax(-1, keepdim=True)
        best, least = limits, torch.full_like(limits, torch.inf)
        for shrink in SHRINKS:
            trial = grouped.clamp(-limits * shrink, limits * shrink)
            grid = number_format.fit(trial, whole=whole)
            wrong = number_format.decode(number_format.encode(trial, grid), grid) - grouped
            error = torch.bmm(inputs, wrong.permute(1, 2, 0)).square().sum(1).T[..., None]  # [rows, groups, 1]
            best, least = torch.where(error < least, limits * shrink, best), torch.minimum(error, least)
        rows.copy_(grouped.clamp(-best, best).flatten(-2)[:, : weight.shape[1]])
