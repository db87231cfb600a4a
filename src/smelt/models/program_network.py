"""A network that runs a stored program instead of modules, such as an integer graph.

It keeps the outline of the network it was made from, on the meta device, as its structural view: anatomy, shapes and
parameter counts are those of the outline.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from smelt.errors import ModelError

# The layer that runs programs is above this one, so that a program is found by name, like an entry point.
_PROGRAMS = {
    "integer": ("smelt.runtime.integer.network", "IntegerNetwork"),
    "integer-decoder": ("smelt.runtime.integer.decoder_network", "IntegerDecoder"),
}


class ProgramNetwork(PreTrainedModel):
    """Base class of networks that run a program; their constants are buffers."""

    program: ClassVar[str]  # the name in `smelt.json`
    _supports_sdpa = True  # whatever the outline's config says: no attention module is built
    _supports_flash_attn = True

    def __init__(self, outline: PreTrainedModel) -> None:
        super().__init__(outline.config)
        self._outline = (outline.to("meta"),)  # in a tuple, which is no submodule
        outline.tie_weights()  # moving them untied them
        self.main_input_name = outline.main_input_name

    @property
    def outline(self) -> PreTrainedModel:
        """The network that the program computes, without its weights."""
        return self._outline[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the outputs."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def reads_mask(self) -> bool:
        """Whether the program reads an attention mask, so that inputs of different lengths can be one batch."""
        return True

    @abstractmethod
    def save_program(self, folder: Path) -> None:
        """Write the program and its constants."""

    @classmethod
    @abstractmethod
    def load_program(cls, folder: Path, outline: PreTrainedModel) -> ProgramNetwork:
        """Read and check what `save_program` wrote; the files are not trusted."""


def outline_of(network: PreTrainedModel) -> PreTrainedModel:
    """Return the network whose structure counts: the outline of one that runs a program, else the network itself."""
    return network.outline if isinstance(network, ProgramNetwork) else network


def load_program_network(name: Any, folder: Path, outline: PreTrainedModel) -> ProgramNetwork:
    """Load the network of an artifact whose `smelt.json` names a program."""
    if not isinstance(name, str) or name not in _PROGRAMS:
        raise ModelError(f"{folder}: smelt.json names the program {name!r:.40}, which this Smelt does not run.")
    module, attribute = _PROGRAMS[name]
    network_class: type[ProgramNetwork] = getattr(importlib.import_module(module), attribute)
    return network_class.load_program(folder, outline)
