"""Networks of convolutions run by fused kernels with the bits of the reference."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from smelt.kernels.integer import integer_kernels
from smelt.kernels.integer_interface import Add, Requantize
from smelt.runtime.integer.convolution_call import ConvolutionCall
from smelt.runtime.integer.fused import FusedProgram, MaskCall, PaddingCheck, ReferenceCall
from smelt.runtime.integer.graph import IntegerGraph, Node
from smelt.runtime.integer.run import Interpreter
from tests.kernels.instruction_sets import NEEDS_COMPILER
from tests.models.test_quartznet import quartznet
from tests.runtime.integer.test_convolutions import cifar_resnet, converted, inputs, padded, quantized
from tests.runtime.integer.test_fused import assert_same_outputs

pytestmark = NEEDS_COMPILER


def calls(graph: IntegerGraph) -> list[Any]:
    kernels = integer_kernels("cpu")
    assert kernels is not None
    return FusedProgram(graph, kernels).calls


@pytest.mark.parametrize("build", [quartznet, cifar_resnet])
def test_a_whole_network_is_one_kernel_per_convolution(build: Any) -> None:
    """Residual sums belong to the convolution before them, the ReLU to its requantization."""
    network = build()
    _, graph = converted(network)
    for values in (inputs(network, seed=1), 5 * inputs(network, seed=2)[:1, ..., :27]):
        assert_same_outputs(graph, quantized(graph, values))
    kinds = Counter(type(call).__name__ for call in calls(graph))
    convolutions = sum(node.op in ("conv1d", "conv2d") for node in graph.nodes)
    assert kinds["ConvolutionCall"] == convolutions and kinds["MapCall"] <= 1
    others = {call.node.op for call in calls(graph) if isinstance(call, ReferenceCall)}
    assert others <= {"mean", "permute", "reshape", "max_pool"}  # the last one of the mask
    sums = sum(node.op == "add" for node in graph.nodes)
    chains = [[type(step) for step in call.steps.steps] for call in calls(graph) if isinstance(call, ConvolutionCall)]
    assert chains.count([Requantize, Add, Requantize]) == sums


def test_padding_is_masked_between_the_kernels() -> None:
    """Multiplied where there is padding, and passed on where there is none or the mask is of another shape."""
    network = quartznet()
    _, graph = converted(network)
    values, lengths = inputs(network, seed=1), [7, 60, 33, 8]
    assert_same_outputs(graph, padded(graph, values, lengths))
    assert_same_outputs(graph, padded(graph, values, [60] * 4))
    masks = [call for call in calls(graph) if isinstance(call, MaskCall)]
    assert len(masks) == sum(node.op == "multiply" for node in graph.nodes) > 5
    checks = [call for call in calls(graph) if isinstance(call, PaddingCheck)]
    assert len(checks) == 2, "of all frames and of every second one"
    graph = IntegerGraph({"x": "uint8", "mask": "int8"}, [Node("multiply", ("x", "mask"), "y", "uint8")], ["y"])
    x = torch.randint(0, 256, (2, 1, 5), dtype=torch.uint8)
    for mask in (torch.ones(2, 3, 5), torch.ones(2, 1, 5), torch.tensor([0.0, 1.0, -1.0, 3.0, 1.0])):
        given = {"x": x, "mask": mask.to(torch.int8)}
        expected = Interpreter(graph).run(given)["y"]
        assert torch.equal(Interpreter(graph, "cpu").run(given)["y"], expected) and expected.shape[-1] == 5
    assert [type(call) for call in calls(graph)] == [PaddingCheck, MaskCall]


def test_pooling_relu6_and_a_linear_layer_of_unsigned_activations() -> None:
    network = cifar_resnet()
    network.resnet.embedder.pooler = nn.Sequential(nn.ReLU6(), nn.MaxPool2d(2), nn.AvgPool2d(2))
    network.classifier = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))
    _, graph = converted(network.eval())
    assert any(node.op == "linear" and "relu" not in node.output for node in graph.nodes)
    assert_same_outputs(graph, quantized(graph, inputs(network, seed=3)))
    assert not any(call.node.op in ("linear", "conv2d") for call in calls(graph) if isinstance(call, ReferenceCall))


def test_a_tensor_that_something_else_reads_is_kept() -> None:
    """The sums of the convolutions become outputs too, so that nothing may swallow them."""
    network = cifar_resnet()
    _, graph = converted(network)
    graph.outputs += [node.output for node in graph.nodes if node.op in ("conv2d", "add")]
    assert_same_outputs(graph, quantized(graph, inputs(network)))


def test_a_sum_with_broadcasting_and_a_wide_accumulator() -> None:
    """A residual of another shape, which no kernel adds, and int64 results run by the reference."""
    constants = {"weight": torch.randint(-127, 128, (6, 3, 1, 1), dtype=torch.int8)}
    ratio = {"multiplier": torch.full((6,), 2**30, dtype=torch.int32), "shift": torch.arange(33, 39, dtype=torch.int32)}
    limits: dict[str, Any] = {"minimum": -127, "maximum": 127, "axis": 1}
    nodes = [
        Node("conv2d", ("x",), "sums", "int32", {}, constants),
        Node("requantize", ("sums",), "narrow", "int8", limits, ratio),
        Node("add", ("other", "narrow"), "total", "int32"),
        Node("conv2d", ("x",), "wide", "int64", {}, constants),
    ]
    graph = IntegerGraph({"x": "uint8", "other": "int8"}, nodes, ["total", "wide"])
    graph.check()
    x = torch.randint(0, 256, (2, 3, 1, 1), dtype=torch.uint8)
    for shape in ((2, 6, 1, 1), (2, 6, 4, 5), (1,)):
        assert_same_outputs(graph, {"x": x, "other": torch.randint(-127, 128, shape, dtype=torch.int8)})
    assert [type(call) for call in calls(graph)] == [ConvolutionCall, ReferenceCall]


def test_images_with_other_channels_are_refused() -> None:
    network = cifar_resnet()
    _, graph = converted(network)
    with pytest.raises(ValueError, match="4 channels, the convolution has 3"):
        Interpreter(graph, "cpu").run({"pixel_values": torch.zeros(1, 4, 8, 8, dtype=torch.int8)})
