"""Language models: windows of text, side by side."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from smelt.data import TextData, load_text
from smelt.data.hub import is_hub
from smelt.data.named_datasets import KNOWN, resolve_source
from smelt.errors import DataError, ModelError
from smelt.models.load import resolve
from smelt.models.tokenizer import tokenizer_of
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.task import Batch, TrainingTask, known_network, new_network

HELD_OUT = 10  # one in so many windows of a source that has no test part
_PIECE = 65_536  # characters that are tokenised at once


class Windows:
    """Sequences of equal length, cut one behind the other."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self._windows = tokens[: len(tokens) // length * length].reshape(-1, length)  # [windows, length]

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, places: np.ndarray) -> Batch:
        ids = torch.from_numpy(self._windows[places]).long()  # [batch, length]
        return {"input_ids": ids, "labels": ids}

    def split(self) -> tuple[Windows, Windows]:
        """All but the last tenth, and that."""
        last = max(len(self) // HELD_OUT, 1)
        length = self._windows.shape[1]
        return Windows(self._windows[:-last].reshape(-1), length), Windows(self._windows[-last:].reshape(-1), length)


def language_task(config: TrainConfig) -> TrainingTask:
    """A causal language model, new or known, on text."""
    tokenizer: PreTrainedTokenizerBase | None
    if isinstance(config.model, str):
        network, tokenizer = known_network(config.model, "language")
    else:
        tokenizer = None if config.tokenizer is not None else bytes_tokenizer()
        sizes = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
        network = new_network({**sizes, **config.model}, AutoModelForCausalLM, config.seed)
    if config.tokenizer is not None:
        tokenizer = tokenizer_of(resolve(config.tokenizer))
    if tokenizer is None:
        raise ModelError(f"{config.tokenizer or config.model} has no tokenizer; name a model that has one.")
    longest = getattr(network.config, "max_position_embeddings", None) or config.data.length
    if longest < config.data.length:
        raise ModelError(f"the model reads {longest} tokens and data.length is {config.data.length}; make it shorter.")
    train, held_out = _windows(config, tokenizer, int(network.get_input_embeddings().weight.shape[0]))
    facts = {"windows": len(train), "held_out": len(held_out), "vocabulary": len(tokenizer)}
    return TrainingTask(network, train, held_out, False, tokenizer, {"use_cache": False}, facts)


def _windows(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> tuple[Windows, Windows]:
    data = config.data
    train = _cut(data.train, "calibration", config, tokenizer, vocabulary)
    if data.evaluate is not None:
        return train, _cut(data.evaluate, "evaluation", config, tokenizer, vocabulary)
    if data.train == "default" or data.train in KNOWN or is_hub(data.train):
        return train, _cut(data.train, "evaluation", config, tokenizer, vocabulary)
    if len(train) < 2:
        raise DataError(f"{data.train} gives one sequence of {data.length} tokens; give more text, or data.evaluate.")
    return train.split()


def _cut(source: str, split: str, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Windows:
    found = load_text(resolve_source(source, split), column=config.data.text, split=split)
    tokens = _tokens(found, tokenizer)
    if len(tokens) < config.data.length:
        raise DataError(f"{source} has {len(tokens):,} tokens, too few for one sequence of {config.data.length:,}.")
    if int(tokens.max()) >= vocabulary:
        raise ModelError(
            f"the tokenizer gives token {int(tokens.max()):,} and the model knows {vocabulary:,}; set vocab_size."
        )
    return Windows(tokens, config.data.length)


def _tokens(data: TextData, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """All documents, a blank line between them: [tokens] int32"""
    text = data.joined
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    encoded = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
    return np.fromiter(chain.from_iterable(encoded), dtype=np.int32)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte of UTF-8: for a new model that is given no tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=["input_ids", "attention_mask"])
