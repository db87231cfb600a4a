"""ONNX, for encoders: the network traced by PyTorch's exporter with free batch and length.

What was pruned is traced as it is. A layer of eight-bit integers, one scale a row, keeps its codes: they are an
initializer of the graph, and `DequantizeLinear` makes the matrix of them. Inputs rounded with one fixed scale pass
through `QuantizeLinear` and back. ONNX has no words for the other formats that all runtimes read, so they are refused.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.errors import FormatError
from smelt.export.format import Export, ExportFormat
from smelt.models.artifact import layer_fields, plain_config, write_json
from smelt.models.json_file import one_line
from smelt.models.model import Model
from smelt.models.quantized import STATIC_SCALE, QuantizedLinear, quantized_layers, replace_module
from smelt.models.verify import probe
from smelt.numerics.catalog import format_name
from smelt.numerics.format import PER_ROW, PER_TENSOR
from smelt.numerics.integer import Integer

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20
TOLERANCE = 1e-4  # of the largest output, or of one
_SHAPES = ((2, 24), (3, 7))  # batch and length: what is traced, and another one


@dataclass(frozen=True)
class Onnx(ExportFormat):
    """A graph for onnxruntime and other engines."""

    name = "onnx"

    def write(self, model: Model, folder: Path) -> Export:
        _check(model)
        network = copy.deepcopy(model.network).cpu().float()
        for place, layer in quantized_layers(network).items():
            replace_module(network, place, _IntegerLayer(layer, place))
        names, example = zip(*_inputs(model, *_SHAPES[0]).items(), strict=True)
        path = folder / "model.onnx"
        try:
            with _quiet(), torch.no_grad():
                program = torch.onnx.export(
                    _FirstOutput(network, names), example,
                    dynamic_shapes={"tensors": tuple(_free(tensor) for tensor in example)},
                    input_names=list(names), output_names=[_output_name(model)],
                    opset_version=OPSET, dynamo=True, verbose=False,
                )  # fmt: skip
                assert program is not None
                _forget_origin(program)
                program.save(str(path))
        except Exception as error:  # foreign code on any network
            raise FormatError(f"PyTorch cannot write this network as ONNX ({one_line(error)}).") from error
        write_json(folder / "config.json", {**plain_config(model.network), **layer_fields(model.anatomy)})
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)
        return Export(_kinds(path), self._notes(model))

    def _notes(self, model: Model) -> list[str]:
        notes = []
        if next(model.network.parameters()).dtype != torch.float32:
            notes.append("the graph computes in float32, whatever the model was in.")
        if quantized_layers(model.network):
            notes.append(
                "onnxruntime may round the inputs of eight-bit layers to eight bits for speed; its session option "
                "session.qdq_matmulnbits_accuracy_level = 1 keeps them."
            )
        return notes

    def verify(self, model: Model, folder: Path) -> None:
        import onnx
        import onnxruntime

        onnx.checker.check_model(str(folder / "model.onnx"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # what the graph says, not a faster version
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        network = copy.deepcopy(model.network).cpu().float()
        for batch, length in _SHAPES:
            inputs = _inputs(model, batch, length)
            with torch.no_grad():
                expected = network(**inputs)[0]
            found = torch.from_numpy(session.run(None, {name: t.numpy() for name, t in inputs.items()})[0])
            largest = max(1.0, float(expected.abs().max()))
            far = found.shape != expected.shape or float((found - expected).abs().max()) > TOLERANCE * largest
            if far or not bool(found.isfinite().all()):
                raise FormatError(f"the export could not be verified: another output for {batch} inputs of {length}.")


class _FirstOutput(nn.Module):
    """Tensors in, the network's first output: what a graph has for inputs and outputs."""

    def __init__(self, network: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, *tensors: Tensor) -> Tensor:
        first: Tensor = self.network(**dict(zip(self.names, tensors, strict=True)))[0]
        return first


