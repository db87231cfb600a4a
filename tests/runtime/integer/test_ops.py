"""Integer operators against float64 formulas and exact integer arithmetic in Python."""

import math

import pytest
import torch
import torch.nn.functional as F

from smelt.errors import ConversionError
from smelt.runtime.integer import ops
from smelt.runtime.integer.constants import (
    exp_constants,
    gelu_constants,
    norm_constants,
    silu_constants,
    softmax_constants,
    tanh_constants,
)
from smelt.runtime.integer.dyadic import MAX_SHIFT, Dyadic, dyadic_tensors

SCALES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2]


def points(limit: float, scale: float, count: int = 20_000) -> torch.Tensor:
    """Return integers that cover [-limit, limit] at a scale."""
    largest = math.ceil(limit / scale)
    return torch.arange(-largest, largest + 1, max(1, 2 * largest // count))


@pytest.mark.parametrize(
    ("ratio", "multiplier", "shift"), [(0.0123, 1690499128, 37), (3.7e-5, 1301821767, 45), (1.0, 2**30, 30)]
)
def test_dyadic_of_known_ratios(ratio: float, multiplier: int, shift: int) -> None:
    assert Dyadic.of(ratio, "layer") == Dyadic(multiplier, shift)


def test_dyadic_renormalizes_a_multiplier_that_rounds_up_to_31_bits() -> None:
    number = Dyadic.of(1 - 2**-40, "layer")
    assert number == Dyadic(2**30, 30)


def test_dyadic_relative_error() -> None:
    for exponent in range(-60, 10):
        ratio = 1.2345678901 * 10 ** (exponent / 10)
        number = Dyadic.of(ratio, "layer")
        assert abs(number.multiplier / 2**number.shift / ratio - 1) <= 4.7e-10


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.inf, math.nan, 1e-12, 1e12])
def test_dyadic_refuses_what_it_cannot_represent(ratio: float) -> None:
    with pytest.raises(ConversionError, match=r"encoder\.layer\.3"):
        Dyadic.of(ratio, "encoder.layer.3")


def test_dyadic_takes_the_largest_shift_and_none_beyond() -> None:
    assert Dyadic.of(2.0**-32, "layer") == Dyadic(2**30, MAX_SHIFT)
    with pytest.raises(ConversionError, match="needs a shift of 63"):
        Dyadic.of(2.0**-33, "layer")


def test_requantize_rounds_half_up_and_clamps() -> None:
    x = torch.tensor([-6, -5, -3, -2, -1, 0, 1, 2, 3, 5, 6, 1000, -1000], dtype=torch.int32)
    half = ops.requantize(x, multiplier=torch.tensor([1]), shift=torch.tensor([1]), minimum=-128, maximum=127)
    assert half.tolist() == [-3, -2, -1, -1, 0, 0, 1, 1, 2, 3, 3, 127, -128]
    kept = ops.requantize(x, multiplier=torch.tensor([3]), shift=torch.tensor([0]), minimum=-(2**31), maximum=2**31 - 1)
    assert kept.tolist() == (3 * x).tolist()


@pytest.mark.parametrize("axis", [-1, 1])
def test_requantize_per_channel_is_exact(axis: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (2, 3, 3), generator=generator)
    multiplier, shift = dyadic_tensors([0.5, 3e-7, 1e-3], "layer")
    result = ops.requantize(x, multiplier=multiplier, shift=shift, minimum=-(2**31), maximum=2**31 - 1, axis=axis)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(3)).tolist():
        channel = index[axis]
        m, s = int(multiplier[channel]), int(shift[channel])
        assert int(result[tuple(index)]) == (int(x[tuple(index)]) * m + (1 << (s - 1))) >> s


@pytest.mark.parametrize("scale", SCALES)
def test_gelu_error_at_every_scale(scale: float) -> None:
    x = points(4, scale)
    constants, output_scale = gelu_constants(scale, int(x.max()), "layer", maximum=2**62)
    error = (ops.gelu(x, **constants) * output_scale - F.gelu(x.double() * scale)).abs()
    assert 0.0175 < error.max() < 0.0185
    assert error.square().mean().sqrt() < 0.0085


def test_gelu_of_16_bits_fits_int32_without_losing_accuracy() -> None:
    scale = 16 / 32767
    x = torch.arange(-32767, 32768)
    constants, output_scale = gelu_constants(scale, 32767, "layer")
    result = ops.gelu(x, **constants)
    assert constants["shift"] > 0
    assert result.abs().max() < 2**31
    assert (result * output_scale - F.gelu(x.double() * scale)).abs().max() < 0.0185


