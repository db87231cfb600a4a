"""GPTQ rounding for any number format: column by column, with error feedback (Frantar et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smelt.compression.calibration.observers import HessianObserver
from smelt.compression.quantization.base import BlockWork
from smelt.compression.quantization.layers import LayerGroup, is_unreached, observed
from smelt.compression.quantization.rounding import round_to_nearest, search_qparams
from smelt.errors import DataError
from smelt.kernels.gptq_rounding import gptq_block_kernel
from smelt.numerics.format import PER_TENSOR, Format, QuantizedTensor, QuantParams
from smelt.numerics.integer import Integer

COLUMNS = 128  # quantized before the rest of the matrix is updated
DAMPING = 0.01  # relative to the mean of the Hessian diagonal
ROUNDINGS = ("rtn", "gptq")


def round_block(work: BlockWork, rounding: str) -> Iterator[tuple[LayerGroup, list[QuantizedTensor]]]:
    """Yield every layer group of a block with its quantized matrices, rounded to nearest or with GPTQ.

    The Hessians are those of the block's current weights.
    """
    groups = work.groups
    hessians = [HessianObserver() for _ in groups]
    if rounding == "gptq":
        work.observe(list(zip(groups, hessians, strict=True)))
    for group, hessian in zip(groups, hessians, strict=True):
        if rounding == "gptq":
            yield group, round_group(group, hessian, work.weight_format(group))
        else:
            yield group, [round_to_nearest(layer.weight, work.weight_format(group)) for layer in group.layers]


def round_group(
    group: LayerGroup, hessian_observer: HessianObserver, number_format: Format, *, damping: float = DAMPING,
    act_order: bool = True, search: bool = False,
) -> list[QuantizedTensor]:  # fmt: skip
    """Quantize the layers of a group with GPTQ.

    Layers that share an input share its Hessian, so their rows are quantized together. An expert that no token reached
    has no Hessian and is rounded to nearest.
    """
    if is_unreached(group, hessian_observer.matrix):
        return [round_to_nearest(layer.weight, number_format, search) for layer in group.layers]
    hessian = observed(group.path, hessian_observer.matrix)
    quantize = partial(gptq, number_format=number_format, damping=damping, act_order=act_order, search=search)
    if hessian.dim() == 3:
        return [_round_grouped_convolution(group.layers[0].weight.detach(), hessian, quantize)]
    quantize = partial(quantize, hessian=hessian)
    if number_format.group_size == PER_TENSOR:
        return [quantize(layer.weight.detach()) for layer in group.layers]
    matrix = quantize(group.stacked())
    qparams = {
        name: [tensor.clone() for _ in group.layers] if name == "tensor" else group.split(tensor)
        for name, tensor in matrix.qparams.tensors().items()
    }
    return [
        QuantizedTensor(number_format, codes, QuantParams(**{name: parts[index] for name, parts in qparams.items()}))
        for index, codes in enumerate(group.split(matrix.codes))
    ]


def _round_grouped_convolution(
    weight: Tensor, hessians: Tensor, quantize: Callable[..., QuantizedTensor]
) -> QuantizedTensor:
    """Quantize the output channels of each group of a convolution with the Hessian of their own input channels.

    `weight` is [out, columns], `hessians` [groups, columns, columns].
    """
    parts = [
        quantize(rows, hessian=hessian) for rows, hessian in zip(weight.chunk(len(hessians)), hessians, strict=True)
    ]
    first = parts[0].qparams.tensors()
    qparams = {
        name: tensor if name == "tensor" else torch.cat([getattr(part.qparams, name) for part in parts])
        for name, tensor in first.items()
    }
    return QuantizedTensor(parts[0].format, torch.cat([part.codes for part in parts]), QuantParams(**qparams))


@torch.no_grad()
def gptq(
    weight: Tensor, hessian: Tensor, number_format: Format, *, damping: float = DAMPING, act_order: bool = True,
    search: bool = False, block: int = COLUMNS,
) -> QuantizedTensor:  # fmt: skip
    """Quantize a matrix [out, in] given the Hessian [in, in] of its inputs."""
    weight, hessian = weight.float().clone(), hessian.clone()
    columns = weight.shape[1]
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1
    weight[:, dead] = 0
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if act_order else None
    group_qparams = _GroupQParams(number_format, weight, search, static=act_order)
    block = block if group_qparams.precomputed else align_to_groups(block, group_qparams.size)
    if order is not None:
        weight, hessian = weight.index_select(1, order), hessian.index_select(0, order).index_select(1, order)
    factor = inverse_factor(hessian, damping)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    rounding = _rounding(number_format, group_qparams, order, weight)
    run = block if group_qparams.precomputed else min(block, group_qparams.size, COLUMNS)
    for start in range(0, columns, block):
        stop, errors = min(start + block, columns), []
        for first in range(start, stop, run):  # qparams of these columns are known at the first one
            last = min(first + run, stop)
            codes[:, first:last], error = rounding(weight[:, first:last], factor[first:last, first:last], first, last)
            weight[:, last:stop].addmm_(error, factor[first:last, last:stop], alpha=-1)
            errors.append(error)
        weight[:, stop:].addmm_(torch.cat(errors, 1), factor[start:stop, stop:], alpha=-1)
    if order is not None:
        codes = codes[:, torch.argsort(order)]
    return QuantizedTensor(number_format, codes, group_qparams.all_groups())


Rounding = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]  # weights, factor, first and last column


def _round_columns(
    part: Tensor, factor: Tensor, column_qparams: Iterable[QuantParams], number_format: Format
) -> tuple[Tensor, Tensor]:  # [rows, columns] each
    """Quantize one column after the other: return codes, and errors over the diagonal, which later columns absorb."""
    codes, errors = torch.empty_like(part, dtype=torch.uint8), torch.empty_like(part)
    for column, qparams in enumerate(column_qparams):
        values = part[:, column, None, None]
        code = number_format.quantize_groups(values, qparams)
        codes[:, column] = code[:, 0, 0]
        error = (values - number_format.dequantize_groups(code, qparams))[:, 0] / factor[column, column]
        part[:, column + 1 :] -= error * factor[column, column + 1 :]
        errors[:, column] = error[:, 0]
    return codes, errors


def _rounding(number_format: Format, group_qparams: _GroupQParams, order: Tensor | None, weight: Tensor) -> Rounding:
    """Return the function that quantizes a range of columns: a kernel if it supports the format, else a plain loop."""
    kernel = gptq_block_kernel(weight.device)
    if kernel is not None and type(number_format) is Integer:
        return _kernel_rounding(kernel, number_format, group_qparams, order, weight)
    columns = range(weight.shape[1]) if order is None else order.tolist()

    def round_reference(part: Tensor, factor: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        return _round_columns(
            part, factor, (group_qparams.at_column(column, weight) for column in columns[first:last]), number_format
        )

    return round_reference


def _kernel_rounding(
    kernel: Callable[..., Any],
    number_format: Integer,
    group_qparams: _GroupQParams,
    order: Tensor | None,
    weight: Tensor,
) -> Rounding:
    rows, columns = weight.shape
    original_columns = torch.arange(columns, device=weight.device) if order is None else order
    group = original_columns // group_qparams.size
    fixed_qparams = (
        {name: _group_major(tensor, rows) for name, tensor in group_qparams.all_groups().tensors().items()}
        if group_qparams.precomputed
        else {}
    )

    def round_with_kernel(part: Tensor, factor: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        if group_qparams.precomputed:
            qparams = {name: tensor[group[first:last]].T for name, tensor in fixed_qparams.items()}
        else:
            qparams = {
                name: t[:, 0].expand(rows, last - first)
                for name, t in group_qparams.at_column(first, weight).tensors().items()
            }
        return kernel(
            part, factor, qparams["scale"], qparams.get("zero"), number_format.qmax,
            default_zero=float(number_format.qmax // 2 + 1), fractional_zero=number_format.zero_dtype != "code",
        )  # fmt: skip

    return round_with_kernel


def _group_major(tensor: Tensor, rows: int) -> Tensor:  # [rows or 1, groups, 1] -> [groups, rows]
    """Lay out one qparam of each group contiguously over all rows."""
    return tensor.expand(rows, -1, 1)[..., 0].T.contiguous()


def align_to_groups(block: int, group_size: int) -> int:
    """Return the number of columns nearest to `block` such that no group spans two blocks.

    The qparams of a group are computed at its first column, when all of its columns must be up to date.
    """
    return block if group_size % block == 0 else max(block // group_size, 1) * group_size


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse; raise damping tenfold until the Hessian is positive definite.

    With rows and columns reversed, the inverse of the lower factor is the upper factor of the inverse.
    """
    reverse, one = hessian.flip(0, 1), torch.eye(len(hessian), device=hessian.device)
    diagonal = hessian.diagonal().mean()
    for power in range(6):
        lower, failed = torch.linalg.cholesky_ex(reverse + one * (damping * 10**power * diagonal))
        if not bool(failed):
            upper = torch.linalg.solve_triangular(lower, one, upper=False).flip(0, 1)
            if bool(upper.isfinite().all()):
                return upper
    raise DataError("the inputs of a layer are NaN or infinite on the calibration data; it cannot be quantized.")


