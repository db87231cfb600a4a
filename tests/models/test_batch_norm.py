"""Batch norms are folded exactly into the layers before them, or normalize by the batch without training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from smelt.errors import ModelError
from smelt.models.batch_norm import (
    batch_norms,
    batch_statistics,
    fold_batch_norms,
    folded_norms,
    restore_folded_norms,
)
from smelt.models.inputs import random_inputs
from tests.models.test_quartznet import quartznet


def resnet() -> ResNetForImageClassification:
    torch.manual_seed(0)
    network = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2]))
    for norm in batch_norms(network).values():
        assert isinstance(norm, nn.BatchNorm2d)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        norm.weight.data.normal_()
        norm.bias.data.normal_()
    return network.eval()


@torch.no_grad()
@pytest.mark.parametrize("build", [quartznet, resnet])
def test_folding_is_exact(build: type) -> None:
    network = build()
    folded, inputs = copy.deepcopy(network), random_inputs(network)
    pairs = fold_batch_norms(folded, inputs)
    assert pairs.keys() == batch_norms(network).keys() and not batch_norms(folded) and folded_norms(folded) == pairs
    other = {name: torch.randn_like(tensor) for name, tensor in inputs.items()}
    torch.testing.assert_close(folded(**other)[0], network(**other)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@torch.no_grad()
def test_folding_on_a_gpu_is_not_misled_by_tf32() -> None:
    network = resnet().cuda()
    inputs = {name: tensor.cuda() for name, tensor in random_inputs(network).items()}
    assert torch.backends.cudnn.allow_tf32  # PyTorch's default
    assert fold_batch_norms(network, inputs)


@torch.no_grad()
def test_folding_runs_the_network_without_tf32() -> None:
    network, seen = resnet(), []
    network.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    fold_batch_norms(network, random_inputs(network))
    assert seen == [False, False] and before == (
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    )  # fmt: skip


@torch.no_grad()
def test_batch_statistics_ignore_the_scale_of_a_layer_and_keep_the_running_ones() -> None:
    network = resnet()
    inputs, before = random_inputs(network), copy.deepcopy(network.state_dict())
    with batch_statistics(network):
        outputs = network(**inputs)[0]
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                module.weight *= 100
        torch.testing.assert_close(network(**inputs)[0], outputs, atol=0.02, rtol=0.02)  # epsilon
    running = {name: value for name, value in network.state_dict().items() if "running" in name}
    assert all(torch.equal(value, before[name]) for name, value in running.items())
    assert not any(module.training for module in network.modules())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_folding_in_half_precision_allows_for_its_rounding(dtype: torch.dtype) -> None:
    network = resnet().to(dtype)
    folded, inputs = copy.deepcopy(network), {"pixel_values": random_inputs(network)["pixel_values"].to(dtype)}
    fold_batch_norms(folded, inputs)
    change = (folded(**inputs)[0] - network(**inputs)[0]).abs().max() / network(**inputs)[0].abs().max()
    assert change > 1e-4  # more than float32 is allowed


@torch.no_grad()
def test_a_new_network_gets_the_structure_of_a_folded_one() -> None:
    folded, inputs = resnet(), random_inputs(resnet())
    pairs = fold_batch_norms(folded, inputs)
    with torch.device("meta"):
        restored = ResNetForImageClassification(folded.config).eval()
    restore_folded_norms(restored, folded_norms(folded), "the test")
    assert folded_norms(restored) == pairs and all(tensor.is_meta for tensor in restored.state_dict().values())
    restored.load_state_dict(folded.state_dict(), assign=True)
    assert torch.equal(restored(**inputs)[0], folded(**inputs)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pairs, norm, layer, wide: list(pairs), "do not fit the layers"),
        (lambda pairs, norm, layer, wide: {**pairs, norm: 3}, "do not fit the layers"),
        (lambda pairs, norm, layer, wide: {**pairs, norm: "resnet.nothing"}, "do not fit the layers"),
        (lambda pairs, norm, layer, wide: {**pairs, layer: layer}, "do not fit the layers"),
        (lambda pairs, norm, layer, wide: {**pairs, norm: norm}, "do not fit the layers"),
        (lambda pairs, norm, layer, wide: {**pairs, norm: wide}, "do not fit the layers"),
        (lambda pairs, norm, layer, wide: {**pairs, list(pairs)[3]: layer}, "two batch norms into one layer"),
    ],
)
def test_damaged_entries_of_folded_norms_are_refused(change: Any, words: str) -> None:
    network = resnet()
    pairs = fold_batch_norms(copy.deepcopy(network), random_inputs(network))
    (norm, layer), wide = next(iter(pairs.items())), next(reversed(pairs.values()))
    before = dict(network.named_modules()).keys()
    with pytest.raises(ModelError, match=f"^the file: .*{words}"):
        restore_folded_norms(network, change(pairs, norm, layer, wide), "the file")
    assert dict(network.named_modules()).keys() == before and not folded_norms(network)


def test_a_convolution_that_something_else_reads_is_refused() -> None:
    network = quartznet()
    forward = network.stem.pointwise.forward
    kept: list[torch.Tensor] = []

    def keep(hidden_states: torch.Tensor) -> torch.Tensor:
        kept.append(forward(hidden_states))
        return kept[-1]

    network.stem.pointwise.forward = keep
    network.stem.norm.register_forward_hook(lambda module, args, output: output + kept[-1])
    with pytest.raises(ModelError, match="something else reads the outputs of a convolution"):
        fold_batch_norms(network, random_inputs(network))
