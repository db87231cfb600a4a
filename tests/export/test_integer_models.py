"""Exports of integer-only encoders: whole models in C and in onnxruntime have the integers of the reference."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smelt.compression.calibration.ranges import observe_ranges
from smelt.compression.quantization.integer_only import IntegerOnly
from smelt.errors import ConfigError, FormatError
from smelt.export import export
from smelt.export.c import helpers
from smelt.export.c.source import write_files, write_source
from smelt.export.integer import graph_inputs, run_onnx, save_onnx
from smelt.export.onnx_integer.graph import IntegerOnnx
from smelt.export.onnx_integer.qdq import QdqOnnx
from smelt.models.inputs import random_inputs
from smelt.models.model import Model
from smelt.runtime.integer.builder import GraphBuilder
from smelt.runtime.integer.conversion import NewBuilder
from smelt.runtime.integer.encoders import convert_encoder, observed_modules
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.network import IntegerNetwork
from smelt.runtime.integer.run import Interpreter
from smelt.runtime.integer.table_builder import TableBuilder
from tests.export.integer_graphs import all_operators
from tests.runtime.integer.test_convolutions import cifar_resnet, converted, inputs, quantized, quartznet
from tests.tiny import BUILDS

KINDS = ["bert", "roberta", "distilbert", "mpnet"]
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]


@cache
def integer_model(kind: str, new_builder: NewBuilder = GraphBuilder) -> Model:
    network: PreTrainedModel = BUILDS[kind]()
    batches = [random_inputs(network, 4, 16)]
    graph = convert_encoder(network, observe_ranges(network, observed_modules(network), batches, None), new_builder)
    return Model(IntegerNetwork(graph, network), None, source=kind)


def graph_of(model: Model) -> IntegerGraph:
    graph = model.network.graph
    assert isinstance(graph, IntegerGraph)
    return graph


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
class TestC:
    @pytest.mark.parametrize("level", ["-O0", "-O1", "-O2", "-Os"])
    def test_every_optimization_level_has_the_bits_of_the_reference(self, level: str, tmp_path: Path) -> None:
        """GCC 12 removed stores to the arena at -O1 when it inlined the operators."""
        model = integer_model("bert")
        write_files(write_source(graph_of(model), graph_inputs(model, graph_of(model), 1, 16)), tmp_path)
        sources = sorted(str(file) for file in tmp_path.glob("*.c"))
        subprocess.run(["gcc", *STRICT, level, *sources, "-o", str(tmp_path / "program")], check=True)
        assert subprocess.run([str(tmp_path / "program")], capture_output=True, text=True).stdout == "0 different\n"

    @pytest.mark.parametrize("kind", KINDS)
    def test_export_is_compiled_and_verified(self, kind: str, tmp_path: Path) -> None:
        result = export(integer_model(kind), "c", tmp_path / "out", length=12)
        memory = json.loads((tmp_path / "out" / "memory.json").read_text())
        assert {"model.h", "model.c", "kernels.h", "kernels.c", "constants.h", "test.c"} < set(result["files"])
        assert memory["arena_bytes"] >= max(layer["activations"] for layer in memory["layers"])
        assert "[1, 12]" in (tmp_path / "out" / "model.h").read_text()

    def test_another_result_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The compiled program is run: a kernel that rounds differently must not be exported."""
        monkeypatch.setattr(helpers, "HELPERS", helpers.HELPERS.replace("power_of_two(bits - 1)", "0 * bits"))
        with pytest.raises(FormatError, match="another output"):
            export(integer_model("bert"), "c", tmp_path / "out", length=12)
        assert not (tmp_path / "out").exists()

    def test_length_must_be_positive(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="at least 1"):
            export(integer_model("bert"), "c", tmp_path / "out", length=0)


