"""What a run trains, new or pretrained: a causal language model on text, or an image classifier or a diffusion model on
labeled images."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from smelt.errors import ModelError
from smelt.models.artifact import is_artifact, save_artifact
from smelt.models.config import config_from, quiet_transformers
from smelt.models.image_diffusion import MODEL_TYPE as DIFFUSION
from smelt.models.image_generation import load_generator
from smelt.models.json_file import one_line
from smelt.models.load import load, resolve
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.models.tokenizer import load_tokenizer_only, save_tokenizer
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.dataloader import (
    MapDataset,
    NormalizedImages,
    channel_statistics,
    load_image_splits,
    load_token_windows,
)


@dataclass(frozen=True)
class TrainingTask:
    """A network, which takes a batch as keyword arguments and returns a loss, and its data."""

    network: Any  # with a `config`
    train: MapDataset
    held_out: MapDataset
    is_classifier: bool  # whether there is an accuracy
    tokenizer: PreTrainedTokenizerBase | None = None
    forward_kwargs: dict[str, Any] = field(default_factory=dict)  # of every call of the network
    metadata: dict[str, Any] = field(default_factory=dict)  # for run.json
    log_values: Callable[[], dict[str, float]] = dict  # added to the log entry of each step
    on_step: Callable[[int], None] = lambda step: None  # called before each step with its number, from 0
    # What the kernels of a step depend on beside the shapes of its batch; None: it cannot be captured as a CUDA graph.
    graph_state: Callable[[], Hashable] = lambda: ()
    has_perplexity: bool = True  # its loss is a negative log-likelihood per token (unless it is a classifier)
    saves_model: bool = True  # at the end; false: whoever runs it goes on with the network in memory
    artifact: Model | None = None  # of Smelt, which the network is of: only Smelt can save its widths and layers

    @property
    def layers(self) -> nn.Module:
        """The network without a wrapper that computes its loss: its paths are those that users know."""
        inner: nn.Module = getattr(self.network, "network", self.network)
        return inner

    def save(self, folder: Path) -> None:
        """Save the network and its tokenizer as transformers does, or as the artifact that it came from."""
        if self.artifact is not None:
            save_artifact(self.artifact, folder)
            return
        with quiet_transformers():
            self.network.save_pretrained(folder)
            if self.tokenizer is not None:
                save_tokenizer(self.tokenizer, folder)


def build_task(config: TrainConfig) -> TrainingTask:
    """Build the model and load the data of a run."""
    build = {"language": _language_task, "images": _image_task, "diffusion": _diffusion_task}[config.task]
    return build(config)


def _language_task(config: TrainConfig) -> TrainingTask:
    tokenizer: PreTrainedTokenizerBase | None
    if isinstance(config.model, str):
        network, tokenizer, artifact = _pretrained_model(config.model, "language")
    else:
        artifact = None
        tokenizer = None if config.tokenizer is not None else byte_tokenizer()
        sizes = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
        network = _new_model({**sizes, **config.model}, AutoModelForCausalLM, config.seed)
    if config.tokenizer is not None:
        tokenizer = load_tokenizer_only(resolve(config.tokenizer))
    if tokenizer is None:
        raise ModelError(f"{config.tokenizer or config.model} has no tokenizer; name a model that has one.")
    if artifact is not None:
        artifact.tokenizer = tokenizer
    max_len = getattr(network.config, "max_position_embeddings", None) or config.data.seq_len
    if max_len < config.data.seq_len:
        raise ModelError(
            f"the model reads {max_len} tokens and data.seq_len is {config.data.seq_len}; make it shorter."
        )
    vocab_size = int(network.get_input_embeddings().weight.shape[0])
    train, held_out = load_token_windows(config.data, tokenizer, vocab_size)
    metadata = {"windows": len(train), "held_out": len(held_out), "vocabulary": len(tokenizer)}
    return TrainingTask(
        network, train, held_out, False, tokenizer, {"use_cache": False}, metadata, artifact=artifact
    )  # fmt: skip


def _image_task(config: TrainConfig) -> TrainingTask:
    train, held_out = load_image_splits(config.data)
    channels, classes = train.pixels.shape[1], max(train.classes, held_out.classes)
    if isinstance(config.model, str):
        network, _, artifact = _pretrained_model(config.model, "images")
    else:
        artifact = None
        values: dict[str, Any] = {"num_channels": channels, "num_labels": classes, **config.model}
        network = _new_model(values, AutoModelForImageClassification, config.seed)
    _check_image_model(network.config, channels, classes, config.data.train)
    mean, std = channel_statistics(train)
    metadata = {
        "images": len(train),
        "held_out": len(held_out),
        "classes": classes,
        "image_mean": mean.tolist(),
        "image_std": std.tolist(),
    }
    datasets = NormalizedImages(train, mean, std), NormalizedImages(held_out, mean, std)
    return TrainingTask(network, *datasets, True, metadata=metadata, artifact=artifact)


def _diffusion_task(config: TrainConfig) -> TrainingTask:
    train, held_out = load_image_splits(config.data)
    channels, height, width = train.pixels.shape[1:]
    classes = max(train.classes, held_out.classes)
    if isinstance(config.model, str):
        network: Any = load_generator(config.model)
    else:
        own = {"model_type": DIFFUSION, "num_channels": channels, "num_labels": classes, "image_size": height}
        if config.model.get("model_type", DIFFUSION) != DIFFUSION:
            raise ModelError(
                f"the task diffusion trains a model of the type {DIFFUSION}, not {config.model['model_type']}."
            )
        network = _new_model({**own, **config.model}, AutoModel, config.seed)
    _check_image_model(network.config, channels, classes, config.data.train)
    size = network.config.image_size
    if (height, width) != (size, size):
        raise ModelError(
            f"the model generates {size} x {size} pixels, and {config.data.train} has images of {height} x {width}; "
            "set image_size, or give square images of that size."
        )
    half = np.full(channels, 0.5)  # pixels from -1 to 1
    metadata = {"images": len(train), "held_out": len(held_out), "classes": classes}
    datasets = NormalizedImages(train, half, half), NormalizedImages(held_out, half, half)
    return TrainingTask(network, *datasets, False, metadata=metadata, has_perplexity=False)


def _check_image_model(config: Any, channels: int, classes: int, source: str) -> None:
    for key, needed in (("num_channels", channels), ("num_labels", classes)):
        value = getattr(config, key, needed)
        if value < needed or (key == "num_channels" and value != needed):
            raise ModelError(f"the model has {key} = {value}, and {source} needs {needed}.")


def _new_model(values: dict[str, Any], auto_class: Any, seed: int) -> PreTrainedModel:
    """Build a network with random weights from the keys of a transformers config."""
    config = config_from(values, "`model` of the configuration")
    defaults = type(config)()
    unknown = [key for key in values if not hasattr(defaults, key)]  # transformers accepts any key silently
    if unknown:
        raise ModelError(f"`model` of the configuration: {config.model_type} has no key {unknown[0]!r}.")
    return _build(lambda: auto_class.from_config(config, trust_remote_code=False), seed)


def _build(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    try:
        with quiet_transformers():
            torch.manual_seed(seed)
            return build().float()
    except Exception as error:  # a foreign constructor with foreign values may raise anything
        raise ModelError(f"transformers cannot build the `model` of the configuration ({one_line(error)}).") from error


def _pretrained_model(spec: str, task: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, Model | None]:
    """Load an existing model in float32; return its network, its tokenizer, and itself if it is an artifact."""
    model = load(spec, dtype=torch.float32)
    if model.task != task:
        raise ModelError(f"{spec} is a model for {model.task}, but the task is {task}; choose a model for that task.")
    if any(isinstance(module, QuantizedLinear) for module in model.network.modules()):
        raise ModelError(f"{spec} has quantized layers, which have no gradient; train the model it was made from.")
    return model.network, model.tokenizer, model if is_artifact(resolve(spec)) else None


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per UTF-8 byte, for a new model without a tokenizer of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=["input_ids", "attention_mask"])
