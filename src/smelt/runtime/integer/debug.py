"""Debug an integer graph: signal-to-quantization-noise ratio per layer, and nonlinear operators switched to float."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smelt.runtime.integer.graph import IntegerGraph, Node
from smelt.runtime.integer.run import Interpreter, add_default_inputs

GraphInputs = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
# Operators whose result is that of their float module.
_MODULE_OUTPUTS = (
    "linear", "layer_norm", "layer_norm_table", "layer_norm_shift", "rms_norm", "rms_norm_table", "embedding",
)  # fmt: skip


@dataclass
class LayerSqnr:
    """The noise of one layer's output relative to the float network, with the noise of all layers before it."""

    layer: str
    op: str
    signal: float = 0.0
    noise: float = 0.0

    @property
    def decibels(self) -> float:
        """The signal-to-quantization-noise ratio; infinite without noise."""
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else math.inf


@torch.no_grad()
def layer_sqnr(
    network: nn.Module,
    graph: IntegerGraph,
    batches: Iterable[Mapping[str, Tensor]],
    to_float: Collection[str] = (),
    graph_inputs: GraphInputs = add_default_inputs,
) -> list[LayerSqnr]:
    """Compare the output of every layer with the float network it was converted from, padding excluded.

    The functions in `to_float` (of `NONLINEAR`) compute in float, to see what their integer form costs. `graph_inputs`
    makes the inputs of the graph from a batch.
    """
    interpreter = float_interpreter(graph, to_float)
    rows = {node.output: LayerSqnr(node.layer, node.op) for node in graph.nodes if node.op in _MODULE_OUTPUTS}
    for batch in batches:
        expected = _module_outputs(network, {rows[name].layer for name in rows}, batch)
        mask = batch.get("attention_mask")
        inputs = {name: graph.quantize(name, x) for name, x in graph_inputs(batch).items() if name in graph.inputs}
        for node, tensor in interpreter.trace(inputs):
            if node.output in rows and node.layer in expected:
                row, actual = rows[node.output], graph.dequantize(node.output, tensor).double()
                reference = expected[node.layer].double().expand_as(actual)  # positions may have a batch of one
                signal, noise = _visible(reference, mask), _visible(reference - actual, mask)
                row.signal += float(signal.square().sum())
                row.noise += float(noise.square().sum())
    return [row for row in rows.values() if row.signal]


def float_interpreter(graph: IntegerGraph, to_float: Collection[str]) -> Interpreter:
    """Return an interpreter that computes some functions of `NONLINEAR` in float64 and rounds their results to their
    scale, in whatever integer form the graph has them."""
    interpreter = Interpreter(graph)
    for index, node in enumerate(graph.nodes):
        if _function(node) in to_float:
            interpreter.functions[index] = _float_function(graph, node)
    return interpreter


def _float_function(graph: IntegerGraph, node: Node) -> Callable[..., Tensor]:
    """Return the float form of a nonlinear node; results are rounded to the scale of its output."""
    input_scale = torch.tensor(graph.scales[node.inputs[0]], dtype=torch.float64)
    output_scale = torch.tensor(graph.scales[node.output], dtype=torch.float64)

    def compute(x: Tensor, mask: Tensor | None = None, **constants: Tensor | int) -> Tensor:
        values = x.double() * input_scale
        if mask is not None:
            values = values.masked_fill(mask == 0, -torch.inf)
        results = _FLOAT[_function(node)](values, constants, float(input_scale), float(output_scale))
        return (results / output_scale).round().to(torch.int64)

    return compute


def _function(node: Node) -> str:
    """Return the function of which an operator is a form; a lookup in a table alone does not say which."""
    return node.op.removesuffix("_table").removesuffix("_shift")


def _layer_norm(x: Tensor, constants: Mapping[str, Tensor | int], input_scale: float, output_scale: float) -> Tensor:
    weight = _norm_weight(x, constants, output_scale)
    return F.layer_norm(x, x.shape[-1:], weight, torch.as_tensor(constants["bias"]).double() * output_scale, 1e-12)


def _rms_norm(x: Tensor, constants: Mapping[str, Tensor | int], input_scale: float, output_scale: float) -> Tensor:
    squares = int(constants["epsilon"]) << (2 * int(constants["shift"]))  # of integers, over all channels
    epsilon = squares * input_scale**2 / x.shape[-1]
    return F.rms_norm(x, x.shape[-1:], _norm_weight(x, constants, output_scale), epsilon)


def _norm_weight(x: Tensor, constants: Mapping[str, Tensor | int], output_scale: float) -> Tensor:
    # One unit of `normalized * weight` is the output scale, and the weight's scale follows from both.
    unit = output_scale * 2.0 ** int(constants["output_bits"]) / math.sqrt(x.shape[-1])
    return torch.as_tensor(constants["weight"]).double() * unit


_FLOAT: dict[str, Callable[[Tensor, Mapping[str, Tensor | int], float, float], Tensor]] = {
    "gelu": lambda x, *_: F.gelu(x),
    "silu": lambda x, *_: F.silu(x),
    "tanh": lambda x, *_: torch.tanh(x),
    "softmax": lambda x, *_: x.softmax(-1).nan_to_num(0.0),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}
NONLINEAR = tuple(_FLOAT)


def _module_outputs(network: nn.Module, paths: Collection[str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda module, args, output, path=path: outputs.update({path: output}))
        for path, module in network.named_modules()
        if path in paths
    ]
    try:
        network(**{name: tensor for name, tensor in batch.items() if name != "labels"})
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _visible(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None and x.dim() == 3 and x.shape[:2] == mask.shape:
        return x[mask.bool()]
    return x
