"""Refitting convolutions after channel pruning: exact where channels are redundant, better than none elsewhere."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smelt.compression.pruning  # noqa: F401  (puts the methods on the list)
from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.block_inputs import record_io
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.pruning.conv_repair import cut_and_refit
from smelt.compression.pruning.repair import RepairSettings
from smelt.errors import DataError
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from tests.compression.quantization.test_base import InterruptedRunError, InterruptingProgress, same
from tests.tiny import BUILDS, inputs


def pruned(name: str, settings: dict[str, Any], **context: Any) -> Model:
    model = Model(BUILDS[name]())
    model.network.config.image_size = 32
    batches = [{**inputs(name, batch=8, seed=seed), "labels": torch.arange(8) % 5} for seed in range(6)]
    METHODS.build({"budget": {"parameters": 0.7}, **settings}).apply(model, MethodContext(batches=batches, **context))
    return model


@torch.no_grad()
def error(name: str, model: Model) -> float:
    """Return the error of the last hidden states on new images, relative to their size."""
    batch = inputs(name, batch=8, seed=99)
    expected = BUILDS[name]().resnet(**batch).last_hidden_state
    return float((model.network.resnet(**batch).last_hidden_state - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "method"), [("resnet", "magnitude"), ("resnet-bottleneck", "magnitude"), ("resnet-bottleneck", "fisher")]
)
def test_refitting_is_better_than_cutting_alone(name: str, method: str, tmp_path: Path) -> None:
    cut, repaired = (pruned(name, {"method": method, "repair": repair}) for repair in ("none", "full"))
    assert error(name, repaired) < 0.8 * error(name, cut)
    assert all(part.output.bias is None for part in repaired.anatomy.parts)
    save_artifact(repaired, tmp_path)
    with torch.no_grad():
        batch = inputs(name)
        assert torch.equal(load_artifact(tmp_path).network(**batch).logits, repaired.network(**batch).logits)


@torch.no_grad()
def test_the_error_of_every_refitted_convolution_is_orthogonal_to_its_inputs() -> None:
    """The normal equations: the error is that to the dense network, after the batch norm, summed over all images."""
    repaired = pruned("resnet", {"method": "magnitude", "repair": "full", "damping": 1e-8}).network
    images = torch.cat([inputs("resnet", batch=8, seed=seed)["pixel_values"] for seed in range(6)])
    dense = BUILDS["resnet"]()
    for stage, layer in itertools.product(range(2), range(2)):
        path = f"resnet.encoder.stages.{stage}.layers.{layer}.layer.1"
        seen: list[dict[str, Tensor]] = [{}, {}]
        for network, recorded in zip((dense, repaired), seen, strict=True):
            with record_io(network.get_submodule(f"{path}.convolution"), recorded):
                network(pixel_values=images)
            recorded["normalized"] = network.get_submodule(f"{path}.normalization")(recorded["output"])
        error = (seen[0]["normalized"] - seen[1]["normalized"]).flatten(2)  # [images, out channels, positions]
        columns = functional.unfold(seen[1]["input"], 3, padding=1)  # [images, columns, positions]
        columns = torch.cat([columns, torch.ones_like(columns[:, :1])], 1)
        products = torch.einsum("nop,ncp->oc", error.double(), columns.double())
        scale = error.double().norm() * columns.double().square().sum((0, 2)).sqrt()
        assert float((products / scale.clamp(min=1e-9)).abs().max()) < 1e-3


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("name", ["resnet", "resnet-bottleneck"])
@torch.no_grad()
def test_a_duplicate_channel_is_removed_without_loss(name: str, intercept: bool) -> None:
    model = Model(BUILDS[name]())
    for part in model.anatomy.parts:
        module, norm = part.input_projections[0].module, part.norm
        module.bias = nn.Parameter(torch.linspace(-1, 1, module.out_channels))
        for tensor in (module.weight, module.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor[3] = tensor[5]
        part.output.module.bias = nn.Parameter(torch.linspace(-1, 1, part.output.out_features))
    batch = inputs(name, batch=8, seed=99)
    expected = model.network(**batch).logits
    choice = [torch.tensor([unit for unit in range(part.units) if unit != 3]).numpy() for part in model.anatomy.parts]
    settings = RepairSettings("full", damping=1e-8, intercept=intercept)
    cut_and_refit(
        model, choice, settings, MethodContext(batches=[inputs(name, batch=4, seed=seed) for seed in range(6)])
    )
    assert [part.units for part in model.anatomy.parts] == [len(kept) for kept in choice]
    torch.testing.assert_close(model.network(**batch).logits, expected, rtol=2e-3, atol=2e-3)


def test_an_interrupted_repair_resumes_to_the_same_weights(tmp_path: Path) -> None:
    settings = {"method": "magnitude", "repair": "full"}
    complete = pruned("resnet", settings)
    with pytest.raises(InterruptedRunError):
        pruned("resnet", settings, checkpoint=Checkpoint(tmp_path), progress=InterruptingProgress(2))
    assert same(complete, pruned("resnet", settings, checkpoint=Checkpoint(tmp_path)))


def test_missing_data_is_one_sentence() -> None:
    method = METHODS.build({"method": "magnitude", "budget": {"parameters": 0.7}, "repair": "full"})
    with pytest.raises(DataError, match="repair: full needs calibration data"):
        method.apply(Model(BUILDS["resnet"]()), MethodContext())
