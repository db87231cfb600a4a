"""Random constants for kernels of integer-only networks, and the reference of a chain of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from smelt.kernels.integer_interface import (
    Add,
    Gelu,
    NormConstants,
    Requantize,
    SoftmaxConstants,
    Steps,
    TableLookup,
)
from smelt.runtime.integer import ops
from smelt.runtime.integer.constants import gelu_constants, norm_constants, softmax_constants
from smelt.runtime.integer.dyadic import dyadic_tensors

SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
RANGES = {
    torch.int8: (-128, 127),
    torch.uint8: (0, 255),
    torch.int16: (-32768, 32767),
    torch.int32: (-(2**31), 2**31 - 1),
}


def integers(shape: Sequence[int], dtype: torch.dtype = torch.int8, seed: int = 0, limit: int | None = None) -> Tensor:
    """Return random integers of a dtype, its extreme values among them, or of magnitude up to `limit`."""
    low, high = RANGES[dtype] if limit is None else (-limit, limit)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(low, high + 1, tuple(shape), generator=generator).to(dtype)
    if limit is None and values.numel() > 4:
        values.view(-1)[:2] = torch.tensor([low, high])
    return values


def requantize(ratio: float, channels: int = 1, dtype: torch.dtype = torch.int8, seed: int = 0) -> Requantize:
    """Return multipliers around a ratio, up to a factor of two apart."""
    generator = torch.Generator().manual_seed(seed)
    ratios = (ratio * torch.exp2(torch.rand(channels, generator=generator))).tolist()
    return Requantize(*dyadic_tensors(ratios, "layer"), *RANGES[dtype])


def gelu(scale: float, limit: int) -> Gelu:
    return Gelu(**gelu_constants(scale, limit, "layer")[0])


def softmax(scale: float, length: int) -> SoftmaxConstants:
    return SoftmaxConstants(**softmax_constants(scale, length, "layer")[0])


def norm(scale: float, limit: int, length: int, bias: bool = True, seed: int = 0) -> NormConstants:
    generator = torch.Generator().manual_seed(seed)
    weight, shift = (torch.randn(length, generator=generator) for _ in range(2))
    attributes, constants, _ = norm_constants(scale, limit, weight, shift if bias else None, 1e-12, "layer")
    return NormConstants(constants["weight"], constants.get("bias"), **attributes)


def table_lookup(entries: int, limit: int, seed: int = 0) -> TableLookup:
    generator = torch.Generator().manual_seed(seed)
    breakpoints = torch.randint(-limit, limit, (entries,), generator=generator).sort().values
    slopes = torch.randint(-(2**31) // (4 * limit), 2**31 // (4 * limit), (entries + 1,), generator=generator)
    intercepts = torch.randint(-(2**29), 2**29, (entries + 1,), generator=generator)
    return TableLookup(breakpoints.int(), slopes.int(), intercepts)


def apply(steps: Steps, x: Tensor, operands: Sequence[Tensor] = ()) -> Tensor:
    """Apply steps with the reference operators; every intermediate result must fit int32."""
    remaining = iter(operands)
    for step in steps.steps:
        if isinstance(step, Requantize):
            x = _requantize(x, step)
        elif isinstance(step, Gelu):
            x = ops.gelu(x, q_b=step.q_b, q_c=step.q_c, q_one=step.q_one, shift=step.shift)
        elif isinstance(step, TableLookup):
            x = ops.table(x, breakpoints=step.breakpoints, slopes=step.slopes, intercepts=step.intercepts)
        elif isinstance(step, Add):
            other = next(remaining)
            x = ops.add(x, other if step.requantize is None else _requantize(other, step.requantize))
        assert not x.numel() or max(-int(x.min()) - 1, int(x.max())) < 2**31, step
    return x


def apply_softmax(x: Tensor, mask: Tensor | None, constants: SoftmaxConstants) -> Tensor:
    return ops.softmax(x, mask, **vars(constants))


def apply_norm(x: Tensor, constants: NormConstants) -> Tensor:
    attributes = {name: value for name, value in vars(constants).items() if name not in ("weight", "bias")}
    if constants.bias is None:
        return ops.rms_norm(x, weight=constants.weight, **attributes)
    return ops.layer_norm(x, weight=constants.weight, bias=constants.bias, **attributes)


def chains(channels: int, columns: int) -> list[tuple[Steps, torch.dtype]]:
    """Return chains of steps that follow sums of `columns` int8 products, with the dtype of their results."""
    spread = math.sqrt(columns) * 74 * 74  # standard deviation of the sums of random int8
    to_int16 = requantize(1e4 / spread, channels, torch.int16)
    return [
        (Steps(), torch.int32),
        (Steps((requantize(60 / spread, channels),)), torch.int8),
        (Steps((requantize(200 / spread, 1, torch.uint8),)), torch.uint8),
        (Steps((requantize(3e4 / spread, channels, torch.int16),)), torch.int16),
        (Steps((to_int16, gelu(3e-4, 32768), requantize(1e-6))), torch.int8),
        (Steps((to_int16, table_lookup(16, 32768), requantize(1e-7))), torch.int8),
    ]


def masks(batch: int, queries: int, keys: int) -> list[Tensor | None]:
    """Return no mask, padding (all of the last row but one position), a causal mask, and rows without any position."""
    padding = torch.ones(batch, 1, 1, keys, dtype=torch.int64)
    padding[-1, ..., 1:] = 0
    causal = torch.ones(queries, keys, dtype=torch.int32).tril()
    nothing = torch.zeros(batch, 1, 1, keys, dtype=torch.int8)
    return [None, padding, causal, nothing]


def _requantize(x: Tensor, step: Requantize) -> Tensor:
    return ops.requantize(x, multiplier=step.multiplier, shift=step.shift, minimum=step.minimum, maximum=step.maximum)
