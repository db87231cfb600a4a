"""ONNX for encoders: the network traced by PyTorch's exporter with dynamic batch size and sequence length.

Pruned networks are traced with their actual shapes. An int8 layer with per-row scales keeps its codes: they are an
initializer of the graph, followed by `DequantizeLinear`. Static input quantization becomes a `QuantizeLinear` and
`DequantizeLinear` pair. Other formats have no ONNX operators that all runtimes support, and are refused.
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

from smelt.errors import FormatError, install_command
from smelt.export.format import Export, ExportFormat
from smelt.models.artifact import shaped_config, write_json
from smelt.models.json_file import one_line
from smelt.models.model import Model
from smelt.models.quantized import QuantizedEmbedding, QuantizedLinear, quantized_layers
from smelt.models.quantized_network import replace_module
from smelt.models.tokenizer import save_tokenizer
from smelt.models.verify import probe
from smelt.numerics.catalog import format_name
from smelt.numerics.format import PER_ROW, PER_TENSOR
from smelt.numerics.integer import Integer

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20
TOLERANCE = 1e-4  # relative to the largest output, or to 1
_SHAPES = ((2, 24), (3, 7))  # (batch, length): traced, and another one to verify


@dataclass(frozen=True)
class Onnx(ExportFormat):
    """A graph for onnxruntime and other engines."""

    name = "onnx"

    def write(self, model: Model, folder: Path) -> Export:
        _check(model)
        network = copy.deepcopy(model.network).cpu().float()
        for layer_path, layer in quantized_layers(network).items():
            dense = layer.to_dense() if isinstance(layer, QuantizedEmbedding) else _IntegerLayer(layer, layer_path)
            replace_module(network, layer_path, dense)
        names, example = zip(*_inputs(model, *_SHAPES[0]).items(), strict=True)
        path = folder / "model.onnx"
        try:
            with _quiet(), torch.no_grad():
                program = torch.onnx.export(
                    _FirstOutput(network, names), example,
                    dynamic_shapes={"tensors": tuple(_dynamic_dims(tensor) for tensor in example)},
                    input_names=list(names), output_names=[_output_name(model)],
                    opset_version=OPSET, dynamo=True, verbose=False,
                )  # fmt: skip
                assert program is not None
                _strip_metadata(program)
                program.save(str(path))
        except Exception as error:  # foreign code on any network
            raise FormatError(f"PyTorch cannot write this network as ONNX ({one_line(error)}).") from error
        write_json(folder / "config.json", shaped_config(model.anatomy))
        if model.tokenizer is not None:
            save_tokenizer(model.tokenizer, folder)
        return Export(count_types(path), self._notes(model))

    def _notes(self, model: Model) -> list[str]:
        notes = []
        if next(model.network.parameters()).dtype != torch.float32:
            notes.append("the graph computes in float32, whatever the dtype of the model.")
        if any(isinstance(layer, QuantizedEmbedding) for layer in quantized_layers(model.network).values()):
            notes.append("the graph holds the token embeddings dequantized, in float32.")
        if quantized_layers(model.network):
            notes.append(
                "onnxruntime may quantize the inputs of 8-bit layers to 8 bits for speed; its session option "
                "session.qdq_matmulnbits_accuracy_level = 1 prevents that."
            )
        return notes

    def verify(self, model: Model, folder: Path) -> None:
        import onnx
        import onnxruntime

        onnx.checker.check_model(str(folder / "model.onnx"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry(
            "session.disable_quant_qdq", "1"
        )  # verify the graph itself, not an optimized version
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        network = copy.deepcopy(model.network).cpu().float()
        for batch, length in _SHAPES:
            inputs = _inputs(model, batch, length)
            with torch.no_grad():
                expected = network(**inputs)[0]
            actual = torch.from_numpy(session.run(None, {name: t.numpy() for name, t in inputs.items()})[0])
            largest = max(1.0, float(expected.abs().max()))
            differs = actual.shape != expected.shape or float((actual - expected).abs().max()) > TOLERANCE * largest
            if differs or not bool(actual.isfinite().all()):
                raise FormatError(f"the export could not be verified: another output for {batch} inputs of {length}.")


class _FirstOutput(nn.Module):
    """Wrap a network to take positional tensors and return its first output, as a graph needs."""

    def __init__(self, network: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, *tensors: Tensor) -> Tensor:
        first: Tensor = self.network(**dict(zip(self.names, tensors, strict=True)))[0]
        return first


class _IntegerLayer(nn.Module):
    """A quantized layer in ONNX operators. It can be traced but not run."""

    def __init__(self, layer: QuantizedLinear, path: str) -> None:
        super().__init__()
        number_format, scheme = layer.scheme.weight, layer.scheme
        ungrouped = number_format.group_size in (PER_ROW, PER_TENSOR)
        if (
            type(number_format) is not Integer
            or number_format.bits != 8
            or number_format.zero_dtype != "code"
            or not ungrouped
        ):
            raise FormatError(
                f"{path} is in {format_name(number_format)}, and ONNX export supports 8-bit integers with per-row "
                "scales only; quantize to int8 with group_size -1, or export the unquantized model."
            )
        if scheme.hadamard or scheme.rank or scheme.clip != 1:
            raise FormatError(
                f"{path} has an online rotation, low-rank factors or clipped inputs, which this export does not write."
            )
        inputs = scheme.inputs
        fixed = type(inputs) is Integer and inputs.bits == 8 and scheme.static
        if inputs is not None and not fixed:
            scales = "static" if scheme.static else "dynamic"
            raise FormatError(
                f"{path} quantizes its inputs to {format_name(inputs)} with {scales} scales, and ONNX export supports "
                "8 bits with static ones; use `input_activations: int8` and `static_activations: true`, or the weights "
                "only."
            )
        stored = layer.packed.tensors
        rows = layer.out_features
        codes = stored["codes"]
        self.codes = nn.Buffer((codes.short() - 128).to(torch.int8) if number_format.symmetric else codes)
        self.scale = nn.Buffer(stored["scale"].float().reshape(-1).expand(rows).clone())
        zero = (
            torch.zeros(rows, dtype=torch.int8)
            if number_format.symmetric
            else stored["zero"].reshape(-1).expand(rows).clone()
        )
        self.zero = nn.Buffer(zero)
        self.bias = layer.bias
        self.static = fixed
        if fixed:
            input_scale, input_zero = layer.static_inputs
            assert input_scale is not None
            self.input_scale = nn.Buffer(input_scale.float().reshape(()))
            self.input_zero = nn.Buffer(
                torch.zeros((), dtype=torch.int8) if input_zero is None else input_zero.reshape(())
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.static:
            qparams = (self.input_scale, self.input_zero)
            codes = torch.onnx.ops.symbolic(
                "QuantizeLinear", (x, *qparams), {}, dtype=self.input_zero.dtype, shape=x.shape
            )
            x = torch.onnx.ops.symbolic("DequantizeLinear", (codes, *qparams), {}, dtype=torch.float32, shape=x.shape)
        weight = torch.onnx.ops.symbolic(
            "DequantizeLinear", (self.codes, self.scale, self.zero), {"axis": 0},
            dtype=torch.float32, shape=self.codes.shape,
        )  # fmt: skip
        return F.linear(x, weight, self.bias)


def check_packages(to: str) -> None:
    """Raise unless the packages of an ONNX export are installed."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise FormatError(f"an export to {to} needs {', '.join(missing)}: `{install_command('onnx')}`.")


