"""What is trained on what: a network, samples to train on and samples that are held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from smelt.errors import ModelError
from smelt.models.config import config_from
from smelt.models.json_file import one_line
from smelt.models.load import load
from smelt.models.quantized import QuantizedLinear
from smelt.models.quiet import quiet_transformers

Batch = dict[str, Tensor]


class Samples(Protocol):
    """Something that batches are taken from, by the places of samples."""

    def __len__(self) -> int: ...

    def take(self, places: np.ndarray) -> Batch: ...


@dataclass(frozen=True)
class TrainingTask:
    """One run's work. The network takes a batch by name and gives a loss."""

    network: PreTrainedModel
    train: Samples
    held_out: Samples
    has_classes: bool  # whether predictions are right or wrong
    tokenizer: PreTrainedTokenizerBase | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of every call of the network
    facts: dict[str, Any] = field(default_factory=dict)  # for run.json

    def save(self, folder: Path) -> None:
        """The network as transformers has it, with its tokenizer."""
        with quiet_transformers():
            self.network.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)


def new_network(values: dict[str, Any], auto_class: Any, seed: int) -> PreTrainedModel:
    """A network with random weights, from the keys of a transformers config."""
    config = config_from(values, "`model` of the configuration")
    usual = type(config)()
    unknown = [key for key in values if not hasattr(usual, key)]  # transformers would take any key in silence
    if unknown:
        raise ModelError(f"`model` of the configuration: {config.model_type} has no key {unknown[0]!r}.")
    return _built(lambda: auto_class.from_config(config, trust_remote_code=False), seed)


def _built(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    try:
        with quiet_transformers():
            torch.manual_seed(seed)
            return build().float()
    except Exception as error:  # a foreign constructor fed with foreign values may raise anything
        raise ModelError(f"transformers cannot build the `model` of the configuration ({one_line(error)}).") from error


def known_network(spec: str, task: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A model that exists, in float32."""
    model = load(spec, dtype=torch.float32)
    if model.task != task:
        raise ModelError(f"{spec} is a model for {model.task}, and the task is {task}; give one that fits.")
    if any(isinstance(module, QuantizedLinear) for module in model.network.modules()):
        raise ModelError(f"{spec} has quantised layers, which have no gradient; train the model it was made from.")
    return model.network, model.tokenizer
