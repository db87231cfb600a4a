"""Batch norms are folded exactly into the layers before them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from smelt.errors import ModelError
from smelt.models.batch_norm import batch_norms, fold_batch_norms
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
    assert pairs.keys() == batch_norms(network).keys() and not batch_norms(folded)
    other = {name: torch.randn_like(tensor) for name, tensor in inputs.items()}
    torch.testing.assert_close(folded(**other)[0], network(**other)[0], atol=1e-5, rtol=1e-5)


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