class TestOnnx:
    def test_every_operator_has_the_bits_of_the_reference(self, tmp_path: Path) -> None:
        pytest.importorskip("onnxruntime")
        graph, tokens = all_operators()
        ranks = {name: tensor.dim() for name, tensor in tokens.items()}
        ranks |= {node.output: tensor.dim() for node, tensor in Interpreter(graph).trace(tokens)}
        converted = IntegerOnnx(graph, ranks)
        save_onnx(converted.writer, graph, ranks, converted.dtypes, tmp_path / "model.onnx")
        expected = Interpreter(graph).run(tokens)
        different = [
            name
            for name, actual in run_onnx(tmp_path / "model.onnx", tokens)
            if actual.dtype != expected[name].dtype or not torch.equal(actual, expected[name])
        ]
        assert different == []

    @pytest.mark.parametrize("kind", KINDS)
    def test_whole_models(self, kind: str, tmp_path: Path) -> None:
        pytest.importorskip("onnxruntime")
        model = integer_model(kind)
        export(model, "onnx-int", tmp_path / "out")
        tokens = graph_inputs(model, graph_of(model), 50, 20)
        expected = Interpreter(graph_of(model)).run(tokens)
        for name, actual in run_onnx(tmp_path / "out" / "model.onnx", tokens):
            assert torch.equal(actual, expected[name])

    @pytest.mark.parametrize("kind", KINDS)
    def test_qdq_variant_is_close(self, kind: str, tmp_path: Path) -> None:
        pytest.importorskip("onnxruntime")
        model = integer_model(kind)
        result = export(model, "onnx-int", tmp_path / "out", qdq=True)
        assert result["tensors"]["int8"] >= 18  # weights of three blocks
        tokens = graph_inputs(model, graph_of(model), 8, 20)
        expected = Interpreter(graph_of(model)).run(tokens)
        for name, actual in run_onnx(tmp_path / "out" / "model.onnx", tokens):
            real = graph_of(model).dequantize(name, expected[name])
            assert float((actual - real).square().mean().sqrt()) < 0.1 * float(real.square().mean().sqrt())


def test_tables_replace_the_nonlinear_functions(tmp_path: Path) -> None:
    """NN-LUT: the logits stay close to those of I-BERT's forms, and C and ONNX have the same integers."""
    tables, polynomials = integer_model("bert", TableBuilder), integer_model("bert")
    operators = {node.op for node in graph_of(tables).nodes}
    assert {"table", "softmax_table", "layer_norm_table"} < operators
    assert not {"gelu", "tanh", "softmax", "layer_norm"} & operators
    tokens = random_inputs(polynomials.network, 16, 20)
    logits, expected = (model.network(**tokens).logits for model in (tables, polynomials))
    assert float((logits - expected).square().mean().sqrt()) < 0.1 * float(expected.std())
    if shutil.which("gcc") is not None:
        export(tables, "c", tmp_path / "c", length=12)
    if find_spec("onnxruntime") is not None:
        export(tables, "onnx-int", tmp_path / "onnx")
        export(tables, "onnx-int", tmp_path / "qdq", qdq=True)


@pytest.mark.parametrize("to", ["c", "onnx-int"])
def test_a_float_model_is_refused(to: str, tmp_path: Path) -> None:
    if to == "onnx-int":
        pytest.importorskip("onnxruntime")
    model = Model(BUILDS["bert"](), None, source="float")
    with pytest.raises(FormatError, match="--method integer-only"):
        export(model, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("build", [cifar_resnet, quartznet])
def test_networks_of_convolutions(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    network = build()
    _, graph = converted(network)
    features = quantized(graph, inputs(network)[:1])
    if "attention_mask" in features:
        features["attention_mask"][0, -7:] = 0
    if shutil.which("gcc") is not None:
        write_files(write_source(graph, features), tmp_path)
        sources = sorted(str(file) for file in tmp_path.glob("*.c"))
        subprocess.run(["gcc", *STRICT, "-O1", *sources, "-o", str(tmp_path / "program")], check=True)
        assert subprocess.run([str(tmp_path / "program")], capture_output=True, text=True).stdout == "0 different\n"
    pytest.importorskip("onnxruntime")
    ranks = {name: tensor.dim() for name, tensor in features.items()}
    ranks |= {node.output: tensor.dim() for node, tensor in Interpreter(graph).trace(features)}
    converter = IntegerOnnx(graph, ranks)
    save_onnx(converter.writer, graph, ranks, converter.dtypes, tmp_path / "model.onnx", ("batch",))
    expected = Interpreter(graph).run(features)
    for output, actual in run_onnx(tmp_path / "model.onnx", features):
        assert torch.equal(actual, expected[output])
    with pytest.raises(FormatError, match="without --qdq"):
        QdqOnnx(graph, ranks)


def test_tables_have_the_entries_that_exist() -> None:
    with pytest.raises(ConfigError, match="8, 16, 32 entries, not 12"):
        IntegerOnly(nonlinear="nn-lut", entries=12)
