"""BRECQ folds batch norms: the same float network, quantized folded weights, artifacts, kernels, pruned networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smelt.compression.base import MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.brecq import Brecq
from smelt.errors import ModelError
from smelt.kernels.dispatch import use_backend
from smelt.measure.cost import count_bytes, count_parameters
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.batch_norm import batch_norms, folded_norms
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.surgery import keep_units
from tests.compression.quantization.test_base import same
from tests.compression.quantization.test_brecq import QUICK, W2A4, batches, quantized
from tests.tiny import BUILDS, inputs

W8 = {"bits": 8, "iterations": 0, "activation_iterations": 0}
RESNETS = ("resnet", "resnet-bottleneck")


def strong_norms(name: str) -> Model:
    """Return a network whose batch norms change much, also the signs of channels."""
    model = Model(BUILDS[name]())
    for norm in batch_norms(model.network).values():
        assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.3, 3.0)
    return model


@pytest.mark.parametrize("name", RESNETS)
def test_the_folded_float_network_computes_the_same(name: str) -> None:
    original, folded = strong_norms(name), strong_norms(name)
    folded.network.load_state_dict(original.network.state_dict())
    count = Brecq().prepare(folded, MethodContext(batches=[{**batches(name)[0], "labels": torch.zeros(3).long()}]))
    assert count == len(batch_norms(original.network)) and not batch_norms(folded.network)
    batch = inputs(name, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(
            folded.network(**batch).logits, original.network(**batch).logits, atol=1e-5, rtol=1e-4
        )
    assert all(part.norm is None for part in folded.anatomy.parts)


@pytest.mark.parametrize("name", RESNETS)
def test_quantized_weights_are_the_folded_ones(name: str) -> None:
    original = strong_norms(name)
    model = strong_norms(name)
    model.network.load_state_dict(original.network.state_dict())
    facts = Brecq(**W8).apply(model, MethodContext(batches=batches(name)))
    assert facts["batch_norms_folded"] == len(batch_norms(original.network))
    assert facts["bytes_before"] == count_bytes(original.network)
    for norm_path, layer_path in folded_norms(model.network).items():
        norm: Any = original.network.get_submodule(norm_path)
        weight: Any = original.network.get_submodule(layer_path).weight
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        layer = quantized_layers(model.network).get(layer_path)
        if layer is None:  # the stem, in float
            assert layer_path.startswith("resnet.embedder")
            continue
        expected = (weight * factor[:, None, None, None]).permute(0, 2, 3, 1).flatten(1).detach()
        steps = (layer.weight - expected).abs() / layer.packed.tensors["scale"].float().flatten()[:, None]
        assert steps.median() < 0.5 and steps.quantile(0.9) < 0.55  # a clipped range cuts off the rest
        assert layer.bias is not None
        torch.testing.assert_close(layer.bias, norm.bias - norm.running_mean * factor, check_stride=False)
    batch = inputs(name, seed=9)
    with torch.no_grad():
        expected, actual = original.network(**batch).logits, model.network(**batch).logits
    assert (actual - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("name", RESNETS)
def test_an_artifact_keeps_folded_norms(name: str, tmp_path: Path) -> None:
    model, _ = quantized({"bits": 2, **QUICK}, name)
    assert folded_norms(model.network) and not batch_norms(model.network)
    save_artifact(model, tmp_path)
    assert json.loads((tmp_path / "smelt.json").read_text())["folded_norms"] == folded_norms(model.network)
    loaded, batch = load_artifact(tmp_path), inputs(name, seed=9)
    assert folded_norms(loaded.network) == folded_norms(model.network)
    assert count_parameters(loaded.network) == count_parameters(model.network)
    with torch.no_grad():
        assert torch.equal(loaded.network(**batch).logits, model.network(**batch).logits)


def test_norms_stay_if_they_are_asked_to(tmp_path: Path) -> None:
    model, facts = quantized({"bits": 2, "fold_batch_norms": False, **QUICK})
    norms = batch_norms(BUILDS["resnet"]()).keys()
    assert batch_norms(model.network).keys() == norms and not folded_norms(model.network)
    assert "batch_norms_folded" not in facts
    assert all(layer.bias is None for layer in quantized_layers(model.network).values())
    save_artifact(model, tmp_path)
    assert "folded_norms" not in json.loads((tmp_path / "smelt.json").read_text())
    assert batch_norms(load_artifact(tmp_path).network).keys() == norms


def test_pruned_channels_are_folded_and_reload(tmp_path: Path) -> None:
    model = strong_norms("resnet")
    for part in model.anatomy.parts:
        keep_units(model.network, part, range(0, part.units, 2))
    original, batch = strong_norms("resnet"), inputs("resnet", seed=9)
    with torch.no_grad():
        pruned: Tensor = model.network(**batch).logits
    Brecq(**W8).apply(model, MethodContext(batches=batches()))
    save_artifact(model, tmp_path)
    loaded = load_artifact(tmp_path)
    assert [part.units for part in loaded.anatomy.parts] == [part.units // 2 for part in original.anatomy.parts]
    with torch.no_grad():
        logits = loaded.network(**batch).logits
        assert torch.equal(logits, model.network(**batch).logits)
    assert (logits - pruned).norm() < 0.05 * pruned.norm()


def test_the_cpu_kernels_add_the_folded_biases() -> None:
    """Integer convolutions of the packed layers compute what the dequantized ones do."""
    model, _ = quantized({**W8, "input_activations": "int8"})
    batch = inputs("resnet", seed=9)
    with torch.no_grad():
        actual = model.network(**batch).logits
        backends = {layer.backend for layer in quantized_layers(model.network).values()}
        with use_backend("reference"):
            expected = model.network(**batch).logits
        for layer in quantized_layers(model.network).values():
            assert layer.bias is not None
            layer.bias.zero_()
        without = model.network(**batch).logits
    assert "reference" not in backends
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
    assert (without - actual).abs().max() > 0.1 * actual.abs().max()


def test_a_resumed_run_folds_again(tmp_path: Path) -> None:
    first, _ = quantized(W2A4, checkpoint=Checkpoint(tmp_path))
    for left in tmp_path.glob("block-[23].*"):
        left.unlink()
    again, _ = quantized(W2A4, checkpoint=Checkpoint(tmp_path))
    assert same(first, again) and folded_norms(again.network) == folded_norms(first.network)


def test_a_norm_that_cannot_be_folded_is_one_sentence() -> None:
    model = Model(BUILDS["resnet"]())
    layer: Any = model.anatomy.blocks[0].module.get_submodule("layer.0")
    layer.normalization.register_forward_hook(lambda _, args, output: output + args[0])  # reads the convolution, too
    with pytest.raises(ModelError, match=r"something else reads .*Use `fold_batch_norms: false` to keep them all\."):
        Brecq(**W8).apply(model, MethodContext(batches=batches()))