class _IntegerLayer(nn.Module):
    """A quantized layer in the operators of ONNX. It can be traced, and not run."""

    def __init__(self, layer: QuantizedLinear, path: str) -> None:
        super().__init__()
        form, scheme = layer.scheme.weight, layer.scheme
        whole = form.group_size in (PER_ROW, PER_TENSOR)
        if type(form) is not Integer or form.bits != 8 or form.zero_dtype != "code" or not whole:
            raise FormatError(
                f"{path} is in {format_name(form)}, and ONNX's DequantizeLinear takes eight-bit integers with a scale "
                "a row here; quantize to int8 with group -1, or export the unquantized model."
            )
        if scheme.hadamard or scheme.rank or scheme.clip != 1:
            raise FormatError(
                f"{path} has an online rotation, low-rank factors or clipped inputs, which this export does not write."
            )
        inputs = scheme.inputs
        fixed = type(inputs) is Integer and inputs.bits == 8 and inputs.symmetric and scheme.static
        if inputs is not None and not fixed:
            raise FormatError(
                f"{path} rounds its inputs to {format_name(inputs)} with a scale for each of them, and ONNX has only "
                "fixed scales; quantize with `inputs: int8` and `static: true`, or the weights only."
            )
        stored = layer.packed.tensors
        rows = layer.out_features
        codes = stored["codes"]
        self.codes = nn.Buffer((codes.short() - 128).to(torch.int8) if form.symmetric else codes)
        self.scale = nn.Buffer(stored["scale"].float().reshape(-1).expand(rows).clone())
        zero = (
            torch.zeros(rows, dtype=torch.int8) if form.symmetric else stored["zero"].reshape(-1).expand(rows).clone()
        )
        self.zero = nn.Buffer(zero)
        self.bias = layer.bias
        self.static = fixed
        if fixed:
            self.input_scale = nn.Buffer(getattr(layer, STATIC_SCALE).float().reshape(()))
            self.input_zero = nn.Buffer(torch.zeros((), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        if self.static:
            grid = (self.input_scale, self.input_zero)
            codes = torch.onnx.ops.symbolic("QuantizeLinear", (x, *grid), {}, dtype=torch.int8, shape=x.shape)
            x = torch.onnx.ops.symbolic("DequantizeLinear", (codes, *grid), {}, dtype=torch.float32, shape=x.shape)
        weight = torch.onnx.ops.symbolic(
            "DequantizeLinear", (self.codes, self.scale, self.zero), {"axis": 0},
            dtype=torch.float32, shape=self.codes.shape,
        )  # fmt: skip
        return F.linear(x, weight, self.bias)


def _check(model: Model) -> None:
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise FormatError(f"an export to onnx needs {', '.join(missing)}: install them with `pip install smelt[onnx]`.")
    if model.task == "language":
        raise FormatError(
            "ONNX is written for encoders here, and this model generates text; export it to gguf or compressed-tensors."
        )


def _inputs(model: Model, batch: int, length: int) -> dict[str, Tensor]:
    """Inputs of that size; the last row of a text is padded, and there are token types where the network reads them."""
    inputs = probe(model, batch, length)
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, -2:] = 0
        named = model.tokenizer.model_input_names if model.tokenizer is not None else []
        if "token_type_ids" in named and "token_type_ids" in inspect.signature(model.network.forward).parameters:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    return inputs


def _free(tensor: Tensor) -> dict[int, Any]:
    """The dimensions of an input that stay open: of an image the batch only."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    return {0: batch, 1: length} if tensor.dim() == 2 else {0: batch}


def _forget_origin(program: Any) -> None:
    """The exporter notes where in the source every node came from: paths of this machine, and most of the file."""
    graph = program.model.graph
    for whole in (program.model, graph):
        whole.metadata_props.clear()
    for node in graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()


def _output_name(model: Model) -> str:
    return "last_hidden_state" if model.task == "embedding" else "logits"


def _kinds(path: Path) -> dict[str, int]:
    """How many initializers there are of each number type."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return dict(Counter(onnx.TensorProto.DataType.Name(tensor.data_type).lower() for tensor in graph.initializer))


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of packages that it could use and of functions that will go; neither is the user's concern."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