@pytest.mark.parametrize("scale", SCALES)
def test_exp_error_at_every_scale(scale: float) -> None:
    x = -points(20, scale).abs()
    constants = exp_constants(scale, 20, "layer")
    one = int(ops._exp(torch.tensor(0), **constants))
    assert one.bit_length() == 20
    error = (ops._exp(x, **constants) / one - (x.double() * scale).exp()).abs()
    assert error.max() < (1.95e-3 if scale < 1e-2 else 2.4e-3)  # ln 2 is 69 steps at 1e-2


@pytest.mark.parametrize("scale", SCALES)
def test_tanh_error_at_every_scale(scale: float) -> None:
    x = points(6, scale)
    constants, output_scale = tanh_constants(scale, "layer", levels=32767)
    result = ops.tanh(x, **constants)
    assert (result * output_scale - torch.tanh(x.double() * scale)).abs().max() < (2e-3 if scale < 1e-2 else 2e-2)
    assert torch.equal(result, -ops.tanh(-x, **constants))


def test_tanh_of_8_bits_rounds_to_the_nearest_level() -> None:
    constants, _ = tanh_constants(1e-3, "layer")
    x = points(6, 1e-3)
    result = ops.tanh(x, **constants)
    assert (result - 127 * torch.tanh(x.double() * 1e-3)).abs().max() < 0.5 + 127 * 2e-3
    assert (result.min(), result.max()) == (-127, 127)


@pytest.mark.parametrize("length", [1, 5, 128, 512])
@pytest.mark.parametrize("levels", [127, 32767])
def test_softmax_rounds_and_sums_to_one(length: int, levels: int) -> None:
    logits = 2 * torch.randn(50, length, generator=torch.Generator().manual_seed(length))
    scale = math.log(2) / 1024
    constants, output_scale = softmax_constants(scale, 512, "layer", levels)
    assert constants["q_ln2"] == 1024
    probabilities = ops.softmax((logits / scale).round().to(torch.int32), **constants) * output_scale
    assert (probabilities - logits.softmax(-1)).abs().max() < 0.5 / levels + 3e-3
    if levels == 32767:  # 0.999 and 0.996 are the paper's sums with floor
        assert (probabilities.sum(-1) - 1).abs().max() < 0.005


def test_softmax_ignores_masked_positions_even_if_they_are_largest() -> None:
    scale = math.log(2) / 1024
    constants, _ = softmax_constants(scale, 8, "layer", 32767)
    x = torch.tensor([[1000, 200, 90_000, -500], [7, 8, 9, 10]], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]])
    result = ops.softmax(x, mask, **constants)
    expected = ops.softmax(x[:1, [0, 1, 3]], **constants)
    assert result[0].tolist() == [*expected[0, :2].tolist(), 0, expected[0, 2].item()]
    assert result[1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("width", [384, 768])
@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2])
def test_layer_norm_with_an_outlier_channel(width: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, width, generator=generator) * 2**17
    q[:, 3] *= 8
    q = q.round().to(torch.int32)
    limit = int(q.abs().max())
    attributes, constants, output_scale = norm_constants(
        scale, limit, torch.ones(width), torch.zeros(width), 0.0, "layer"
    )
    result = ops.layer_norm(q, **attributes, **constants)
    error = result * output_scale - F.layer_norm(q.double(), (width,))
    assert error.square().mean().sqrt() < 1e-4  # the paper's kernel: 4e-4
    assert result.abs().max() < 2**31


def test_layer_norm_with_weights_near_zero_and_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(64, generator=generator), torch.randn(64, generator=generator)
    weight[:8] = torch.tensor([0.0, 1e-12, -1e-9, 1e-6, -1e-3, 1e-4, 0.0, -0.5])
    attributes, constants, output_scale = norm_constants(1e-5, 2**21, weight, bias, 1e-5, "layer")
    result = ops.layer_norm((x / 1e-5).round().to(torch.int32), **attributes, **constants) * output_scale
    assert (result - F.layer_norm(x, (64,), weight.double(), bias.double())).abs().max() < 5e-3


def test_layer_norm_keeps_epsilon_for_rows_of_small_variance() -> None:
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, 0] = 1e-3
    attributes, constants, output_scale = norm_constants(1e-6, 2**21, torch.ones(64), torch.zeros(64), 1e-5, "layer")
    result = ops.layer_norm((x / 1e-6).round().to(torch.int32), **attributes, **constants) * output_scale
    assert (result - F.layer_norm(x, (64,), eps=1e-5)).abs().max() < 1e-3
    assert ops.layer_norm(torch.zeros(1, 64, dtype=torch.int32), **attributes, **constants).abs().max() == 0


