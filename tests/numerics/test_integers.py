"""Integers and dINT: steps, zero points, hand-written code tables, and the integer product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from smelt.numerics import Format, QuantParams, get_format
from smelt.numerics.integer import DenormalInteger
from tests.numerics.format_names import every_value


def fitted(number_format: Format, x: Tensor) -> tuple[Tensor, QuantParams]:
    grouped = number_format.split_groups(x)
    return grouped, number_format.compute_qparams(grouped)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("kind", ["", "-asym", "-float-zero", "-float32-zero"])
@pytest.mark.parametrize("group", ["16", "row", "tensor"])
def test_the_error_is_at_most_half_a_step(bits: int, kind: str, group: str) -> None:
    number_format = get_format(f"int{bits}{kind}/{group}")
    for x in (torch.randn(8, 64), torch.rand(8, 64) + 0.5, -torch.rand(8, 64), torch.randn(8, 64).pow(3)):
        grouped, qparams = fitted(number_format, x)
        error = number_format.dequantize_groups(number_format.quantize_groups(grouped, qparams), qparams) - grouped
        assert bool((error.abs() <= qparams.scale * (0.5 + 1e-4)).all())


@pytest.mark.parametrize("bits", range(2, 9))
def test_ranges(bits: int) -> None:
    """Symmetric: the largest magnitude is step 2^(b-1) - 1; full range: all codes span it; asymmetric: both ends are
    exact.
    """
    x = torch.randn(4, 64)
    largest, (low, high) = x.abs().amax(1), x.aminmax(dim=1)
    half_range = 2 ** (bits - 1)
    scales = {
        variant: fitted(get_format(f"int{bits}{variant}"), x)[1].scale.flatten() for variant in ("", "-wide", "-asym")
    }
    torch.testing.assert_close(scales[""], largest / (half_range - 1))
    torch.testing.assert_close(scales["-wide"], largest / (half_range - 0.5))
    torch.testing.assert_close(scales["-asym"], (high - low) / (2 * half_range - 1))
    _, qparams = fitted(get_format(f"int{bits}"), torch.tensor([[half_range - 1.0]]))
    assert every_value(get_format(f"int{bits}"), qparams).flatten().tolist() == list(range(-half_range, half_range))


def test_the_asymmetric_rule_by_hand() -> None:
    """s = (max - min) / 15, z = round(-min / s), q = clip(round(x / s) + z, 0, 15)."""
    x = torch.randn(6, 40)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    step = (high - low) / 15
    zero = (-low / step).round()
    quantized = get_format("int4-asym").quantize(x)
    assert torch.equal(quantized.codes.float(), ((x / step).round() + zero).clamp(0, 15))
    assert quantized.qparams.zero is not None and torch.equal(quantized.qparams.zero[..., 0], zero)
    assert quantized.pack()["zero"].dtype == torch.uint8


def test_zero_points_are_rounded_to_codes() -> None:
    zero = torch.tensor([-3.0, 0.0, 0.4, 7.6, 99.0])
    assert get_format("int4-asym").round_zero(zero).tolist() == [0, 0, 0, 8, 15]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["int4-asym", "dint4", "int4-float-zero", "int4-float32-zero"])
def test_zero_is_exact_for_values_of_one_sign(sign: int, name: str) -> None:
    x = sign * (5 + torch.rand(1, 64))
    _, qparams = fitted(get_format(name), x)
    assert qparams.zero is not None and float(qparams.zero) in (0.0, 13.0 if name == "dint4" else 15.0)
    zeros = torch.zeros(1, 1, 4)
    assert torch.equal(
        get_format(name).dequantize_groups(get_format(name).quantize_groups(zeros, qparams), qparams), zeros
    )


@pytest.mark.parametrize("name", ["int4-asym", "dint4"])
def test_the_zero_point_of_a_nan_is_a_byte(name: str) -> None:
    """NaN converts to a different byte on different machines."""
    qparams = get_format(name).quantize(torch.tensor([[1.0, torch.nan]])).qparams
    assert qparams.zero is not None and float(qparams.zero) == 0.0


def test_integer_ties_round_to_even() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.0]])
    assert get_format("int4").fake_quantize(x).tolist() == [[0, 2, 2, 0, -2, -2, 7]]


def test_a_fractional_zero_point_is_kept() -> None:
    """As HQQ produces it: stored in float16, added before rounding."""
    number_format = get_format("int4-float-zero")
    qparams = QuantParams(torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 3.25))
    assert number_format.quantize_groups(torch.tensor([[[0.0, 0.25, 0.2]]]), qparams).tolist() == [[[3, 4, 4]]]
    assert number_format.dequantize_groups(torch.tensor([[[3, 4]]], dtype=torch.uint8), qparams).tolist() == [
        [[-0.125, 0.375]]
    ]
    stored = number_format.store_qparams(qparams)
    assert stored["zero"].dtype == torch.float16 and torch.equal(number_format.load_qparams(stored).zero, qparams.zero)  # type: ignore[arg-type]


def test_the_codes_of_dint4() -> None:
    """Codes 0 to 13 are integer steps around the zero point; 14 and 15 are plus and minus half a step."""
    qparams = QuantParams(torch.ones(1, 1, 1), torch.full((1, 1, 1), 5.0))
    values = every_value(get_format("dint4"), qparams).flatten().tolist()
    assert values == [*range(-5, 9), 0.5, -0.5]


@pytest.mark.parametrize(("bits", "top"), [(3, 2), (4, 6), (8, 126)])
def test_the_codes_of_symmetric_dint(bits: int, top: int) -> None:
    number_format = get_format(f"dint{bits}-sym")
    grouped, qparams = fitted(number_format, torch.linspace(-top, top, 40 * top + 1)[None])
    assert float(qparams.scale) == 1.0
    result = number_format.dequantize_groups(number_format.quantize_groups(grouped, qparams), qparams).unique().tolist()
    assert result == sorted([*range(-top, top + 1), 0.5, -0.5])


def test_the_thresholds_of_dint() -> None:
    x = torch.tensor([[0.24, 0.25, 0.74, 0.75, -0.24, -0.25, -0.74, -0.75, 13.0]])
    assert get_format("dint4-sym").dequantize_groups(
        get_format("dint4-sym").quantize_groups(x[None], QuantParams(torch.ones(1, 1, 1))),
        QuantParams(torch.ones(1, 1, 1)),
    ).flatten().tolist() == [0, 0.5, 0.5, 1, 0, -0.5, -0.5, -1, 6]


@pytest.mark.parametrize("zero", [0.0, 6.0, 13.0])
def test_dint_clamps_values_beyond_its_grid(zero: float) -> None:
    """Error feedback moves weights out of the range their qparams were computed for. With no integer step on a side of
    zero, the half step is the end there.
    """
    number_format = get_format("dint4")
    qparams = QuantParams(torch.ones(1, 1, 1), torch.full((1, 1, 1), zero))
    x = torch.tensor([[[-40.0, -0.8, 0.8, 40.0]]])
    choices = every_value(number_format, qparams).flatten()
    expected = choices[(x.flatten()[:, None] - choices).abs().argmin(1)]
    assert torch.equal(
        number_format.dequantize_groups(number_format.quantize_groups(x, qparams), qparams).flatten(), expected
    )


@pytest.mark.parametrize("name", ["dint4", "dint4-sym", "dint3", "dint6"])
def test_the_integer_product_of_dint_equals_the_float_path(name: str) -> None:
    """A row's int8 table, `2 (code - z)` and plus and minus one, times int8 inputs in int32, times half the scale."""
    number_format = get_format(name)
    assert isinstance(number_format, DenormalInteger)
    weight, inputs = number_format.quantize(torch.randn(24, 64).pow(3)), torch.randint(-127, 128, (10, 64))
    codes = torch.arange(1 << number_format.bits, dtype=torch.uint8)
    table = number_format.doubled(codes.expand(24, 1, -1), weight.qparams)[:, 0]  # [rows, codes]
    assert torch.equal(table, table.to(torch.int8).float())
    integers = table.to(torch.int8).gather(1, weight.codes.long())
    product = inputs.int() @ integers.int().T
    half = weight.qparams.scale[..., 0] / 2
    assert torch.equal(weight.dequantize(), integers.float() * half)
    by_floats = inputs.double() @ (weight.dequantize().double() / half.double()).T
    assert torch.equal(product.double(), by_floats.round()) and float((by_floats - product).abs().max()) < 1e-3
