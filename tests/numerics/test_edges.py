"""Edge cases of every format: zeros, infinities, NaN, subnormals, no rows, one column, other dtypes and shapes."""

from __future__ import annotations

import math

import pytest
import torch

from smelt.numerics import QuantizedTensor, get_format
from smelt.numerics.format import PER_TENSOR
from smelt.numerics.scaled import Ternary
from tests.numerics.format_names import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    number_format = get_format(name)
    x = torch.zeros(3, 40)
    assert torch.equal(number_format.fake_quantize(x), x)
    x[1, :2] = torch.tensor([1.0, -2.0])  # a group of zeros beside nonzero ones
    rounded = number_format.fake_quantize(x)
    assert torch.equal(rounded[x == 0], x[x == 0]) and float(rounded.abs().max()) > 0


@pytest.mark.parametrize("name", NAMES)
def test_all_equal_values_lose_little(name: str) -> None:
    """The largest value of a group is on the grid, up to the rounding of the scale and the loss of a power-of-two scale
    (a quarter); a full range loses half a step.
    """
    number_format = get_format(name)
    loss = 0.5 / (2 ** (number_format.bits - 1) - 0.5) if name.endswith("-wide") else 0.26
    for value in (3.0, -0.7, 40.0):
        rounded = number_format.fake_quantize(torch.full((2, 33), value))
        assert len(rounded.unique()) == 1
        expected = max(value, 0.0) if name.startswith("uint") else value
        assert float(rounded[0, 0]) == pytest.approx(expected, rel=1.001 * loss)


@pytest.mark.parametrize("name", NAMES)
def test_an_infinity_saturates_and_does_not_set_the_scale(name: str) -> None:
    number_format = get_format(name)
    x = torch.randn(2, 40)
    finite = x.clone()
    finite[0, 3], finite[1, 7] = 0.0, 0.0
    x[0, 3], x[1, 7] = math.inf, -math.inf
    rounded, expected = number_format.fake_quantize(x), number_format.fake_quantize(finite)
    others = x.isfinite()
    assert torch.equal(rounded[others], expected[others])
    assert bool(rounded.isfinite().all())
    for row, column, sign in ((0, 3, 1), (1, 7, -1)):
        size = number_format.effective_group_size(40)
        group = rounded if number_format.group_size == PER_TENSOR else rounded[row, column // size * size :][:size]
        assert float(sign * rounded[row, column]) == float((sign * group).max())


@pytest.mark.parametrize("name", NAMES)
def test_only_infinities(name: str) -> None:
    rounded = get_format(name).fake_quantize(torch.tensor([[math.inf, -math.inf, 0.0]]))
    assert bool(rounded.isfinite().all()) and float(rounded[0, 0]) >= 0 >= float(rounded[0, 1])
    assert float(rounded[0, 2]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_makes_its_group_nan_and_no_other(name: str) -> None:
    number_format = get_format(name)
    x = torch.randn(3, 70)
    x[0, 69], x[1, 2] = 9.0, 0.0  # the tensor's amax, which may set a global scale, is in another group
    expected = number_format.fake_quantize(x)
    x[1, 2] = math.nan
    quantized = number_format.quantize(x)
    lost = torch.zeros(3, 70, dtype=torch.bool)
    lost[1, : number_format.effective_group_size(70)] = True
    if number_format.group_size == PER_TENSOR:
        lost.fill_(True)
    for values in (
        quantized.dequantize(),
        QuantizedTensor.from_packed(number_format, quantized.pack(), 70).dequantize(),
    ):
        assert torch.equal(values.isnan(), lost) and torch.equal(values[~lost], expected[~lost])


@pytest.mark.parametrize("name", NAMES)
def test_subnormal_and_huge_values(name: str) -> None:
    number_format = get_format(name)
    tiny, huge = torch.tensor([[1e-45, -1e-42, 3e-39, 0.0]]), torch.tensor([[3.4e38, -3.4e38, 1.0, 0.0]])
    for x in (tiny, huge, torch.cat([tiny, huge])):
        rounded = number_format.fake_quantize(x)
        assert bool(rounded.isfinite().all())
        assert bool((rounded * x.sign() >= 0).all())
        assert float((rounded - x).abs().max()) <= 1.01 * float(x.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_empty_tensors(name: str) -> None:
    number_format = get_format(name)
    for shape in ((0, 40), (0, 1), (2, 0), (0,), (0, 3, 8)):
        quantized = number_format.quantize(torch.empty(shape))
        assert quantized.dequantize().shape == shape
        assert QuantizedTensor.from_packed(number_format, quantized.pack(), shape[-1]).dequantize().shape == shape


@pytest.mark.parametrize("name", NAMES)
def test_partial_groups_match_a_padded_row(name: str) -> None:
    number_format = get_format(name)
    tolerance = 1e-6 if isinstance(number_format, Ternary) else 0.0  # a mean depends on the order of its sum
    for columns in (1, 2, 31, 33):
        x = torch.randn(3, columns)
        filled = torch.nn.functional.pad(x, (0, 210 - columns))
        expected = number_format.fake_quantize(filled)[:, :columns]
        torch.testing.assert_close(number_format.fake_quantize(x), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_other_shapes_and_strides(name: str) -> None:
    """Rows are independent except for tensor-wide scales: the same 12 rows in any shape and memory layout."""
    number_format = get_format(name)
    x = torch.randn(12, 40)
    expected = number_format.fake_quantize(x)
    assert torch.equal(number_format.fake_quantize(x.reshape(3, 4, 40)), expected.reshape(3, 4, 40))
    assert torch.equal(number_format.fake_quantize(x.reshape(2, 3, 2, 40)), expected.reshape(2, 3, 2, 40))
    across = x.T.contiguous().T
    assert not across.is_contiguous() and torch.equal(number_format.fake_quantize(across), expected)
    spaced = torch.zeros(12, 80)
    spaced[:, ::2] = x
    assert torch.equal(number_format.fake_quantize(spaced[:, ::2]), expected)
    one = number_format.fake_quantize(x[:1])
    assert number_format.fake_quantize(x[0]).shape == (40,) and torch.equal(number_format.fake_quantize(x[0]), one[0])
    packed = number_format.quantize(x[0]).pack()
    assert torch.equal(QuantizedTensor.from_packed(number_format, packed, 40).dequantize(), one[0])


@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes(name: str) -> None:
    number_format = get_format(name)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = torch.randn(4, 40).to(dtype)
        rounded = number_format.fake_quantize(x)
        assert rounded.dtype == dtype
        assert torch.equal(rounded, number_format.fake_quantize(x.float()).to(dtype))
        assert torch.equal(number_format.quantize(x).codes, number_format.quantize(x.float()).codes)


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_float16_does_not_become_an_infinity(name: str) -> None:
    x = (torch.linspace(-0.4, 1, 64) * 65504).half()[None]
    assert bool(get_format(name).fake_quantize(x).isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_a_group_longer_than_the_row_uses_no_extra_memory(name: str) -> None:
    number_format = get_format(name).with_group_size(10**15)
    x = torch.randn(2, 33)
    row = number_format.with_group_size(-1)
    assert torch.equal(number_format.fake_quantize(x), row.fake_quantize(x))
    assert number_format.bits_per_value(33, 2) == row.bits_per_value(33, 2)


def test_negative_values_do_not_set_the_scale_of_unsigned_integers() -> None:
    rounded = get_format("uint2").fake_quantize(torch.tensor([[-9.0, 1.0, 2.0, 3.0]]))
    assert rounded.tolist() == [[0.0, 1.0, 2.0, 3.0]]
