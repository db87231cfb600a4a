"""Convolution networks as integer graphs: against a float simulation of the same rounding, bit for bit."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from smelt.compression.calibration.observers import HistogramObserver
from smelt.errors import ConversionError, ModelError
from smelt.models.cifar_resnet import CifarResNetConfig, CifarResNetForImageClassification
from smelt.models.inputs import random_inputs
from smelt.runtime.integer.convolutions import (
    LOGITS,
    BitWidths,
    TracedNetwork,
    check_convolutions,
    convert_convolutions,
    tensor_sqnr,
)
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.run import Interpreter
from tests.models.test_batch_norm import resnet
from tests.models.test_quartznet import quartznet


def cifar_resnet() -> CifarResNetForImageClassification:
    torch.manual_seed(0)
    config = CifarResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5)
    return CifarResNetForImageClassification(config).eval()


def inputs(network: PreTrainedModel, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 16, 60) if network.main_input_name == "input_features" else (4, 3, 32, 32)
    return torch.randn(*shape, generator=generator)


def converted(network: PreTrainedModel, bits: BitWidths = BitWidths()) -> tuple[TracedNetwork, IntegerGraph]:  # noqa: B008
    traced = TracedNetwork(copy.deepcopy(network), {network.main_input_name: inputs(network)})
    observers: dict[str, HistogramObserver] = defaultdict(HistogramObserver)
    traced.run(inputs(network), lambda name, value: observers[name](value))
    ranges = {name: each.percentile(100) for name, each in observers.items()}
    return traced, convert_convolutions(traced, ranges, bits)[0]


def quantized(graph: IntegerGraph, values: Tensor) -> Tensor:
    [name] = graph.inputs
    return (values / graph.scales[name]).round().clamp(-128, 127).to(torch.int8)


def simulate(graph: IntegerGraph, values: Tensor) -> Tensor:
    """Run a graph in float64, with PyTorch's own convolutions and division instead of shifts."""
    [name] = graph.inputs
    known = {name: values.double()}
    for node in graph.nodes:
        x: Any = [known[source] for source in node.inputs]
        constants = {key: tensor.double() for key, tensor in node.constants.items()}
        attributes: Any = node.attributes
        if node.op in ("conv1d", "conv2d"):
            convolve = F.conv1d if node.op == "conv1d" else F.conv2d
            result = convolve(x[0], constants["weight"], constants.get("bias"), **attributes)
        elif node.op == "linear":
            result = F.linear(x[0], constants["weight"], constants.get("bias"))
        elif node.op == "requantize":
            shape = [1] * x[0].dim()
            shape[attributes["axis"]] = -1
            ratio = (constants["multiplier"] / 2 ** constants["shift"]).reshape(shape)
            result = (x[0] * ratio + 0.5).floor().clamp(attributes["minimum"], attributes["maximum"])
        elif node.op == "add":
            result = x[0] + x[1]
        elif node.op == "mean":
            result = x[0].sum(attributes["axis"])
        elif node.op == "permute":
            result = x[0].permute(attributes["axes"])
        else:
            raise NotImplementedError(node.op)
        known[node.output] = result
    return known[graph.outputs[0]]


@pytest.mark.parametrize("build", [quartznet, cifar_resnet, resnet])
def test_the_graph_is_near_the_float_network_and_equals_its_simulation(build: Any) -> None:
    network = build()
    if network.main_input_name == "pixel_values" and "cifar" not in network.config.model_type:
        with pytest.raises(ConversionError, match="pooling with padding"):  # of the stem, 3x3 with padding 1
            converted(network)
        return
    _, graph = converted(network)
    values = inputs(network, seed=1)
    with torch.no_grad():
        expected = network(**{network.main_input_name: values}).logits
    integers = Interpreter(graph, check_ranges=True).run({network.main_input_name: quantized(graph, values)})[LOGITS]
    assert integers.dtype == torch.int16 and integers.shape == expected.shape
    error = (graph.dequantize(LOGITS, integers) - expected).norm() / expected.norm()
    assert error < 0.05, error
    assert torch.equal(integers.double(), simulate(graph, quantized(graph, values)))
    alone = Interpreter(graph).run({network.main_input_name: quantized(graph, values[:1])})[LOGITS]
    assert torch.equal(alone, integers[:1])  # any batch size


