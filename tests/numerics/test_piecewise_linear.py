"""Tables: the network they are made of unit by unit, pinned ends, and the integer form against the float one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.numerics.nn_lut import default_table
from smelt.numerics.piecewise_linear import InputScaling, PiecewiseLinear


def network(units: int, seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    weight, bias, output_weight = torch.randn(3, units, generator=generator, dtype=torch.float64)
    return weight, bias, output_weight, 0.25


def forward(weight: Tensor, bias: Tensor, output_weight: Tensor, output_bias: float, x: Tensor) -> Tensor:
    return (weight * x[:, None] + bias).relu() @ output_weight + output_bias


@pytest.mark.parametrize("seed", range(5))
def test_table_equals_its_network(seed: int) -> None:
    """A unit on the wrong side of its breakpoint, or a lost output bias, moves a whole segment."""
    parts = network(15, seed)
    x = torch.linspace(-8, 8, 10_001, dtype=torch.float64)
    expected = forward(*parts, x)
    table = PiecewiseLinear.of_relu_network(*parts)
    assert table.entries == 16
    assert float((table(x) - expected).abs().max()) <= 2e-15 * max(1.0, float(expected.abs().max()))


def test_constant_and_repeated_units() -> None:
    """A unit of weight 0 has no breakpoint, and two units may share one."""
    weight = torch.tensor([0.0, 2.0, 2.0, 0.0, -1.0], dtype=torch.float64)
    bias = torch.tensor([3.0, 1.0, 1.0, -3.0, 0.5], dtype=torch.float64)
    output_weight = torch.tensor([1.0, 2.0, -3.0, 5.0, 1.5], dtype=torch.float64)
    x = torch.linspace(-3, 3, 601, dtype=torch.float64)
    table = PiecewiseLinear.of_relu_network(weight, bias, output_weight)
    assert torch.allclose(table(x), forward(weight, bias, output_weight, 0.0, x), atol=1e-14, rtol=0)
    only_constants = PiecewiseLinear.of_relu_network(weight[[0, 3]], bias[[0, 3]], output_weight[[0, 3]])
    assert torch.equal(only_constants(x), torch.full_like(x, 3.0))


def test_a_breakpoint_belongs_to_the_segment_on_its_right() -> None:
    table = PiecewiseLinear(torch.tensor([0.0, 1.0]), torch.zeros(3), torch.tensor([10.0, 20.0, 30.0]))
    assert table(torch.tensor([-0.5, 0.0, 0.5, 1.0, 2.0])).tolist() == [10, 20, 20, 30, 30]


def test_uniform_segments_reproduce_the_published_errors() -> None:
    x = torch.linspace(-16, 0, 100_001, dtype=torch.float64)
    error = (PiecewiseLinear.uniform(torch.exp, -16, 0, 16)(x) - x.exp()).abs()
    assert (round(float(error.mean()), 4), round(float(error.max()), 3)) == (0.0051, 0.078)


def test_pinned_ends_follow_the_asymptotes_and_stay_continuous() -> None:
    """Without pinning, GELU of -1000 is the linear extension of the first segment."""
    function = torch.nn.functional.gelu
    table = PiecewiseLinear.uniform(function, -5, 5, 16).pin(left=(0.0, 0.0), right=(1.0, 0.0))
    far = torch.tensor([-1000.0, 1000.0], dtype=torch.float64)
    assert table(far).tolist() == [0.0, 1000.0]
    left, right = table.breakpoints - 1e-12, table.breakpoints + 1e-12
    assert float((table(left) - table(right)).abs().max()) < 1e-9
    x = torch.linspace(-6, 6, 10_001, dtype=torch.float64)
    assert float((table(x) - function(x)).abs().max()) < 0.04


def test_a_pinned_end_may_meet_its_neighbor_at_the_next_breakpoint() -> None:
    """The segment between both has no length then; if it stayed, the table would jump at its end."""
    table = PiecewiseLinear(torch.tensor([-2.0, -1.0, 1.0, 2.0]), torch.ones(5), torch.zeros(5))
    pinned = table.pin(left=(0.0, -1.0), right=(0.0, 1.0))
    assert pinned.breakpoints.tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert pinned(torch.tensor([-1.5, 0.5, 1.5])).tolist() == [-1.0, 0.5, 1.0]


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 0.013, 1.0])
@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "exp"])
def test_integer_table_is_within_one_step_of_the_float_table(name: str, scale: float) -> None:
    """In steps of an 8-bit output; a breakpoint that is rounded down would select another entry than the float one."""
    bound = 2**15 - 1
    table = default_table(name, 16)
    integers = table.to_integer(scale, bound)
    q = torch.arange(-bound, 1 if name == "exp" else bound + 1)
    entry = torch.searchsorted(table.breakpoints, q.double() * scale, right=True)
    assert torch.equal(torch.searchsorted(integers.breakpoints.long(), q, right=True), entry)
    results = integers(q)
    assert int(results.abs().max()) < 2**31
    expected = table(q.double() * scale)
    step = max(float(expected.abs().max()) / 127, 1e-12)
    assert float((results.double() * integers.output_scale - expected).abs().max()) < step


def test_integer_tables_keep_the_order_of_breakpoints_that_coincide() -> None:
    table = PiecewiseLinear(torch.tensor([0.1, 0.2, 0.3]), torch.arange(4.0), torch.zeros(4)).to(torch.float64)
    integers = table.to_integer(1.0, 100)
    assert integers.breakpoints.tolist() == [1, 1, 1]
    assert integers(torch.tensor([0, 1])).mul(integers.output_scale).tolist() == [0, 3]


def test_half_precision_table_computes_in_half() -> None:
    table = default_table("gelu", 16).to(torch.float16)
    x = torch.linspace(-5, 5, 1001)
    assert table(x).dtype == torch.float16
    assert float((table(x).float() - torch.nn.functional.gelu(x)).abs().max()) < 0.02


def test_input_scaling_reaches_small_inputs() -> None:
    """1/sqrt(0.1) on a table of (1, 1024): looked up at 102.4 and multiplied by 2^5."""
    table = PiecewiseLinear.uniform(torch.rsqrt, 1, 1024, 4096)
    x = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)
    assert torch.allclose(InputScaling(-0.5)(table, x), x.rsqrt(), rtol=1e-2)
    assert torch.allclose(
        InputScaling(-1.0)(PiecewiseLinear.uniform(torch.reciprocal, 1, 1024, 4096), x), 1 / x, rtol=0.02
    )


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "exp", "reciprocal", "rsqrt"])
def test_default_tables_improve_with_their_entries(name: str) -> None:
    function, low, high = {
        "gelu": (torch.nn.functional.gelu, -5, 5),
        "silu": (torch.nn.functional.silu, -10, 10),
        "tanh": (torch.tanh, -5, 5),
        "exp": (torch.exp, -16, 0),
        "reciprocal": (torch.reciprocal, 1, 2),
        "rsqrt": (torch.rsqrt, 1, 4),
    }[name]
    x = torch.linspace(low, high, 20_001, dtype=torch.float64)
    errors = [float((default_table(name, entries)(x) - function(x)).abs().mean()) for entries in (8, 16, 32)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    for entries, error in zip((8, 16, 32), errors, strict=True):
        uniform = PiecewiseLinear.uniform(function, low, high, entries)
        assert error < float((uniform(x) - function(x)).abs().mean()) / 1.7


def test_refuses_what_is_no_table() -> None:
    with pytest.raises(ConfigError, match="ascending"):
        PiecewiseLinear(torch.tensor([1.0, 0.0]), torch.zeros(3), torch.zeros(3))
    with pytest.raises(ConfigError, match="N - 1"):
        PiecewiseLinear(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    with pytest.raises(ConfigError, match="NaN"):
        PiecewiseLinear(torch.zeros(2), torch.tensor([0.0, float("nan"), 0.0]), torch.zeros(3))
    with pytest.raises(ConfigError, match="overflows"):
        default_table("gelu", 16).to_integer(1e-12, 2**31 - 3)
    far = PiecewiseLinear(torch.tensor([10.0]), torch.zeros(2), torch.ones(2))  # a breakpoint at bound + 1
    with pytest.raises(ConfigError, match="overflows"):
        far.to_integer(1e-9, 2**31 - 1, output_bits=8)
    with pytest.raises(ConfigError, match="8, 16, 32"):
        default_table("gelu", 12)