def _check(model: Model) -> None:
    check_packages("onnx")
    if model.task == "language":
        raise FormatError(
            "ONNX export is for encoders, and this model generates text; export it to gguf or compressed-tensors."
        )


def _inputs(model: Model, batch: int, length: int) -> dict[str, Tensor]:
    """Return example inputs of this shape; text has padding in its last row, and token types if the network reads
    them."""
    inputs = probe(model, batch, length)
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, -2:] = 0
        named = model.tokenizer.model_input_names if model.tokenizer is not None else []
        if "token_type_ids" in named and "token_type_ids" in inspect.signature(model.network.forward).parameters:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    return inputs


def _dynamic_dims(tensor: Tensor) -> dict[int, Any]:
    """Return the dynamic dimensions of an input: for an image only the batch."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    return {0: batch, 1: length} if tensor.dim() == 2 else {0: batch}


def _strip_metadata(program: Any) -> None:
    """Remove the exporter's source locations: they contain paths of this machine and are most of the file."""
    graph = program.model.graph
    for owner in (program.model, graph):
        owner.metadata_props.clear()
    for node in graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()


def _output_name(model: Model) -> str:
    return "last_hidden_state" if model.task == "embedding" else "logits"


def count_types(path: Path) -> dict[str, int]:
    """Return the number of initializers by data type."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return dict(Counter(onnx.TensorProto.DataType.Name(tensor.data_type).lower() for tensor in graph.initializer))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes about optional packages and deprecations, which do not concern the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
