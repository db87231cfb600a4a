"""Column-by-column rounding with error feedback: the rounding of GPTQ (Frantar et al., 2023), for any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from smelt.calibrate.observe import SecondMoment
from smelt.errors import DataError
from smelt.kernels.feedback import block_rounding
from smelt.numerics.format import TENSOR, Format, Grid, Quantized
from smelt.numerics.integer import Integer
from smelt.quantize.layers import Group, observed
from smelt.quantize.nearest import searched_grid

COLUMNS = 128  # that are rounded before the rest of the matrix is updated
DAMPING = 0.01  # of the Hessian's mean diagonal


def round_group(
    group: Group, moment: SecondMoment, number_format: Format, *, damping: float = DAMPING, act_order: bool = True,
    search: bool = False,
) -> list[Quantized]:  # fmt: skip
    """Layers that share an input share its Hessian: their rows are rounded together, as rows never mix."""
    hessian = observed(group.path, moment.matrix)
    rounded = partial(
        gptq, hessian=hessian, number_format=number_format, damping=damping, act_order=act_order, search=search
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
    weight: Tensor, hessian: Tensor, number_format: Format, *, damping: float = DAMPING, act_order: bool = True,
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
    block = block if grids.fixed else aligned(block, grids.size)
    places = [] if order is None else order.tolist()
    if order is not None:
        weight, hessian = weight[:, order], hessian[order][:, order]
    factor = inverse_factor(hessian, damping)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    fast = _fast_blocks(number_format, grids, order, weight)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        part, inner = weight[:, start:stop], factor[start:stop, start:stop]
        if fast is not None:
            codes[:, start:stop], errors = fast(part, inner, start, stop)
        else:
            here = range(start, stop) if order is None else places[start:stop]
            codes[:, start:stop], errors = _round_columns(
                part, inner, (grids.of(i, weight) for i in here), number_format
            )
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    if order is not None:
        codes = codes[:, torch.argsort(order)]
    return Quantized(number_format, codes, grids.whole())


def _round_columns(
    part: Tensor, inner: Tensor, grids: Iterable[Grid], number_format: Format
) -> tuple[Tensor, Tensor]:  # [rows, columns] each
    """One column after the other: its codes, and its errors over the diagonal, which the next columns take up."""
    codes, errors = torch.empty_like(part, dtype=torch.uint8), torch.empty_like(part)
    for column, grid in enumerate(grids):
        values = part[:, column, None, None]
        code = number_format.encode(values, grid)
        codes[:, column] = code[:, 0, 0]
        error = (values - number_format.decode(code, grid))[:, 0] / inner[column, column]
        part[:, column + 1 :] -= error * inner[column, column + 1 :]
        errors[:, column] = error[:, 0]
    return codes, errors


FastBlocks = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def _fast_blocks(number_format: Format, grids: _Grids, order: Tensor | None, weight: Tensor) -> FastBlocks | None:
    """The kernel twin of `_round_columns`, for integers on grids that are all fixed beforehand."""
    kernel = block_rounding(weight.device)
    if kernel is None or type(number_format) is not Integer or not grids.fixed:
        return None
    grid, columns = grids.whole(), weight.shape[1]
    group = torch.arange(columns, device=weight.device) if order is None else order
    group = group // grids.size
    scale = grid.scale.expand(len(weight), -1, 1)[:, group, 0].contiguous()
    zero = None if grid.zero is None else grid.zero.expand(len(weight), -1, 1)[:, group, 0].contiguous()

    def fast(part: Tensor, inner: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return kernel(
            part.contiguous(), inner.contiguous(), scale[:, start:stop].contiguous(),
            None if zero is None else zero[:, start:stop].contiguous(), number_format.top,
            middle=float(number_format.top // 2 + 1), fraction=number_format.zero_type == "float16",
        )  # fmt: skip

    return fast


def aligned(block: int, size: int) -> int:
    """The number of columns nearest to `block` with which no group of so many begins in one block and ends in the
    next: its grid is fitted at its first column, when all of it must have been updated."""
    return block if size % block == 0 else max(block // size, 1) * size


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
        self.fixed = static or number_format.group <= 0
        self.grids: list[Grid] = []
        if self.fixed:
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