def test_rms_norm() -> None:
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    weight = torch.linspace(-1, 2, 96)
    attributes, constants, output_scale = norm_constants(1e-5, 2**21, weight, None, 1e-6, "layer")
    result = ops.rms_norm((x / 1e-5).round().to(torch.int32), **attributes, **constants) * output_scale
    assert (result - F.rms_norm(x, (96,), weight.double(), 1e-6)).abs().max() < 3e-3


def test_sqrt_is_the_floor_of_the_root() -> None:
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(0, 2**62, (5000,), generator=generator)
    roots = torch.arange(1, 2**31, 2**19 + 1)
    x = torch.cat([torch.arange(1000), large, large >> 30, roots**2, roots**2 - 1, roots**2 + 1])
    assert ops.sqrt(x).tolist() == [math.isqrt(value) for value in x.tolist()]


def test_gelu_constants_are_floors() -> None:
    """b / s = 25.02 and 1 / (a s^2) = 692.5 at s = 0.1 / sqrt(2), as in the paper's code."""
    constants, _ = gelu_constants(0.1, 127, "layer")
    assert constants == {"q_b": 25, "q_c": 692, "q_one": 692, "shift": 0}


def test_squares_of_a_norm_are_shifted_only_if_their_sum_needs_it() -> None:
    """768 squares of 2 * 2^24 take 59.6 bits, of 60 that are allowed."""
    weight = torch.ones(768)
    shifts = [norm_constants(1e-4, limit, weight, None, 1e-12, "layer")[0]["shift"] for limit in (2**24, 2**25)]
    assert shifts == [0, 1]


def test_constants_refuse_scales_without_an_integer_form() -> None:
    with pytest.raises(ConversionError, match="fc1"):
        gelu_constants(5.0, 127, "fc1")
    with pytest.raises(ConversionError, match="attention"):
        softmax_constants(1.0, 128, "attention")
    with pytest.raises(ConversionError, match="attention"):
        softmax_constants(1e-3, 2**25, "attention")
    with pytest.raises(ConversionError, match="norm"):
        norm_constants(1e-4, 2**21, torch.full((8,), 1e-9), torch.ones(8), 1e-5, "norm")


