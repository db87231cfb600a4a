"""A network that runs an integer graph: the same inputs and outputs as the float network it was converted from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from smelt.models.program_network import ProgramNetwork
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.run import Interpreter, add_default_inputs, preferred_backend


@dataclass
class IntegerOutput(ModelOutput):
    """The outputs of the graph, dequantized to float32."""

    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None


class IntegerNetwork(ProgramNetwork):
    """Runs an integer graph by the fastest backend of its device; only its outputs are dequantized.

    Token ids enter as they are. Features (pixels, spectrograms) are float and are quantized by the scale of the input.
    """

    program: ClassVar[str] = "integer"

    def __init__(self, graph: IntegerGraph, outline: PreTrainedModel) -> None:
        super().__init__(outline)
        self.graph = graph
        for index, node in enumerate(graph.nodes):
            for name, constant in node.constants.items():
                self.register_buffer(f"node{index}_{name}", constant)
        self.interpreter = Interpreter(graph, preferred_backend(torch.device("cpu")))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the constants; the nodes of the graph and the backend follow."""
        super()._apply(fn, recurse)
        for index, node in enumerate(self.graph.nodes):
            node.constants.update({name: getattr(self, f"node{index}_{name}") for name in node.constants})
        self.interpreter = Interpreter(self.graph, preferred_backend(self.device))
        return self

    @property
    def reads_mask(self) -> bool:
        return "attention_mask" in self.graph.inputs

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> IntegerOutput:
        """Run the graph; a missing attention mask hides no token or frame, missing token types are zero."""
        given = {"input_ids": input_ids, **inputs}
        values = add_default_inputs({name: value for name, value in given.items() if isinstance(value, Tensor)})
        known = {name: self.graph.quantize(name, values[name]) for name in self.graph.inputs if name in values}
        outputs = self.interpreter.run(known)
        return IntegerOutput(**{name: self.graph.dequantize(name, outputs[name]) for name in self.graph.outputs})

    def save_program(self, folder: Path) -> None:
        self.graph.save(folder)

    @classmethod
    def load_program(cls, folder: Path, outline: PreTrainedModel) -> IntegerNetwork:
        return cls(IntegerGraph.load(folder), outline)
