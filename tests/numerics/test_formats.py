"""Properties of every format: round to nearest, idempotence, names, stored tensors and their size."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smelt.errors import FormatError
from smelt.numerics import FORMATS, QuantizedTensor, format_name, get_format
from smelt.numerics.format import packed_shapes
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.scales import POWER_OF_TWO_SCALES
from tests.numerics.format_names import NAMES, every_value


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Draw small matrices of odd shapes: normal, constant or sparse, with values of very different magnitudes."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(rows, columns, generator=generator)
    distribution = draw(st.sampled_from(["normal", "wide", "constant", "one-signed", "sparse"]))
    if distribution == "wide":
        x = x * torch.exp2(6 * torch.randn(rows, columns, generator=generator))
    elif distribution == "constant":
        x = x[:1, :1].expand(rows, columns)
    elif distribution == "one-signed":
        x = -x.abs()
    elif distribution == "sparse":
        x = torch.where(torch.rand(rows, columns, generator=generator) < 0.8, 0.0, x)
    return x * 2.0 ** draw(st.integers(-20, 20))


def round_trip(quantized: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor.from_packed(quantized.format, quantized.pack(), quantized.codes.shape[-1])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(x=matrices())
def test_every_value_rounds_to_the_nearest_grid_value(name: str, x: Tensor) -> None:
    number_format = get_format(name)
    grouped = number_format.split_groups(x)
    qparams = number_format.compute_qparams(grouped, tensor_amax=number_format.tensor_amax(x))
    error = (number_format.dequantize_groups(number_format.quantize_groups(grouped, qparams), qparams) - grouped).abs()
    choices = every_value(number_format, qparams)
    if number_format.group_size == 0:
        choices = choices.expand(*grouped.shape[:-1], -1)
    least = (grouped[..., None] - choices[..., None, :]).abs().nan_to_num(nan=torch.inf).amin(-1)
    assert bool((error <= least * (1 + 1e-4) + 1e-5 * grouped.abs()).all())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(x=matrices())
def test_grid_values_are_unchanged(name: str, x: Tensor) -> None:
    number_format = get_format(name)
    grouped = number_format.split_groups(x)
    qparams = number_format.compute_qparams(grouped, tensor_amax=number_format.tensor_amax(x))
    codes = number_format.quantize_groups(grouped, qparams)
    values = number_format.dequantize_groups(codes, qparams)
    requantized = number_format.quantize_groups(values, qparams)
    assert torch.equal(number_format.dequantize_groups(requantized, qparams), values)
    every = every_value(number_format, qparams).nan_to_num(nan=0.0)
    assert torch.equal(number_format.dequantize_groups(number_format.quantize_groups(every, qparams), qparams), every)


@pytest.mark.parametrize("name", [name for name in NAMES if get_format(name).scale_dtype in POWER_OF_TWO_SCALES])
@settings(max_examples=15)
@given(x=matrices())
def test_requantizing_dequantized_values_gives_the_same_codes(name: str, x: Tensor) -> None:
    """Power-of-two scales are recovered exactly, other scales up to the last bit."""
    number_format = get_format(name)
    rounded = number_format.fake_quantize(x)
    assert torch.equal(number_format.fake_quantize(rounded), rounded)


@pytest.mark.parametrize("name", ["int4", "int8/16", "fp8-e4m3", "nf4", "ternary", "mxfp4-up", "amxfp4", "dint4-sym"])
def test_rounding_is_idempotent(name: str) -> None:
    x = torch.randn(16, 256)
    rounded = get_format(name).fake_quantize(x)
    torch.testing.assert_close(get_format(name).fake_quantize(rounded), rounded, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(x=matrices())
def test_pack_and_unpack(name: str, x: Tensor) -> None:
    number_format = get_format(name)
    quantized = number_format.quantize(x)
    unpacked = round_trip(quantized)
    assert torch.equal(unpacked.codes, quantized.codes) and torch.equal(unpacked.dequantize(), quantized.dequantize())
    assert quantized.dequantize().shape == x.shape and quantized.dequantize().dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_declared_shapes_and_bits_match_the_stored_tensors(name: str) -> None:
    number_format = get_format(name)
    for rows, columns in ((1, 1), (3, 7), (4, 96), (5, 33)):
        packed = number_format.quantize(torch.randn(rows, columns)).pack()
        expected = packed_shapes(number_format, rows, columns)
        assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in packed.items()} == expected
        stored = sum(8 * tensor.nbytes for tensor in packed.values())
        assert number_format.bits_per_value(columns, rows) == pytest.approx(stored / (rows * columns))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int4/128@float16", 4.125), ("int4-asym/128@float16", 4.1875), ("mxfp4", 4.25), ("mxfp6-e2m3", 6.25),
        ("mxfp8-e4m3", 8.25), ("mxint8", 8.25), ("amxfp4", 4.5), ("nf4", 4.5), ("fp4/32@float16", 4.5),
        ("dint4/32@e5m2", 4.5), ("ternary/64@float16", 2.25),
    ],
)  # fmt: skip
def test_bits_per_value(name: str, bits: float) -> None:
    assert get_format(name).bits_per_value(4096, 4096) == bits


def test_the_per_tensor_scale_is_counted() -> None:
    assert get_format("nvfp4").bits_per_value(64, 1) == 4.5 + 32 / 64
    assert get_format("int8/tensor").bits_per_value(64, 2) == 8 + 32 / 128


@pytest.mark.parametrize("name", NAMES)
def test_names_round_trip(name: str) -> None:
    number_format = get_format(name)
    assert get_format(format_name(number_format)) == number_format
    assert name not in FORMATS or format_name(number_format) == name
    assert pickle.loads(pickle.dumps(number_format)) == number_format  # noqa: S301  (our own bytes)


def test_canonical_names() -> None:
    assert format_name(get_format("int4/row@float32")) == "int4"
    assert format_name(get_format("fp4/32@e8m0")) == "mxfp4"
    assert format_name(get_format("mxfp4/16")) == "fp4/16@e8m0"
    assert format_name(get_format("int4-asym/0128@float16")) == "int4-asym/128@float16"


def test_no_two_bases_are_the_same_format() -> None:
    assert len(set(FORMATS.values())) == len(FORMATS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int9", "no number format 'int9'; `smelt formats` lists them"),
        ("", "no number format"),
        ("int4/", "a number, `row` or `tensor`"),
        ("int4/0", "a number, `row` or `tensor`"),
        ("int4/-1", "a number, `row` or `tensor`"),
        ("int4/1.5", "a number, `row` or `tensor`"),
        ("int4@", "the scale dtype in 'int4@' must be one of float32, float16"),
        ("int4@int8", "the scale dtype"),
        ("int4@e8m0", "must be one of float32, float16, bfloat16, e4m3, e5m2."),
        ("ternary@e8m0-up", "the scale dtype"),
        ("nvfp4@float16", "the scale dtype in 'nvfp4@float16' must be one of e4m3."),
        ("int4@float16/32", "the scale dtype"),
    ],
)
def test_invalid_names(name: str, words: str) -> None:
    with pytest.raises(FormatError, match=words.replace(".", r"\.")):
        get_format(name)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        ("int4", {"group_size": -2}, "at least one value"),
        ("int4", {"bits": 9}, "2 to 8 bits, not 9"),
        ("int4", {"bits": 1}, "2 to 8 bits, not 1"),
        ("int4", {"zero_dtype": "float16"}, "no zero point"),
        ("int4-asym", {"full_range": True}, "symmetric range"),
        ("int4", {"scale_dtype": "e8m0"}, "not in e8m0"),
        ("nvfp4", {"scale_dtype": "float32"}, "scales in e4m3, not in float32"),
        ("dint4", {"bits": 2}, "3 to 8 bits"),
        ("dint4", {"zero_dtype": "float16"}, "is a code"),
    ],
)
def test_invalid_formats(base: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        replace(FORMATS[base], **changes)  # type: ignore[arg-type]


def test_a_format_without_a_name() -> None:
    odd = type("Odd", (Integer,), {})
    with pytest.raises(FormatError, match="has no name"):
        format_name(odd())


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_unbiased_and_lands_on_neighbors(name: str) -> None:
    number_format, generator, draws = get_format(name), torch.Generator().manual_seed(1), 1500
    x = torch.randn(2, 40)
    grouped = number_format.split_groups(x)
    qparams = number_format.compute_qparams(grouped, tensor_amax=number_format.tensor_amax(x))
    codes = number_format.quantize_groups_stochastic(grouped.expand(draws, *grouped.shape), qparams, generator)
    samples = number_format.dequantize_groups(codes, qparams)
    choices = every_value(number_format, qparams).nan_to_num(nan=torch.inf)
    choices = choices.expand(*grouped.shape[:-1], -1)[..., None, :]
    slack = 1e-6 * grouped.abs()
    high = choices.masked_fill(choices < (grouped - slack)[..., None], torch.inf).amin(-1)
    low = choices.masked_fill(choices > (grouped + slack)[..., None], -torch.inf).amax(-1)
    assert bool(((samples == low) | (samples == high)).all())
    inside = high.isfinite() & low.isfinite()
    deviation = ((high - grouped) * (grouped - low)).clamp(min=0).sqrt() / draws**0.5  # of the mean
    assert bool(((samples.mean(0) - grouped).abs() <= 5 * deviation + 10 * slack)[inside].all())


def test_a_generator_makes_quantize_stochastic() -> None:
    x = torch.full((1, 2000), 0.3).index_fill(1, torch.tensor([0]), 7.0)  # a scale of one
    sampled = get_format("int4").quantize(x, generator=torch.Generator().manual_seed(0)).dequantize()
    assert set(sampled.unique().tolist()) == {0.0, 1.0, 7.0} and float(sampled[0, 1:].mean()) == pytest.approx(
        0.3, abs=0.05
    )
    assert float(get_format("int4").fake_quantize(x)[0, 1:].abs().max()) == 0


def test_a_clip_ratio_clips() -> None:
    x = torch.randn(4, 64)
    for name in ("int4", "int4-asym", "dint4", "dint4-sym", "fp8-e4m3", "nf4", "nvfp4", "amxfp4@float32", "ternary"):
        number_format = get_format(name)
        grouped = number_format.split_groups(x)
        full, half = (
            number_format.compute_qparams(grouped, clip_ratio=shrink, tensor_amax=number_format.tensor_amax(x))
            for shrink in (1.0, 0.5)
        )
        ratio = half.scale / full.scale
        assert torch.allclose(ratio, torch.full_like(ratio, 0.5), rtol=0.07), name  # up to the rounding to E4M3


def test_dint_is_an_integer_format_with_two_fewer_codes() -> None:
    assert isinstance(get_format("dint4"), DenormalInteger) and format_name(DenormalInteger(bits=4)) == "dint4"
    assert format_name(Integer(bits=4, symmetric=False)) == "int4-asym"
