"""GPTQ: round column by column, and let the columns that follow make up for each error (Frantar et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from smelt.calibrate.observe import SecondMoment
from smelt.errors import DataError, ModelError
from smelt.method import method, within
from smelt.numerics.format import TENSOR, Format, Grid, Quantized
from smelt.quantize.frame import BlockWork, Quantization
from smelt.quantize.layers import Group
from smelt.quantize.rtn import searched_grid

COLUMNS = 128  # that are rounded before the rest of the matrix is updated


@method("gptq", paper="Frantar et al., 2023 (arXiv 2210.17323)", needs=("calibration data",))
@dataclass(frozen=True)
class Gptq(Quantization):
    """Round column by column, each error made up for by the columns that follow."""

    damping: float = 0.01  # of the Hessian's mean diagonal
    act_order: bool = True  # columns with the largest inputs first, on grids fixed beforehand
    search: bool = False  # narrow each group's range to what minimises its |error|^2.4
    sequential: bool = False  # within a block, take the inputs of a layer after those before it were rounded

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "damping", self.damping, 1e-6, 10.0)

    def quantize(self, work: BlockWork) -> None:
        groups = work.groups
        for batch in [[group] for group in groups] if self.sequential else [groups]:
            seen = [(group, SecondMoment()) for group in batch]
            work.observe(seen)
            for group, moment in seen:
                work.put(group, self.round(group, moment))

    def round(self, group: Group, moment: SecondMoment) -> list[Quantized]:
        return round_group(
            group, moment, self.weight_format, damping=self.damping, act_order=self.act_order, search=self.search
        )


def round_group(
    group: Group, moment: SecondMoment, number_format: Format, *, damping: float, act_order: bool, search: bool
) -> list[Quantized]:
    """Layers that share an input share its Hessian: their rows are rounded together, as rows never mix."""
    if moment.matrix is None:
        raise ModelError(f"{group.layers[0].path} was never reached by the calibration data; give more of it.")
    rounded = partial(
        gptq, hessian=moment.matrix, number_format=number_format, damping=damping, act_order=act_order, search=search
    )
    if number_format.group == TENSOR:
        return [rounded(layer.weight.detach()) for layer in group.layers]
    whole = rounded(group.stacked())
    grids = {
        name: [tensor.clone() for _ in group.layers] if name == "tensor" else group.split(tensor)
        for name, tensor in whole.grid.tensors().items()
    }
    return [
        Quantized(number_format, codes, Grid(**{name: parts[index] for name, parts in grids.items()}))
        for index, codes in enumerate(group.split(whole.codes))
    ]


@torch.no_grad()
def gptq(
    weight: Tensor, hessian: Tensor, number_format: Format, *, damping: float = 0.01, act_order: bool = True,
    search: bool = False, block: int = COLUMNS,
) -> Quantized:  # fmt: skip
    """Round a matrix [out, in] against the Hessian [in, in] of its inputs."""
    weight, hessian = weight.float().clone(), hessian.clone()
    columns = weight.shape[1]
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1
    weight[:, dead] = 0
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if act_order else None
    grids = _Grids(number_format, weight, search, static=act_order)
    places = [] if order is None else order.tolist()
    if order is not None:
        weight, hessian = weight[:, order], hessian[order][:, order]
    factor = inverse_factor(hessian, damping)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        part, inner = weight[:, start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(part)
        for column in range(stop - start):
            here = start + column
            grid = grids.of(here if order is None else places[here], weight)
            values = part[:, column, None, None]
            code = number_format.encode(values, grid)
            codes[:, here] = code[:, 0, 0]
            error = (values - number_format.decode(code, grid))[:, 0] / inner[column, column]
            part[:, column + 1 :] -= error * inner[column, column + 1 :]
            errors[:, column] = error[:, 0]
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    if order is not None:
        codes = codes[:, torch.argsort(order)]
    return Quantized(number_format, codes, grids.whole())


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse. Damping is raised tenfold until the Hessian is positive definite."""
    diagonal = hessian.diagonal().mean()
    for power in range(6):
        damped = hessian + torch.eye(len(hessian), device=hessian.device) * (damping * 10**power * diagonal)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed) and bool(upper.isfinite().all()):
                return upper
    raise DataError("the inputs of a layer are NaN or infinite on the calibration data; it cannot be quantised.")


class _Grids:
    """The grid of each group: all beforehand (`static`), or each when its first column is reached."""

    def __init__(self, number_format: Format, weight: Tensor, search: bool, static: bool) -> None:
        self.format, self.search = number_format, search
        self.tensor_maximum = number_format.whole(weight)
        self.size = number_format.size(weight.shape[1])
        fit_now = static or number_format.group <= 0
        self.grids: list[Grid] = []
        if fit_now:
            whole = self._fit(number_format.groups(weight))
            self.grids = [_group(whole, index) for index in range(-(-weight.shape[1] // self.size))]

    def _fit(self, grouped: Tensor) -> Grid:
        if self.search:
            return searched_grid(grouped, self.format, self.tensor_maximum)
        return self.format.fit(grouped, whole=self.tensor_maximum)

    def of(self, column: int, weight: Tensor) -> Grid:
        index = column // self.size
        if index == len(self.grids):
            members = weight[:, index * self.size : (index + 1) * self.size]
            self.grids.append(self._fit(members[:, None]))
        return self.grids[index]

    def whole(self) -> Grid:
        first = self.grids[0]
        if self.format.group == TENSOR:
            return first
        return Grid(
            **{
                name: tensor if name == "tensor" else torch.cat([getattr(grid, name) for grid in self.grids], dim=-2)
                for name, tensor in first.tensors().items()
            }
        )


def _group(grid: Grid, index: int) -> Grid:
    """One group's part of a grid [rows, groups, 1]."""
    return Grid(
        **{
            name: tensor if name == "tensor" or tensor.shape[-2] == 1 else tensor[..., index : index + 1, :]
            for name, tensor in grid.tensors().items()
        }
    )