def test_linear_matmul_and_convolutions_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)

    def int8(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    x, weight, bias = int8(3, 5, 16), int8(7, 16), torch.arange(7, dtype=torch.int32)
    assert torch.equal(
        ops.linear(x, weight=weight, bias=bias).double(), F.linear(x.double(), weight.double(), bias.double())
    )
    a, b = int8(2, 3, 4, 8), int8(2, 3, 5, 8)
    assert torch.equal(ops.matmul(a, b, transpose_b=1).double(), a.double() @ b.double().mT)
    x, weight, bias = int8(2, 4, 9, 9), int8(6, 2, 3, 3), torch.arange(6, dtype=torch.int32)
    expected = F.conv2d(x.double(), weight.double(), bias.double(), (2, 1), (1, 1), (1, 2), 2)
    result = ops.conv2d(x, weight=weight, bias=bias, stride=[2, 1], padding=[1, 1], dilation=[1, 2], groups=2)
    assert torch.equal(result.double(), expected)
    x, weight = int8(2, 4, 30), int8(4, 1, 5)
    expected = F.conv1d(x.double(), weight.double(), None, 2, 4, 2, 4)
    assert torch.equal(ops.conv1d(x, weight=weight, stride=2, padding=4, dilation=2, groups=4).double(), expected)


def test_table_takes_the_right_segment_at_its_breakpoints() -> None:
    result = ops.table(
        torch.tensor([-5, -1, 0, 2, 3, 9]),
        breakpoints=torch.tensor([-1, 3]), slopes=torch.tensor([0, 2, -1]), intercepts=torch.tensor([7, 1, 100]),
    )  # fmt: skip
    assert result.tolist() == [7, -1, 1, 5, 97, 91]


def test_pooling_argmax_and_masked_mean() -> None:
    x = torch.arange(16).reshape(1, 1, 4, 4)
    assert ops.avg_pool(x, kernel=[2, 2], stride=[2, 2]).flatten().tolist() == [10, 18, 42, 50]
    assert ops.max_pool(x, kernel=[2, 2], stride=[1, 2]).flatten().tolist() == [5, 7, 9, 11, 13, 15]
    assert ops.argmax(torch.tensor([[1, 7, 7], [3, 2, 3]])).tolist() == [1, 0]
    assert ops.mean(x, axis=-1).flatten().tolist() == [6, 22, 38, 54]
    rows = torch.tensor([[[3, -3], [4, -4], [100, 100]]])
    assert ops.masked_mean(rows, torch.tensor([[1, 1, 0]])).tolist() == [[4, -3]]  # 3.5 and -3.5, half up


@pytest.mark.parametrize("scale", SCALES[2:])
def test_silu_error_at_every_scale(scale: float) -> None:
    x = points(min(10, 32767 * scale), scale)
    constants, output_scale = silu_constants(scale, int(x.max()), "layer")
    error = (ops.silu(x, **constants) * output_scale - F.silu(x.double() * scale)).abs()
    assert error.max() < (8.5e-4 if scale < 1e-2 else 2.1e-3)


def test_silu_is_exact_integer_arithmetic() -> None:
    scale = 3.7e-4
    constants, _ = silu_constants(scale, 32767, "layer")
    c = {name: constants[name] for name in ("q_ln2", "q_b", "q_c", "max_halvings", "lift", "drop")}
    x = torch.randint(-32767, 32768, (300,), generator=torch.Generator().manual_seed(0))
    for value, result in zip(x.tolist(), ops.silu(x, **constants).tolist(), strict=True):
        exp, one = (python_exp(-abs(value), **c), python_exp(0, **c))
        assert result == value * ((exp if value < 0 else one) * 2 ** constants["bits"] // (one + exp))
        assert abs(result) < 2**31


def python_exp(x: int, q_ln2: int, q_b: int, q_c: int, max_halvings: int, lift: int, drop: int) -> int:
    """i-exp in Python's integers, which have no width."""
    x = max(x, -max_halvings * q_ln2)
    halvings = -x // q_ln2
    rest = x + halvings * q_ln2
    return ((rest * (rest + q_b) + q_c) << lift) >> (drop + halvings)


def test_silu_refuses_inputs_that_overflow() -> None:
    with pytest.raises(ConversionError, match=r"mlp: SiLU of inputs up to 16777216 overflows int32"):
        silu_constants(1e-3, 2**24, "mlp")


def test_rope_rotates_and_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-32767, 32768, (2, 5, 3, 8), generator=generator, dtype=torch.int16)
    angles = torch.rand(2, 5, 4, generator=generator, dtype=torch.float64) * 100
    cos, sin = ((part * 2**14).round().to(torch.int16) for part in (angles.cos(), angles.sin()))
    result = ops.rope(x, cos, sin)
    assert int(result.abs().max()) < 2**31
    for batch, token, head, i in torch.cartesian_prod(*map(torch.arange, (2, 5, 3, 4))).tolist():
        a, b = int(x[batch, token, head, i]), int(x[batch, token, head, i + 4])
        c, s = int(cos[batch, token, i]), int(sin[batch, token, i])
        assert result[batch, token, head, [i, i + 4]].tolist() == [a * c - b * s, b * c + a * s]
    complex_x = (
        torch.complex(x[..., :4].double(), x[..., 4:].double())
        * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    )
    error = result / 2**14 - torch.cat((complex_x.real, complex_x.imag), -1)
    assert error.abs().max() <= 2 * 32767 * 2**-15  # each table entry is rounded by at most half a unit


def test_causal_mask_shows_earlier_tokens_that_are_no_padding() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]])
    ids = torch.zeros(2, 2, dtype=torch.int32)  # the last two of five keys
    visible = ops.causal_mask(mask, ids, repeats=2)
    assert visible[:, 0, :2].tolist() == [[[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]], [[1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]]
    assert torch.equal(visible[:, 0, 2:], visible[:, 0, :2])


def test_multiply_and_concat() -> None:
    a, b = torch.tensor([[32767, -32767]], dtype=torch.int16), torch.tensor([[32767], [2]], dtype=torch.int16)
    assert ops.multiply(a, b).tolist() == [[32767**2, -(32767**2)], [65534, -65534]]
    assert ops.concat(a, a, axis=0).tolist() == [[32767, -32767]] * 2
    assert ops.concat(a[:, :0], a, axis=1).tolist() == [[32767, -32767]]


def test_softmax_with_sixteen_bits_keeps_small_probabilities() -> None:
    """A thousand equal scores: 8 bits round each probability to zero."""
    constants, scale = softmax_constants(0.7 / 1024, 1024, "layer", 32767)
    x = torch.zeros(1, 1000, dtype=torch.int32)
    assert float((ops.softmax(x, **constants) * scale).sum()) == pytest.approx(1.0, abs=0.02)
    assert int(ops.softmax(torch.tensor([[0, -(2**20)]]), **constants)[0, 0]) == 32767
