"""Fused kernels run an integer graph with the bits of the reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from smelt.compression.calibration.ranges import observe_ranges
from smelt.errors import ModelError
from smelt.kernels import integer as dispatcher
from smelt.kernels.integer import integer_kernels
from smelt.kernels.integer_interface import Add, Gelu, Requantize
from smelt.models.load import load
from smelt.runtime.integer import run
from smelt.runtime.integer.constants import softmax_constants
from smelt.runtime.integer.encoders import convert_encoder, observed_modules
from smelt.runtime.integer.fused import FusedProgram, LinearCall, MapCall, NormCall, ReferenceCall, SoftmaxCall
from smelt.runtime.integer.graph import IntegerGraph, Node
from smelt.runtime.integer.run import Interpreter, add_default_inputs, preferred_backend
from tests.kernels.instruction_sets import NEEDS_COMPILER
from tests.runtime.integer.encoder_graph import random_encoder, token_batch

pytestmark = NEEDS_COMPILER


def assert_same_outputs(graph: IntegerGraph, inputs: dict[str, torch.Tensor]) -> None:
    expected = Interpreter(graph, check_ranges=True).run(inputs)
    actual = Interpreter(graph, "cpu").run(inputs)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def fused(graph: IntegerGraph) -> FusedProgram:
    kernels = integer_kernels("cpu")
    assert kernels is not None
    return FusedProgram(graph, kernels)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 17), (2, 70)])
def test_a_whole_encoder(batch: int, length: int) -> None:
    """Padding, odd lengths, heads that are no multiple of a register; logits and hidden states."""
    assert_same_outputs(random_encoder(layers=2, width=60, heads=3, inner=130), token_batch(batch, length))


def test_minilm() -> None:
    """The bundled encoder: real weights and activations with outliers, on sentences of different lengths."""
    try:
        model = load("minilm-l6")
    except ModelError as error:
        pytest.skip(str(error))
    assert model.tokenizer is not None
    sentences = ["A man is playing a guitar.", "The stock market fell sharply today, and nobody knew why.", "Yes"]
    batch = add_default_inputs(dict(model.tokenizer(sentences, padding=True, return_tensors="pt")))
    ranges = observe_ranges(model.network, observed_modules(model.network), [batch])
    assert_same_outputs(convert_encoder(model.network, ranges), batch)


def test_every_block_is_nine_kernels() -> None:
    """Six products and attention, with all that follows them, and two norms with the sums before them."""
    calls = fused(random_encoder(layers=2, width=32, heads=2, inner=64)).calls
    kinds = Counter(type(call).__name__ for call in calls)
    assert kinds["LinearCall"] == 2 * 6 + 1 and kinds["AttentionCall"] == 2 and kinds["NormCall"] == 2 * 2 + 1
    assert kinds["MapCall"] == kinds["SoftmaxCall"] == kinds["MatmulCall"] == 0
    unfused = {call.node.op for call in calls if isinstance(call, ReferenceCall)}
    assert unfused == {"embedding", "reshape", "permute", "slice"}
    chains = [[type(step) for step in call.steps.steps] for call in calls if isinstance(call, LinearCall)]
    assert chains.count([Requantize, Gelu, Requantize]) == 2
    norms = [call for call in calls if isinstance(call, NormCall)]
    assert [[type(step) for step in call.steps.steps] for call in norms] == [[Requantize, Add], *[[Add]] * 4]
    assert all(len(call.outputs) == 2 for call in norms)


def test_a_tensor_that_something_else_reads_is_kept() -> None:
    """The sums of the linear layers and the scores become outputs too, so that nothing may swallow them."""
    graph = random_encoder(layers=1, width=32, heads=2, inner=64)
    graph.outputs += [node.output for node in graph.nodes if node.op in ("linear", "matmul", "softmax", "add", "gelu")]
    assert_same_outputs(graph, token_batch(2, 9))
    assert not any(isinstance(call, LinearCall) and call.steps.steps for call in fused(graph).calls)


def requantize(x: str, output: str, channels: int = 1, **attributes: int) -> Node:
    multiplier = torch.full((channels,), 2**30, dtype=torch.int32)
    shift = torch.arange(32, 32 + channels, dtype=torch.int32)
    limits = {"minimum": -127, "maximum": 127, **attributes}
    return Node("requantize", (x,), output, "int8", {**limits}, {"multiplier": multiplier, "shift": shift})


def test_elementwise_nodes_without_a_product() -> None:
    """Chains, sums with broadcasting on either side, another axis, and int64, which no kernel takes."""
    table = {
        "breakpoints": torch.tensor([-50, 0, 90], dtype=torch.int32),
        "slopes": torch.tensor([1, -2, 3, 4], dtype=torch.int32),
        "intercepts": torch.tensor([0, 5, -7, 2**33]),
    }
    nodes = [
        requantize("x", "narrow", 6),
        Node("table", ("narrow",), "wide", "int64", {}, table),
        Node("add", ("row", "narrow"), "sum", "int32"),
        Node("add", ("sum", "row"), "sums", "int32"),
        requantize("sums", "along", 5, axis=1),
        Node("mean", ("sums",), "total", "int64", {"axis": 1}),
        requantize("total", "average"),
    ]
    graph = IntegerGraph({"x": "int32", "row": "int32"}, nodes, ["wide", "along", "average"])
    graph.check()
    inputs = {name: torch.randint(-400, 400, shape) for name, shape in (("x", (2, 5, 6)), ("row", (6,)))}
    assert_same_outputs(graph, inputs)
    kinds = [type(call) for call in fused(graph).calls]
    assert kinds.count(MapCall) == 2 and kinds.count(ReferenceCall) == 4
    nodes[1] = replace(nodes[1], dtype="int32", constants={**table, "intercepts": torch.tensor([0, 5, -7, 9])})
    assert_same_outputs(graph, inputs)


def test_a_softmax_alone_and_a_sum_of_what_no_kernel_reads() -> None:
    """A softmax without a mask, and one operand of a sum that is requantized from int64."""
    softmax: dict[str, int | list[int]] = {**softmax_constants(0.01, 6, "layer")[0]}
    nodes = [
        Node("softmax", ("x",), "probabilities", "int8", softmax),
        requantize("wide", "narrow"),
        Node("add", ("x", "narrow"), "sum", "int32"),
    ]
    graph = IntegerGraph({"x": "int32", "wide": "int64"}, nodes, ["probabilities", "sum"])
    graph.check()
    wide = torch.randint(-(2**31), 2**31, (2, 5, 6)) // 2**24
    assert_same_outputs(graph, {"x": torch.randint(-400, 400, (2, 5, 6)), "wide": wide})
    assert [type(call) for call in fused(graph).calls] == [SoftmaxCall, ReferenceCall, MapCall]


def test_products_of_activations_without_attention() -> None:
    """Two and three axes, and a second operand that all batches share."""
    nodes = [
        Node("matmul", ("a", "b"), "product", "int32", {"transpose_b": 1}),
        requantize("product", "narrow"),
        Node("matmul", ("narrow", "c"), "second", "int32", {"transpose_b": 0}),
    ]
    graph = IntegerGraph(dict.fromkeys("abc", "int8"), nodes, ["second"])
    for shapes in (((5, 8), (7, 8), (7, 3)), ((2, 5, 8), (7, 8), (2, 7, 3)), ((2, 3, 4, 8), (1, 3, 6, 8), (6, 2))):
        inputs = {name: torch.randint(-128, 128, shape) for name, shape in zip("abc", shapes, strict=True)}
        assert_same_outputs(graph, inputs)


def test_kernels_are_preferred_on_their_own_device_only() -> None:
    assert preferred_backend(torch.device("cpu")) == "cpu"
    assert preferred_backend(torch.device("meta")) == "reference"


def test_without_a_compiler_the_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "integer_kernels", lambda device: None)
    with pytest.raises(ModelError, match="needs a C\\+\\+ compiler; use the reference"):
        Interpreter(random_encoder(1, 16, 2, 16), "cpu")
    assert dispatcher.integer_kernels("meta") is None
