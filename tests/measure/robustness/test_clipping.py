"""Range clipping: profiled data passes unchanged, faults are contained, and the hooks are gone afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from smelt.errors import ConfigError
from smelt.measure.robustness.bit_flips import flipped_bits
from smelt.measure.robustness.clipping import ActivationRanges, clipped_modules, profile_ranges, range_clipping
from smelt.measure.robustness.storage import select, stored_tensors
from tests.tiny import BUILDS, inputs


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "resnet", "vit"])
@torch.no_grad()
def test_profiled_data_passes_bit_for_bit(family: str) -> None:
    network = BUILDS[family]()
    batch = inputs(family)
    clean = network(**batch).logits
    ranges = profile_ranges(network, [lambda: network(**batch)])
    with range_clipping(network, ranges):
        assert torch.equal(network(**batch).logits, clean)
        clipped = network(**{name: 40 * x if x.is_floating_point() else x for name, x in batch.items()}).logits
    assert torch.isfinite(clipped).all()
    assert torch.equal(network(**batch).logits, clean)
    assert not any(module._forward_hooks for module in network.modules())


@torch.no_grad()
def test_an_exploded_weight_is_contained() -> None:
    network = BUILDS["bert"]()
    batch = inputs("bert")
    clean = network(**batch).logits
    ranges = profile_ranges(network, [lambda: network(**batch)])
    layer = "bert.encoder.layer.0.intermediate.dense"
    (weight, _) = select(stored_tensors(network), layers=[layer])
    with flipped_bits([weight], np.array([30])):  # the top exponent bit of the first weight
        broken = network(**batch).logits
        with range_clipping(network, ranges):
            repaired = network(**batch).logits
    distance, without = ((each - clean).abs().nan_to_num(1e9).max() for each in (repaired, broken))
    assert distance < 0.5 < without or distance < without / 2


@torch.no_grad()
def test_nan_becomes_zero_and_infinities_the_bounds() -> None:
    layer = nn.Linear(2, 3, bias=False)
    layer.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    with range_clipping(nn.Sequential(layer), ActivationRanges({"0": (-2.0, 3.0)})):
        assert layer(torch.tensor([[float("inf"), float("-inf")]])).tolist() == [[0.0, 0.0, 0.0]]
        assert layer(torch.tensor([[9.0, -9.0]])).tolist() == [[3.0, -2.0, 0.0]]


def test_gradients_pass_inside_the_range() -> None:
    layer = nn.Linear(2, 2)
    x = torch.zeros(1, 2, requires_grad=True)
    with range_clipping(nn.Sequential(layer), ActivationRanges({"0": (-10.0, 10.0)})):
        layer(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, layer.weight.sum(0, keepdim=True))


def test_what_is_clipped() -> None:
    names = {type(module).__name__ for module in clipped_modules(BUILDS["bert"]()).values()}
    assert names == {"Linear", "Embedding", "LayerNorm", "GELUActivation", "Tanh"}
    assert {"Conv2d", "BatchNorm2d", "ReLU"} <= {
        type(module).__name__ for module in clipped_modules(BUILDS["resnet"]()).values()
    }
    assert "LlamaRMSNorm" in {type(module).__name__ for module in clipped_modules(BUILDS["llama"]()).values()}


def test_a_margin_widens_both_bounds() -> None:
    widened = ActivationRanges({"a": (-2.0, 4.0), "b": (1.0, 2.0), "c": (-2.0, -1.0)}).widened(1.5)
    assert widened.bounds == {"a": (-3.0, 6.0), "b": (1 / 1.5, 3.0), "c": (-3.0, -1 / 1.5)}
    with pytest.raises(ConfigError, match="clip the calibration data"):
        widened.widened(0.9)


def test_nothing_to_profile() -> None:
    with pytest.raises(ConfigError, match="calibration data"):
        profile_ranges(nn.Linear(1, 1), [])
