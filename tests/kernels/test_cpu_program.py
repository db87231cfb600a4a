"""Operations of compiled programs against float64: products with dense matrices on every code path."""

from __future__ import annotations

import pytest
import torch

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.cpu import program as compiled
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.program import Program, can_run

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None or not can_run(LIBRARY), reason="no compiled library on this machine")


def run(program: Program, tokens: int) -> None:
    nothing = torch.zeros(1, dtype=torch.int32)
    pages = AttentionMetadata(nothing, nothing[:0], nothing[:0, None], torch.zeros(tokens, dtype=torch.int64))
    ids = torch.arange(tokens)
    program.run(ids, ids, torch.zeros(0, dtype=torch.int64), pages)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 96), (33, 50), (1, 1), (160, 32)])
@pytest.mark.parametrize("tokens", [1, 3, 5, 16, 40])
@pytest.mark.parametrize("biased", [True, False])
def test_products(
    weights: torch.dtype, inputs: torch.dtype, outputs: torch.dtype, rows: int, columns: int, tokens: int, biased: bool
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(rows, columns).to(weights), torch.randn(tokens, columns).to(inputs)
    bias = torch.randn(rows).to(weights) if biased else None
    y = torch.full((tokens, rows), torch.nan, dtype=outputs)
    program = Program(LIBRARY)
    program.dense(weight, bias, x, y)
    run(program, tokens)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = 1e-5 if outputs == torch.float32 else 1e-2
    assert torch.allclose(y.double(), expected, rtol=tolerance, atol=tolerance * columns**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 50])
def test_norm_and_gate(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(1)
    hidden, residual = torch.randn(5, width), torch.randn(5, width).to(dtype)
    weight, y = torch.randn(width), torch.empty(5, width, dtype=dtype)
    gate_up, gated = (3 * torch.randn(5, 2 * width)).to(dtype), torch.empty(5, width, dtype=dtype)
    total = hidden + residual.float()
    program = Program(LIBRARY)
    program.add(
        compiled.ADD_RMS_NORM, x=hidden, other=residual, y=y, weight=weight, weight_type=weight.dtype, dtype=dtype,
        width=width, epsilon=1e-5,
    )  # fmt: skip
    up = gate_up.view(-1)[width:]
    program.add(compiled.SILU_AND_MUL, x=gate_up, other=up, y=gated, dtype=dtype, x_stride=2 * width, width=width)
    run(program, 5)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    assert torch.allclose(hidden, total, atol=1e-6)
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(y.float(), expected, **tolerance)
    wide = gate_up.float()
    assert torch.allclose(gated.float(), torch.nn.functional.silu(wide[:, :width]) * wide[:, width:], **tolerance)


def test_exponentials_far_from_zero() -> None:
    """The gate at its extremes: silu(x) is 0 for large negative x and x for large positive x."""
    x = torch.tensor([[-1e30, -100.0, -88.5, -87.0, -20.0, 20.0, 88.0, 1e30]])
    gate_up, gated = torch.cat([x, torch.ones_like(x)], dim=1), torch.empty_like(x)
    program = Program(LIBRARY)
    program.add(
        compiled.SILU_AND_MUL, x=gate_up, other=gate_up.view(-1)[8:], y=gated, dtype=torch.float32, x_stride=16, width=8
    )
    run(program, 1)
    assert torch.allclose(gated, torch.nn.functional.silu(x), rtol=1e-5, atol=1e-30)
