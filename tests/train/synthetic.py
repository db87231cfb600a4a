"""Realistic synthetic gradients: heavy tails, per-layer scales, a component shared by all workers."""

from __future__ import annotations

import torch
import torch.distributed as distributed
from torch import Tensor

from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import COMPRESSORS, DGC, SAGE, HardThreshold, PowerSGD
from smelt.train.gradients.compressors.powersgd import PowerSGDReducer
from smelt.train.gradients.layout import BucketLayout
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings

SHAPES = {"stem": (16, 3, 5, 5), "norm": (16,), "wide": (120, 40), "bias": (120,), "head": (10, 120), "last": (10,)}


def make_layout(shapes: dict[str, tuple[int, ...]] | None = None) -> BucketLayout:
    return BucketLayout.from_tensors((name, torch.empty(shape)) for name, shape in (shapes or SHAPES).items())


def make_gradient(layout: BucketLayout, number: int, rank: int, shared: float = 0.3) -> Tensor:
    """Return a deterministic Laplace-like [elements] gradient with layer scales spread over 1.5 decades."""
    scales = torch.Generator().manual_seed(7)
    common, own = torch.Generator().manual_seed(number), torch.Generator().manual_seed(1_000_000 * (rank + 1) + number)
    size = layout.numel
    value = shared * torch.randn(size, generator=common) + torch.randn(size, generator=own)
    value *= torch.empty(size).exponential_(generator=own).sqrt()
    for _, view in layout.views(value):
        view *= 10 ** (-3 + 1.5 * float(torch.rand((), generator=scales)))
    return value


def every_compressor(density: float) -> list[Compressor]:
    """Return one compressor of each type, at this density where it has one."""
    special: list[Compressor] = [
        DGC(density=density, momentum=0.9),
        SAGE(density=density, threshold=0.02),
        HardThreshold(density=density, threshold=0.05),
    ]
    special.append(PowerSGD(warmup_steps=3, rank=2))
    named = {compressor.name for compressor in special}
    rest = [compressor_type for name, compressor_type in COMPRESSORS.items() if name not in named]
    return [*special, *(_build(compressor_type, density) for compressor_type in rest)]


def _build(kind: type[Compressor], density: float) -> Compressor:
    return kind(density=density) if "density" in kind.__dataclass_fields__ else kind()  # type: ignore[call-arg]


def build_reducer(
    compressor: Compressor, settings: CompressionSettings | None = None, layout: BucketLayout | None = None
) -> Reducer:
    if isinstance(compressor, PowerSGD):
        return PowerSGDReducer(compressor, layout or make_layout(), Comm(), settings)
    return Reducer(compressor, layout or make_layout(), Comm(), settings)


def rank() -> int:
    return distributed.get_rank()
