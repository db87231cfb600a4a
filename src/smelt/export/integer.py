"""Exports of integer-only models: C99 without floating point, and ONNX with integer or QDQ operators."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.export.c.source import write_files, write_source
from smelt.export.format import Export, ExportFormat
from smelt.export.onnx import check_packages, count_types
from smelt.export.onnx_integer.graph import IntegerOnnx
from smelt.export.onnx_integer.qdq import QdqOnnx
from smelt.export.onnx_integer.writer import OPSET, GraphWriter
from smelt.models.artifact import write_json
from smelt.models.model import Model
from smelt.models.tokenizer import save_tokenizer
from smelt.models.verify import probe
from smelt.runtime.integer.decoder_network import IntegerDecoder
from smelt.runtime.integer.graph import DTYPES, IntegerGraph
from smelt.runtime.integer.run import Interpreter, add_default_inputs

_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 600
_SHAPES = ((2, 24), (3, 7))  # (batch, length) to verify
_QDQ_ERROR = 0.15  # largest root mean square of the difference from the integers, relative to the output's


@dataclass(frozen=True)
class CSourceExport(ExportFormat):
    """C99 for devices without an FPU: batch size 1, a fixed sequence length, no heap."""

    name = "c"
    length: int = 128  # tokens per sequence; shorter ones are padded and masked

    def check(self, model: Model) -> None:
        if self.length < 1:
            raise FormatError(f"the sequence length of an export to c is at least 1, not {self.length}.")
        integer_graph(model, self.name)

    def write(self, model: Model, folder: Path) -> Export:
        self.check(model)
        graph = integer_graph(model, self.name)
        source = write_source(graph, graph_inputs(model, graph, 1, self.length))
        write_files(source, folder)
        write_json(folder / "memory.json", source.memory())
        notes = [
            f"constants {source.constant_bytes} bytes, activations {source.arena_bytes} bytes in one static arena; "
            "per layer in model.h and memory.json."
        ]
        if _compiler() is None:
            notes.append("there is no C compiler here, so the source was not compiled; run test.c on your device.")
        types = Counter(str(t.dtype).removeprefix("torch.") for node in graph.nodes for t in node.constants.values())
        return Export(dict(types), notes)

    def verify(self, model: Model, folder: Path) -> None:
        """Compile and run the test vector; without a compiler there is only a note."""
        compiler = _compiler()
        if compiler is None:
            return
        with TemporaryDirectory() as temporary:
            program = Path(temporary) / "program"
            sources = sorted(str(file) for file in folder.glob("*.c"))
            command = [compiler, "-std=c99", "-O1", *sources, "-o", str(program)]
            try:
                compiled = subprocess.run(
                    command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise FormatError(
                    f"{compiler} needs more than {_COMPILE_SECONDS} seconds for the export, so it could not be "
                    "verified; export a smaller model."
                ) from error
            if compiled.returncode:
                raise FormatError(f"{compiler} does not compile the export: {compiled.stderr.strip()[:300]}")
            result = subprocess.run([str(program)], capture_output=True, timeout=_COMPILE_SECONDS, check=False)
        if result.returncode:
            raise FormatError("the export could not be verified: the compiled program computes another output.")


@dataclass(frozen=True)
class OnnxInteger(ExportFormat):
    """ONNX with integer operators, equal to the integer graph to the bit; `qdq` writes a fast approximation instead."""

    name = "onnx-int"
    qdq: bool = False  # QuantizeLinear and DequantizeLinear around float operators, which runtimes fuse

    def check(self, model: Model) -> None:
        check_packages(self.name)
        integer_graph(model, self.name)

    def write(self, model: Model, folder: Path) -> Export:
        self.check(model)
        graph = integer_graph(model, self.name)
        inputs = graph_inputs(model, graph, *_SHAPES[0])
        ranks = {name: tensor.dim() for name, tensor in inputs.items()}
        ranks |= {node.output: tensor.dim() for node, tensor in Interpreter(graph).trace(inputs)}
        axes = ("batch", "length") if "input_ids" in graph.inputs else ("batch",)
        path = folder / "model.onnx"
        if self.qdq:
            qdq = QdqOnnx(graph, ranks)
            save_onnx(qdq.writer, graph, ranks, dict.fromkeys(graph.outputs, "float32"), path, axes)
            notes = ["the outputs are float32; runtimes that fuse QDQ operators round differently from the integers."]
        else:
            integer = IntegerOnnx(graph, ranks)
            save_onnx(integer.writer, graph, ranks, integer.dtypes, path, axes)
            write_json(folder / "scales.json", {name: graph.scales.get(name) for name in graph.outputs})
            notes = ["the outputs are integers: multiply them by scales.json. For speed, export with --qdq."]
        if model.tokenizer is not None:
            save_tokenizer(model.tokenizer, folder)
        return Export(count_types(path), notes)

    def verify(self, model: Model, folder: Path) -> None:
        """Compare with the reference: all bits of the integer form, the size of the difference of the QDQ form."""
        graph = integer_graph(model, self.name)
        for shape in _SHAPES:
            inputs = graph_inputs(model, graph, *shape)
            expected = Interpreter(graph).run(inputs)
            for name, actual in run_onnx(folder / "model.onnx", inputs):
                if self.qdq:
                    real = graph.dequantize(name, expected[name])
                    differs = bool((actual - real).square().mean().sqrt() > _QDQ_ERROR * real.square().mean().sqrt())
                else:
                    differs = not torch.equal(actual, expected[name])
                if differs:
                    raise FormatError(f"the export could not be verified: another output {name!r} for {shape}.")


def integer_graph(model: Model, to: str) -> IntegerGraph:
    """Return the integer graph that a model runs."""
    graph = getattr(model.network, "graph", None)
    if not isinstance(graph, IntegerGraph):
        raise FormatError(
            f"an export to {to} needs an integer-only model; "
            "compress the model with `smelt compress --method integer-only` first."
        )
    if isinstance(model.network, IntegerDecoder):
        raise FormatError(
            f"an export to {to} has no form of an integer-only decoder yet, whose KV cache grows; run it with Smelt."
        )
    return graph


def graph_inputs(model: Model, graph: IntegerGraph, batch: int, length: int) -> dict[str, Tensor]:
    """Return pseudo-random inputs of a graph on CPU; the last two tokens or frames of three or more are masked."""
    inputs = add_default_inputs(probe(model, batch, length))
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape[1] > 2:
        inputs["attention_mask"] = mask.clone()
        inputs["attention_mask"][-1, -2:] = 0
    return {name: graph.quantize(name, inputs[name].cpu()).to(DTYPES[dtype]) for name, dtype in graph.inputs.items()}


def save_onnx(
    writer: GraphWriter, graph: IntegerGraph, ranks: dict[str, int], dtypes: dict[str, str], path: Path,
    axes: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Save the nodes of a writer as a model of dynamic shapes; `axes` names the first axes that all inputs share."""
    import onnx
    from onnx import helper

    def info(name: str, dtype: str, names: tuple[str, ...]) -> onnx.ValueInfoProto:
        shape = [*names, *[None] * ranks[name]][: ranks[name]]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    inputs = [info(name, dtype, axes) for name, dtype in graph.inputs.items()]
    outputs = [info(name, dtypes[name], ()) for name in graph.outputs]
    body = helper.make_graph(writer.nodes, "integer", inputs, outputs, writer.initializers)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def run_onnx(path: Path, inputs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the outputs of a model in onnxruntime on CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    results = session.run(None, {name: inputs[name].numpy() for name in names})
    for output, result in zip(session.get_outputs(), results, strict=True):
        yield output.name, torch.from_numpy(result)


def _compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)