def test_a_spectrogram_of_another_length_runs() -> None:
    network = quartznet()
    _, graph = converted(network)
    values = torch.randn(1, 16, 33, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = network(values).logits
    logits = graph.dequantize(LOGITS, Interpreter(graph).run({"input_features": quantized(graph, values)})[LOGITS])
    assert logits.shape == expected.shape and (logits - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_fewer_bits_use_fewer_levels(bits: int) -> None:
    network = quartznet()
    _, graph = converted(network, BitWidths(bits, bits))
    for node, value in Interpreter(graph).trace({"input_features": quantized(graph, 3 * inputs(network))}):
        weight = node.constants.get("weight")
        assert weight is None or int(weight.abs().max()) <= 2 ** (bits - 1) - 1
        if node.dtype == "uint8":
            assert int(value.max()) <= 2**bits - 1
        elif node.dtype == "int8":
            assert int(value.abs().max()) <= 2 ** (bits - 1) - 1
    assert {node.dtype for node in graph.nodes} == {"int8", "uint8", "int16", "int32"}


def test_unsigned_tensors_follow_relus_only() -> None:
    traced, graph = converted(quartznet())
    relus = sum("relu" in node.name for node in traced.nodes)
    assert relus == sum(node.dtype == "uint8" for node in graph.nodes)


def test_relu6_and_pooling_are_converted() -> None:
    network = cifar_resnet()
    network.resnet.embedder.pooler = nn.Sequential(nn.ReLU6(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Dropout())
    network.eval()
    values = 20 * inputs(network).abs()
    traced = TracedNetwork(copy.deepcopy(network), {"pixel_values": values})
    ranges: dict[str, float] = {}
    expected = traced.run(values, lambda name, value: ranges.update({name: value.abs().max().item()}))
    graph, sources = convert_convolutions(traced, ranges, unsigned_input=True)
    assert graph.inputs == {"pixel_values": "uint8"}
    ratios = tensor_sqnr(traced, graph, sources, values)
    assert LOGITS in ratios and len(ratios) == len(sources) and min(ratios.values()) > 15
    pixels = (values / graph.scales["pixel_values"]).round().to(torch.uint8)
    outputs = Interpreter(graph, check_ranges=True).run({"pixel_values": pixels})[LOGITS]
    error = (graph.dequantize(LOGITS, outputs) - expected).norm() / expected.norm()
    assert error < 0.08, error
    assert {"max_pool", "avg_pool"} <= {node.op for node in graph.nodes}


def test_channels_without_weight_are_converted() -> None:
    network = quartznet()
    with torch.no_grad():
        network.stem.pointwise.weight[0] *= 1e-14
        network.stem.pointwise.weight[1] = 0
        network.stem.norm.running_mean[:2] = 0
        network.stem.norm.bias[:2] = 0
        expected = network(inputs(network)).logits
    _, graph = converted(network)
    values = quantized(graph, inputs(network))
    logits = graph.dequantize(LOGITS, Interpreter(graph, check_ranges=True).run({"input_features": values})[LOGITS])
    assert (logits - expected).norm() / expected.norm() < 0.05


class Sigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


def test_what_has_no_integer_form_is_named_with_its_layer() -> None:
    network = cifar_resnet()
    check_convolutions(network)
    network.resnet.embedder.pooler = Sigmoid()
    with pytest.raises(ConversionError, match=r"resnet\.embedder\.pooler: Sigmoid has no integer form"):
        check_convolutions(network.to("meta"))
    network = cifar_resnet()
    network.resnet.embedder.pooler = Sigmoid()
    with pytest.raises(
        ConversionError, match=r"resnet\.embedder\.pooler: the operator aten\.sigmoid.* has no integer form"
    ):
        converted(network)
    network = cifar_resnet()
    network.resnet.embedder.pooler = nn.BatchNorm2d(8).eval()
    with pytest.raises(ConversionError, match=r"resnet\.embedder\.pooler: this batch norm follows no convolution"):
        converted(network)
    with pytest.raises(ConversionError, match="2 to 8 exist"):
        BitWidths(9, 8)


def test_bad_ranges_and_weights_are_named() -> None:
    network = quartznet()
    traced = TracedNetwork(network, random_inputs(network))
    with pytest.raises(ConversionError, match="input_features: the calibration data gives no finite range"):
        convert_convolutions(traced, {"input_features": math.nan})
    network = quartznet()
    network.classifier.weight.data[0] = math.inf
    with pytest.raises(ModelError, match="computes NaN or infinity"):
        converted(network)
