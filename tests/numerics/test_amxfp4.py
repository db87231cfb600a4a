"""AMXFP4, two scales by sign: the claims of its card hold exactly."""

from __future__ import annotations

import pytest
import torch

from smelt.numerics import get_format


@pytest.mark.parametrize("scale", ["e5m2", "e4m3", "float16", "e8m0"])
@pytest.mark.parametrize("sign", [1, -1])
def test_with_one_sign_it_equals_the_format_with_one_scale(scale: str, sign: int) -> None:
    x = sign * torch.rand(16, 128).square()
    assert torch.equal(get_format(f"amxfp4@{scale}").fake_quantize(x), get_format(f"fp4/32@{scale}").fake_quantize(x))


def test_the_other_sign_mirrors_the_codes() -> None:
    x = torch.randn(16, 128).pow(3) + 0.3
    quantized, back = get_format("amxfp4").quantize(x), get_format("amxfp4").quantize(-x)
    mirrored = torch.where(quantized.codes == 0, 0, quantized.codes ^ 8)
    assert torch.equal(back.codes, mirrored)
    assert torch.equal(back.qparams.scale, quantized.qparams.negative) and torch.equal(
        back.qparams.negative, quantized.qparams.scale
    )  # type: ignore[arg-type]
    assert torch.equal(back.dequantize(), -quantized.dequantize())


def test_each_sign_has_its_own_scale() -> None:
    """A block whose positive values are a hundred times its negative ones represents both."""
    x = torch.where(torch.arange(32) % 2 == 0, 100.0, -1.0) * torch.linspace(0.5, 1, 32)
    qparams = get_format("amxfp4@float32").quantize(x[None]).qparams
    assert qparams.negative is not None
    assert float(qparams.scale * 6) == pytest.approx(float(x.max())) and float(qparams.negative * 6) == pytest.approx(
        1.0
    )
    small = x < 0
    assert float((get_format("amxfp4").fake_quantize(x[None])[0, small] / x[small] - 1).abs().max()) < 0.2
    assert bool((get_format("mxfp4").fake_quantize(x[None])[0, small] == 0).all())


def test_the_product_by_four_quadrants_of_signs() -> None:
    """y = sum over blocks of s+s+ P++ + s+s- P+- + s-s+ P-+ + s-s- P--, each P a plain sum of products of elements."""
    number_format = get_format("amxfp4")
    left, right = (number_format.quantize(torch.randn(rows, 96).pow(3)) for rows in (5, 7))
    parts = {}
    for name, operand in (("left", left), ("right", right)):
        elements = number_format.elements.decode(operand.codes).unflatten(-1, (-1, 32))  # type: ignore[attr-defined]
        qparams = operand.qparams
        assert qparams.negative is not None
        parts[name] = [
            (elements.clamp(min=0), qparams.scale[..., 0]),
            (elements.clamp(max=0), qparams.negative[..., 0]),
        ]
    product = torch.zeros(5, 7, dtype=torch.float64)
    for a, scale_a in parts["left"]:
        for b, scale_b in parts["right"]:
            quadrant = torch.einsum("mkc,nkc->mnk", a, b)  # exact: multiples of a quarter
            product += torch.einsum("mnk,mk,nk->mn", quadrant, scale_a, scale_b).double()
    torch.testing.assert_close(
        product, left.dequantize().double() @ right.dequantize().double().T, rtol=1e-5, atol=1e-5
    )


def test_a_tiny_block_has_the_smallest_scale_and_not_zero() -> None:
    x = torch.full((1, 32), 2.0**-18)
    qparams = get_format("amxfp4").quantize(x).qparams
    assert float(qparams.scale) == 2.0**-16 and float(qparams.negative) == 1.0  # type: ignore[arg-type]
    assert torch.equal(get_format("amxfp4").fake_quantize(x), torch.zeros(1, 32))
