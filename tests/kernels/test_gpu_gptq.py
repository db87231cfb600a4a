"""The Triton inner loop of GPTQ is bit-identical to the loop over columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE  # isort: skip  (chooses the interpreter)
from smelt.kernels.gpu.gptq import gptq_block
from smelt.numerics import QuantParams
from smelt.numerics.integer import Integer


def column_by_column(
    weight: Tensor, factor: Tensor, grid: QuantParams, number_format: Integer
) -> tuple[Tensor, Tensor]:
    """Quantize a block as `smelt.compression.quantization` does: qparams [rows, columns, 1]."""
    part = weight.clone()
    codes, errors = torch.empty(part.shape, dtype=torch.uint8, device=part.device), torch.empty_like(part)
    for column in range(part.shape[1]):
        column_qparams = QuantParams(
            **{name: tensor[:, column : column + 1] for name, tensor in grid.tensors().items()}
        )
        values = part[:, column, None, None]
        code = number_format.quantize_groups(values, column_qparams)
        error = (values - number_format.dequantize_groups(code, column_qparams))[:, 0] / factor[column, column]
        part[:, column + 1 :] -= error * factor[column, column + 1 :]
        codes[:, column], errors[:, column] = code[:, 0, 0], error[:, 0]
    return codes, errors


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "fractions"])
@pytest.mark.parametrize(("rows", "columns"), [(11, 20), (3, 32)])
def test_bit_for_bit(kind: str, rows: int, columns: int) -> None:
    zero_type = "float16" if kind == "fractions" else "code"
    number_format = Integer(bits=4, symmetric=kind == "symmetric", zero_dtype=zero_type)  # type: ignore[arg-type]
    weight = torch.randn(rows, columns, device=DEVICE)
    weight[0, 0] = 1e9  # saturates
    factor = torch.triu(torch.randn(columns, columns, device=DEVICE) * 0.1)
    factor.diagonal().copy_(torch.rand(columns, device=DEVICE) + 0.5)
    scale = torch.rand(rows, columns, device=DEVICE) * 0.2 + 0.1
    zero = None
    if kind != "symmetric":
        zero = torch.rand(rows, columns, device=DEVICE) * 15
        zero = zero.half().float() if kind == "fractions" else zero.round()
    qparams = QuantParams(scale[..., None], None if zero is None else zero[..., None])
    before = weight.clone()
    codes, errors = gptq_block(weight, factor, scale, zero, 15, default_zero=8.0, fractional_zero=kind == "fractions")
    wanted_codes, wanted_errors = column_by_column(weight, factor, qparams, number_format)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(errors, wanted_errors)
    assert torch.equal(weight, before)


def test_a_block_inside_larger_tensors() -> None:
    full, factor = torch.randn(8, 64, device=DEVICE), torch.eye(64, device=DEVICE)
    scale = torch.full((8, 64), 0.1, device=DEVICE)
    codes, errors = gptq_block(full[:, 16:32], factor[16:32, 16:32], scale[:, 16:32], None, 255, default_zero=128.0)
    assert torch.equal(codes, ((full[:, 16:32] / 0.1).round() + 128).clamp(0, 255).to(torch.uint8))
    assert errors.abs().max() <= 0.0501


def test_no_rows() -> None:
    empty = torch.empty(0, 16, device=DEVICE)
    codes, errors = gptq_block(empty, torch.eye(16, device=DEVICE), empty, None, 15)
    assert codes.shape == errors.shape == (0, 16)
