"""The graph's checks, its files and the interpreter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smelt.errors import ModelError
from smelt.runtime.integer.graph import CONSTANTS_FILE, GRAPH_FILE, IntegerGraph, Node
from smelt.runtime.integer.run import BACKENDS, Interpreter


def small_graph() -> IntegerGraph:
    """Return a graph of an embedding, a linear layer and a requantization."""
    generator = torch.Generator().manual_seed(0)

    def int8(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)

    bias = torch.arange(4, dtype=torch.int32)
    half = {"multiplier": torch.tensor([2**30], dtype=torch.int32), "shift": torch.tensor([35], dtype=torch.int32)}
    limits: dict[str, int | list[int]] = {"minimum": -32768, "maximum": 32767}
    return IntegerGraph(
        inputs={"input_ids": "int32"},
        nodes=[
            Node("embedding", ("input_ids",), "tokens", "int8", {}, {"table": int8(10, 8)}, "embeddings"),
            Node("linear", ("tokens",), "sums", "int32", {}, {"weight": int8(4, 8), "bias": bias}, "head"),
            Node("requantize", ("sums",), "logits", "int16", limits, half, "head"),
        ],
        outputs=["logits"],
        scales={"logits": 0.5, "sums": [0.1, 0.2, 0.3, 0.4]},
    )


IDS = {"input_ids": torch.tensor([[1, 2, 9]])}


def test_saved_graph_is_the_same_graph(tmp_path: Path) -> None:
    graph = small_graph()
    graph.check()
    graph.save(tmp_path)
    loaded = IntegerGraph.load(tmp_path)
    assert (loaded.inputs, loaded.outputs, loaded.scales) == (graph.inputs, graph.outputs, graph.scales)
    for node, expected in zip(loaded.nodes, graph.nodes, strict=True):
        assert replace(node, constants={}) == replace(expected, constants={})
        assert node.constants.keys() == expected.constants.keys()
        for name, constant in expected.constants.items():
            assert node.constants[name].dtype == constant.dtype
            assert torch.equal(node.constants[name], constant)
    assert torch.equal(Interpreter(loaded).run(IDS)["logits"], Interpreter(graph).run(IDS)["logits"])


def test_results_have_the_dtype_of_their_node_and_scales_dequantize() -> None:
    graph = small_graph()
    traced = {node.output: tensor for node, tensor in Interpreter(graph, check_ranges=True).trace(IDS)}
    assert {name: tensor.dtype for name, tensor in traced.items()} == {
        "tokens": torch.int8, "sums": torch.int32, "logits": torch.int16,
    }  # fmt: skip
    assert torch.equal(traced["logits"], (traced["sums"] + 16) >> 5)
    assert torch.equal(graph.dequantize("logits", traced["logits"]), traced["logits"] * 0.5)
    assert torch.equal(graph.dequantize("sums", traced["sums"])[..., 1], traced["sums"][..., 1] * torch.tensor(0.2))


def test_float_constant_is_refused_with_node_and_layer() -> None:
    graph = small_graph()
    graph.nodes[1].constants["bias"] = torch.zeros(4)
    with pytest.raises(ModelError, match=r"float32 in 'bias' of node 'sums' \(linear\) of layer 'head'"):
        graph.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "computes in float32"),
        ({"attributes": {"shift": 0.5}}, "attribute 'shift'"),
        ({"attributes": {"axes": [1, 0.5]}}, "attribute 'axes'"),
        ({"inputs": ("later",)}, "uses later before"),
        ({"output": "tokens"}, "defines 'tokens' twice"),
    ],
)
def test_bad_nodes_are_refused(change: dict, message: str) -> None:
    graph = small_graph()
    graph.nodes[1] = replace(graph.nodes[1], **change)
    with pytest.raises(ModelError, match=message):
        graph.check()


def test_float_produced_by_a_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "leaky", {"linear": lambda x, weight, bias: x.float() @ weight.float().T + bias})
    with pytest.raises(ModelError, match=r"computed float32 in node 'sums' \(linear\) of layer 'head'"):
        Interpreter(small_graph(), "leaky").run(IDS)


def test_overflow_is_found_when_ranges_are_checked() -> None:
    graph = small_graph()
    graph.nodes[2] = replace(graph.nodes[2], dtype="int8")
    graph.nodes[2].attributes.update(minimum=-(2**31), maximum=2**31 - 1)
    with pytest.raises(ModelError, match="overflows int8 in node 'logits'"):
        Interpreter(graph, check_ranges=True).run(IDS)


def test_float_inputs_missing_inputs_and_unknown_names_are_refused() -> None:
    graph = small_graph()
    with pytest.raises(ModelError, match="takes integers"):
        Interpreter(graph).run({"input_ids": torch.zeros(1, 3)})
    with pytest.raises(ModelError, match="needs the input 'input_ids'"):
        Interpreter(graph).run({})
    with pytest.raises(ModelError, match="no backend 'tpu'"):
        Interpreter(graph, "tpu")
    graph.nodes[1] = replace(graph.nodes[1], op="einsum")
    with pytest.raises(ModelError, match="unknown operators: einsum"):
        Interpreter(graph)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    small_graph().save(tmp_path)
    text = (tmp_path / GRAPH_FILE).read_text()
    (tmp_path / GRAPH_FILE).write_text(text.replace('"constants": [\n    "table"', '"constants": [\n    "tables"'))
    with pytest.raises(ModelError, match="damaged"):
        IntegerGraph.load(tmp_path)
    (tmp_path / GRAPH_FILE).write_text(text.replace('"dtype": "int16"', '"dtype": "float16"'))
    with pytest.raises(ModelError, match="computes in float16 in node 'logits'"):
        IntegerGraph.load(tmp_path)
    (tmp_path / GRAPH_FILE).write_text(text)
    (tmp_path / CONSTANTS_FILE).write_bytes((tmp_path / CONSTANTS_FILE).read_bytes()[:-1])
    with pytest.raises(ModelError, match="cut off"):
        IntegerGraph.load(tmp_path)
