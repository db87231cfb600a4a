"""The integer graph: nodes in execution order that hold and produce integers only.

Scales are no part of a node. They are kept beside the graph for conversion, debugging and the dequantization of the
outputs, and nothing that computes reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smelt.errors import ModelError
from smelt.files import json_text, write_atomically
from smelt.models.json_file import read_object
from smelt.models.weights import check_safetensors

GRAPH_FILE = "integer_graph.json"
CONSTANTS_FILE = "integer_graph.safetensors"
GRAPH_FORMAT = 1

DTYPES = {
    "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Attribute = int | list[int]
Scale = float | list[float]


@dataclass(frozen=True)
class Node:
    """One operator of `ops.py`; `layer` is the module of the float network it came from, for messages and debugging."""

    op: str
    inputs: tuple[str, ...]
    output: str
    dtype: str
    attributes: dict[str, Attribute] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    layer: str = ""

    def __str__(self) -> str:
        return f"node {self.output!r} ({self.op}) of layer {self.layer!r}"


@dataclass
class IntegerGraph:
    """Nodes in static single assignment form, the dtypes of the inputs, the names of the outputs, and the scales.

    A scale is a number, or a list with one number per channel of the last axis.
    """

    inputs: dict[str, str]
    nodes: list[Node] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    scales: dict[str, Scale] = field(default_factory=dict)

    def check(self) -> None:
        """Raise unless constants, attributes and results are integers and every tensor is defined before its use."""
        defined = set(self.inputs)
        for name, dtype in self.inputs.items():
            if dtype not in DTYPES:
                raise ModelError(f"The integer graph has the input {name!r} of dtype {dtype}; only integers may enter.")
        for node in self.nodes:
            _check_node(node, defined)
            defined.add(node.output)
        if missing := set(self.outputs) - defined or (not self.outputs and {"output"}):
            raise ModelError(f"The integer graph does not produce its outputs: {', '.join(sorted(missing))}.")

    def count_dtypes(self) -> dict[str, int]:
        """Check the graph, and return the number of its tensors by dtype: inputs, constants and results."""
        self.check()
        constants = (tensor for node in self.nodes for tensor in node.constants.values())
        names = [*self.inputs.values(), *map(dtype_name, constants), *(node.dtype for node in self.nodes)]
        return dict(sorted(Counter(names).items()))

    def to(self, device: torch.device) -> IntegerGraph:
        """Move the constants to a device; return the graph."""
        for node in self.nodes:
            node.constants.update({name: tensor.to(device) for name, tensor in node.constants.items()})
        return self

    def dequantize(self, name: str, values: Tensor) -> Tensor:
        """Return the float32 values of a tensor of the graph, by its scale."""
        if name not in self.scales:
            raise ModelError(f"The integer graph has no scale for its tensor {name!r}.")
        return values.to(torch.float32) * torch.tensor(self.scales[name], dtype=torch.float32, device=values.device)

    def quantize(self, name: str, values: Tensor) -> Tensor:
        """Return an input as integers: features by its scale, token ids as they are."""
        dtype = DTYPES[self.inputs[name]]
        if values.is_floating_point() and name in self.scales:
            limits = torch.iinfo(dtype)
            scale = torch.tensor(self.scales[name], dtype=values.dtype, device=values.device)
            values = (values / scale).round().clamp(limits.min, limits.max).to(dtype)
        return values

    def save(self, folder: Path) -> None:
        """Write the graph as JSON and its constants as safetensors."""
        constants = {
            f"{node.output}.{name}": tensor.contiguous()
            for node in self.nodes
            for name, tensor in node.constants.items()
        }
        write_atomically(folder / CONSTANTS_FILE, lambda path: save_file(constants, path))
        plain = {
            "format": GRAPH_FORMAT,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "nodes": [_plain_node(node) for node in self.nodes],
            "scales": self.scales,
        }
        write_atomically(folder / GRAPH_FILE, lambda path: path.write_text(json_text(plain)))

    @classmethod
    def load(cls, folder: Path) -> IntegerGraph:
        """Read a graph and check it; the files are not trusted."""
        path = folder / GRAPH_FILE
        plain = read_object(path, max_values=2**24)
        if plain.get("format") != GRAPH_FORMAT:
            raise ModelError(f"{path} has another format than {GRAPH_FORMAT}; load it with the version that wrote it.")
        constants = _read_constants(folder / CONSTANTS_FILE)
        try:
            graph = cls(
                inputs={str(name): str(dtype) for name, dtype in plain["inputs"].items()},
                nodes=[_node(item, constants) for item in plain["nodes"]],
                outputs=[str(name) for name in plain["outputs"]],
                scales={str(name): _scale(value) for name, value in plain["scales"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ModelError(f"{path} is damaged: {error!r:.200}.") from error
        graph.check()
        return graph


def dtype_name(tensor: Tensor) -> str:
    """Return the name that graphs use for the dtype of a tensor; the torch name if it may not occur in one."""
    return _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _check_node(node: Node, defined: set[str]) -> None:
    if node.dtype not in DTYPES:
        raise ModelError(f"The integer graph computes in {node.dtype} in {node}; only integers are allowed.")
    for name, tensor in node.constants.items():
        if tensor.dtype not in _NAMES:
            raise ModelError(
                f"The integer graph holds {dtype_name(tensor)} in {name!r} of {node}; only integers are allowed."
            )
    for name, value in node.attributes.items():
        if not all(type(item) is int for item in (value if isinstance(value, list) else [value])):
            raise ModelError(f"The integer graph has the attribute {name!r} in {node}, which is not an integer.")
    if unknown := set(node.inputs) - defined:
        raise ModelError(f"The integer graph uses {', '.join(sorted(unknown))} before it is defined, in {node}.")
    if node.output in defined:
        raise ModelError(f"The integer graph defines {node.output!r} twice, in {node}.")


def _plain_node(node: Node) -> dict[str, Any]:
    return {
        "op": node.op,
        "inputs": list(node.inputs),
        "output": node.output,
        "dtype": node.dtype,
        "attributes": node.attributes,
        "constants": sorted(node.constants),
        "layer": node.layer,
    }


def _node(plain: Mapping[str, Any], constants: Mapping[str, Tensor]) -> Node:
    return Node(
        op=str(plain["op"]),
        inputs=tuple(str(name) for name in plain["inputs"]),
        output=str(plain["output"]),
        dtype=str(plain["dtype"]),
        attributes=dict(plain["attributes"]),
        constants={str(name): constants[f"{plain['output']}.{name}"] for name in plain["constants"]},
        layer=str(plain["layer"]),
    )


def _scale(value: Any) -> Scale:
    return [float(item) for item in value] if isinstance(value, list) else float(value)


def _read_constants(path: Path) -> dict[str, Tensor]:
    check_safetensors(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
