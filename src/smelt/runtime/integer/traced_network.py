"""The operators of a float network of convolutions in execution order, from which an integer graph is converted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FloatNode
from transformers import PreTrainedModel

from smelt.errors import ConversionError
from smelt.models.batch_norm import batch_norms, fold_batch_norms

MASK = "attention_mask"


class TracedNetwork:
    """The operators of a float network in execution order, with its batch norms folded."""

    def __init__(self, network: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
        """Fold the batch norms of the network in place and trace it; the sizes of `inputs` may be others later.

        A network of recordings that reads a mask of their frames is traced with one.
        """
        self.input = network.main_input_name
        features = torch.cat([inputs[self.input][:1]] * 2)  # a batch of one would be taken for a constant
        given = {self.input: features}
        self.has_mask = features.dim() == 3 and MASK in inspect.signature(network.forward).parameters
        if self.has_mask:
            given[MASK] = _all_frames(features)
        fold_batch_norms(network, given)
        for path in batch_norms(network):
            raise ConversionError(f"{path}: this batch norm follows no convolution, so that it has no integer form.")
        # Recordings have any length; the size of images decides about pooling.
        axes = {self.input: (0, 2) if features.dim() == 3 else (0,), MASK: (0, 1)}
        dynamic = {name: dict.fromkeys(axes[name], torch.export.Dim.AUTO) for name in given}
        try:
            with torch.no_grad():
                program = torch.export.export(network, (), kwargs=given, dynamic_shapes=dynamic, strict=False)
        except Exception as error:  # of any kind, from the code of the network
            raise ConversionError(
                f"{type(network).__name__} cannot be traced ({' '.join(str(error).split())[:200]})."
            ) from error
        signature = program.graph_signature
        state = {**program.state_dict, **program.constants}
        self.tensors: dict[str, Tensor] = {
            spec.arg.name: state[spec.target].detach()
            for spec in signature.input_specs
            if spec.target is not None and spec.target in state
        }
        self.output = str(signature.user_outputs[0])
        self.nodes: list[FloatNode] = [node for node in program.graph.nodes if node.op == "call_function"]

    @torch.no_grad()
    def run(self, values: Tensor, observe: Callable[[str, Tensor], None]) -> Tensor:
        """Run the float network on inputs without padding; `observe` is called with the name and value of its input and
        of every floating-point result."""
        environment: dict[str, Any] = {**self.tensors, self.input: values}
        if self.has_mask:
            environment[MASK] = _all_frames(values)
        observe(self.input, values)
        for node in self.nodes:
            arguments = [_resolve(argument, environment) for argument in node.args]
            named = {key: _resolve(argument, environment) for key, argument in node.kwargs.items()}
            result = node.target(*arguments, **named)  # type: ignore[operator]
            environment[node.name] = result
            if isinstance(result, Tensor) and result.is_floating_point():
                observe(node.name, result)
        output: Tensor = environment[self.output]
        return output

    def readers(self, name: str) -> list[FloatNode]:
        return [node for node in self.nodes if any(each.name == name for each in node.all_input_nodes)]


def _all_frames(features: Tensor) -> Tensor:
    """Return the mask [batch, frames] of recordings [batch, bands, frames] without padding."""
    return torch.ones(len(features), features.shape[2], dtype=torch.long, device=features.device)


def _resolve(argument: Any, environment: Mapping[str, Any]) -> Any:
    if isinstance(argument, FloatNode):
        return environment[argument.name]
    if isinstance(argument, Sequence) and not isinstance(argument, str):
        return [_resolve(each, environment) for each in argument]
    return argument
