"""The operators against the `ibert` modules of transformers, which simulate the same integers in float tensors."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.ibert.quant_modules import IntGELU, IntLayerNorm, IntSoftmax

from smelt.runtime.integer import ops
from smelt.runtime.integer.constants import exp_constants, gelu_constants, norm_constants, softmax_constants


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1e-3])
def test_gelu(scale: float) -> None:
    """Theirs always drops 14 bits, which costs accuracy at large scales: the difference is theirs."""
    x = torch.arange(-4000, 4001, dtype=torch.float64) * 1e-3
    q = (x / scale).round()
    theirs, _ = IntGELU(quant_mode=True)(q * scale, torch.tensor([scale], dtype=torch.float64))
    constants, output_scale = gelu_constants(scale, int(q.abs().max()), "layer", maximum=2**62)
    ours = ops.gelu(q.to(torch.int64), **constants) * output_scale
    step = 2**14 * scale**2 * 0.2888 / 2  # of their erf
    assert (ours - theirs).abs().max() < 4 * step + 1e-3


def test_exp_polynomial_is_the_same_integer() -> None:
    scale = 1e-3
    q = -torch.arange(0, 15_000)
    module = IntSoftmax(8, quant_mode=True)
    theirs, factor = module.int_exp(q.double(), torch.tensor([scale], dtype=torch.float64))
    constants = exp_constants(scale, 20, "layer")
    ours = ops._exp(q, **constants)
    # Their ln 2 is 0.6931, and floor(-0.6931 / scale) is one step larger in magnitude than ours.
    assert constants["q_ln2"] == 693
    assert (ours / int(ours[0]) - (theirs * factor) / (theirs * factor)[0]).abs().max() < 2e-3


def test_softmax_keeps_the_mass_that_theirs_loses() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = math.log(2) / 1024
    q = (2 * torch.randn(64, 128, generator=generator) / scale).round()
    module = IntSoftmax(8, quant_mode=True).train()  # its range of exp comes from the first batch
    theirs, _ = module((q * scale)[None, None].double(), torch.tensor([scale], dtype=torch.float64))
    theirs = theirs[0, 0]
    constants, output_scale = softmax_constants(scale, 512, "layer", levels=255)
    ours = ops.softmax(q.to(torch.int32), **constants) * output_scale
    exact = (q * scale).double().softmax(-1)
    assert (ours - theirs).abs().max() < 2.5 / 256  # theirs rounds down
    assert (theirs.sum(-1) - 1).abs().mean() > 3 * (ours.sum(-1) - 1).abs().mean()
    assert (ours - exact).abs().max() < (theirs - exact).abs().max()


def test_layer_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    width, scale = 384, 1e-4
    x = torch.randn(1, 64, width, generator=generator, dtype=torch.float64)
    x[..., 3] *= 10
    weight, bias = torch.rand(width, generator=generator) + 0.5, torch.randn(width, generator=generator)
    module = IntLayerNorm(width, 1e-12, quant_mode=True).double()
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
        q = (x / scale).round()
        theirs, _ = module(q * scale, torch.tensor([scale], dtype=torch.float64))
    attributes, constants, output_scale = norm_constants(scale, int(q.abs().max()), weight, bias, 1e-12, "layer")
    ours = ops.layer_norm(q.to(torch.int32), **attributes, **constants) * output_scale
    exact = torch.nn.functional.layer_norm(x, (width,), weight.double(), bias.double(), 1e-12)
    assert (ours - theirs).abs().max() < 5e-3
    assert (ours - exact).square().mean().sqrt() < 4e-4