class _GroupQParams:
    """The qparams of each group: all computed beforehand (`static`), or each at the first column of its group."""

    def __init__(self, number_format: Format, weight: Tensor, search: bool, static: bool) -> None:
        self.format, self.search = number_format, search
        self.tensor_amax = number_format.tensor_amax(weight)
        self.size = number_format.effective_group_size(weight.shape[1])
        self.precomputed = static or number_format.group_size <= 0
        self.groups: list[QuantParams] = []
        if self.precomputed:
            qparams = self._compute_qparams(number_format.split_groups(weight))
            self.groups = [_select_group(qparams, index) for index in range(-(-weight.shape[1] // self.size))]

    def _compute_qparams(self, grouped: Tensor) -> QuantParams:
        if self.search:
            return search_qparams(grouped, self.format, self.tensor_amax)
        return self.format.compute_qparams(grouped, tensor_amax=self.tensor_amax)

    def at_column(self, column: int, weight: Tensor) -> QuantParams:
        index = column // self.size
        if index == len(self.groups):
            members = weight[:, index * self.size : (index + 1) * self.size]
            self.groups.append(self._compute_qparams(members[:, None]))
        return self.groups[index]

    def all_groups(self) -> QuantParams:
        first = self.groups[0]
        if self.format.group_size == PER_TENSOR:
            return first
        return QuantParams(
            **{
                name: tensor
                if name == "tensor"
                else torch.cat([getattr(qparams, name) for qparams in self.groups], dim=-2)
                for name, tensor in first.tensors().items()
            }
        )


def _select_group(qparams: QuantParams, index: int) -> QuantParams:
    """Select one group of qparams [rows, groups, 1]."""
    return QuantParams(
        **{
            name: tensor if name == "tensor" or tensor.shape[-2] == 1 else tensor[..., index : index + 1, :]
            for name, tensor in qparams.tensors().items()
        }
    )
