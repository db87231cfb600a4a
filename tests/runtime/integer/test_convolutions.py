"""Convolution networks as integer graphs: against a float simulation of the same rounding, bit for bit."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
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
    check_convolutions,
    convert_convolutions,
    tensor_sqnr,
)
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.run import Interpreter, add_default_inputs
from smelt.runtime.integer.traced_network import TracedNetwork
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


def quantized(graph: IntegerGraph, values: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a graph; nothing is padding."""
    name = next(iter(graph.inputs))
    codes = (values / graph.scales[name]).round().clamp(-128, 127).to(torch.int8)
    given = add_default_inputs({name: codes})
    return {name: given[name] for name in graph.inputs}


def simulate(graph: IntegerGraph, values: dict[str, Tensor]) -> Tensor:
    """Run a graph in float64, with PyTorch's own convolutions and division instead of shifts."""
    known = {name: tensor.double() for name, tensor in values.items()}
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
        elif node.op == "multiply":
            result = x[0] * x[1]
        elif node.op == "max_pool" and "conv" not in node.inputs[0]:  # of a mask
            result = x[0][..., :: attributes["stride"][0]]
        elif node.op == "reshape" and attributes["shape"] == [0, 1, -1]:
            result = x[0][:, None]
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
    integers = Interpreter(graph, check_ranges=True).run(quantized(graph, values))[LOGITS]
    assert integers.dtype == torch.int16 and integers.shape == expected.shape
    error = (graph.dequantize(LOGITS, integers) - expected).norm() / expected.norm()
    assert error < 0.05, error
    assert torch.equal(integers.double(), simulate(graph, quantized(graph, values)))
    alone = Interpreter(graph).run(quantized(graph, values[:1]))[LOGITS]
    assert torch.equal(alone, integers[:1])  # any batch size


def test_a_spectrogram_of_another_length_runs() -> None:
    network = quartznet()
    _, graph = converted(network)
    values = torch.randn(1, 16, 33, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = network(values).logits
    logits = graph.dequantize(LOGITS, Interpreter(graph).run(quantized(graph, values))[LOGITS])
    assert logits.shape == expected.shape and (logits - expected).norm() / expected.norm() < 0.05


def padded(graph: IntegerGraph, values: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Return spectrograms of different lengths as a batch; what is beyond them is noise, which the mask hides."""
    given = quantized(graph, values)
    given["attention_mask"] = (torch.arange(values.shape[-1]) < torch.tensor(lengths)[:, None]).to(torch.int8)
    return given


def test_recordings_of_a_padded_batch_have_the_bits_that_they_have_alone() -> None:
    network = quartznet()
    _, graph = converted(network)
    values, lengths = inputs(network, seed=1), [60, 41, 22, 1]
    together = Interpreter(graph, check_ranges=True).run(padded(graph, values, lengths))[LOGITS]
    with torch.no_grad():
        expected = network(values, padded(graph, values, lengths)["attention_mask"]).logits
    for row, length in enumerate(lengths):
        alone = Interpreter(graph).run(quantized(graph, values[row : row + 1, :, :length]))[LOGITS]
        frames = alone.shape[1]
        assert frames == -(-length // network.config.stem_stride)
        assert torch.equal(together[row, :frames], alone[0])
        difference = graph.dequantize(LOGITS, alone[0]) - expected[row, :frames]
        assert difference.norm() / expected[row, :frames].norm() < 0.05
    unmasked = Interpreter(graph).run(quantized(graph, values))[LOGITS]
    assert not torch.equal(unmasked[1], together[1])


class OtherMask(nn.Module):
    """A network that does to its mask what no integer operator does."""

    main_input_name = "input_features"

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator, self.convolution = operator, nn.Conv1d(4, 4, 3)

    def forward(self, input_features: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        mask = attention_mask[:, None].to(input_features.dtype)
        mask = mask.flip(-1) if self.operator == "flip" else mask[::2]
        return (self.convolution(input_features[: len(mask)] * mask),)


@pytest.mark.parametrize("operator", ["flip", "slice"])
def test_a_mask_that_has_no_integer_form_is_refused(operator: str) -> None:
    network: Any = OtherMask(operator).eval()
    traced = TracedNetwork(network, {"input_features": torch.randn(1, 4, 20)})
    with pytest.raises(ConversionError, match=rf"the operator aten\.{operator}.* on a mask has no integer form"):
        convert_convolutions(traced, {"input_features": 1.0})


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_fewer_bits_use_fewer_levels(bits: int) -> None:
    network = quartznet()
    _, graph = converted(network, BitWidths(bits, bits))
    for node, value in Interpreter(graph).trace(quantized(graph, 3 * inputs(network))):
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
    assert relus == sum(node.dtype == "uint8" and node.op == "requantize" for node in graph.nodes)


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


def test_flattening_drops_the_axes_of_images_of_one_pixel() -> None:
    """An integer mean has dropped them already, which the name of a layer does not tell."""
    network: Any = CifarResNetForImageClassification(CifarResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    network.resnet.pooler = nn.Sequential(OrderedDict(mean=nn.Conv2d(4, 4, 32)))
    network.eval()
    _, graph = converted(network)
    integers = Interpreter(graph).run(quantized(graph, inputs(network)))[LOGITS]
    with torch.no_grad():
        expected = network(inputs(network)).logits
    assert integers.shape == expected.shape
    assert (graph.dequantize(LOGITS, integers) - expected).norm() / expected.norm() < 0.05


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
    logits = graph.dequantize(LOGITS, Interpreter(graph, check_ranges=True).run(values)[LOGITS])
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
