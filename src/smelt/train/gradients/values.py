"""How chosen values travel: as float32, in 16 bits, or in 8 with a scale; what rounding loses goes into the residual.

Rounding is to nearest, ties to even. 16 bits: float16 (values past 65504 become 65504) or bfloat16. 8 bits: integers
of -127 to 127 times a float32 scale for every 256 values, their largest magnitude over 127.

A sum of rounded values must not be rounded on its way by each worker that it passes, for nobody could remember what was
lost. So worker j receives everybody's values of the j-th part, adds them in float32, and sends the sum rounded once
more; it keeps the error of that rounding (after the compressed all-reduce of 1-bit Adam, Tang et al., ICML 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from smelt.numerics.integer import quantize_int8
from smelt.train.gradients.comm import Workers

VALUES = ("float32", "float16", "bfloat16", "int8")
_GROUP = 256  # values that share a scale
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def encode(values: Tensor, code: str) -> Tensor:
    """[count] float32 -> bytes, [size_of(count, code)] uint8"""
    if code == "float32":
        return values.contiguous().view(torch.uint8)
    if code in _HALVES:
        half = _HALVES[code]
        limit = torch.finfo(half).max
        return values.clamp(-limit, limit).to(half).view(torch.uint8)
    groups = functional.pad(values, (0, -len(values) % _GROUP)).view(-1, _GROUP)  # [groups, 256]
    codes, scales = quantize_int8(groups, min_scale=torch.finfo(torch.float32).tiny)
    return torch.cat([scales.flatten().view(torch.uint8), codes.flatten()[: len(values)].view(torch.uint8)])


def decode(data: Tensor, count: int, code: str) -> Tensor:
    """The values that `encode` wrote: [count] float32"""
    if code == "float32":
        return data.view(torch.float32)
    if code in _HALVES:
        return data.view(_HALVES[code]).float()
    groups = -(-count // _GROUP)
    scales = data[: 4 * groups].clone().view(torch.float32)
    steps = data[4 * groups :].view(torch.int8).float()
    return steps * scales.repeat_interleave(_GROUP)[:count]


def size_of(count: int, code: str) -> int:
    """Bytes of so many values."""
    if code == "int8":
        return count + 4 * -(-count // _GROUP)
    return count * (4 if code == "float32" else 2)


def sum_values(values: Tensor, workers: Workers, code: str) -> tuple[Tensor, Tensor]:
    """The sum over all workers [count] and what this worker must keep, so that nothing is lost [count]."""
    if code == "float32" or not len(values):
        return workers.sum(values.clone(), "values"), torch.zeros_like(values)
    count = len(values)
    part = -(-count // workers.size)
    rows = functional.pad(values, (0, part * workers.size - count)).view(workers.size, part)
    coded = torch.stack([encode(row, code) for row in rows])  # [workers, bytes]
    error = rows - torch.stack([decode(row, part, code) for row in coded])
    arrived = workers.exchange(coded, "values")
    own_sum = torch.stack([decode(row, part, code) for row in arrived]).sum(dim=0)  # [part]
    coded_sum = encode(own_sum, code)
    error[workers.rank] += own_sum - decode(coded_sum, part, code)
    gathered = workers.gather(coded_sum, "values")
    summed = torch.cat([decode(row, part, code) for row in gathered])
    return summed[:count], error.flatten()[:count]
