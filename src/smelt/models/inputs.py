"""The inputs that a network takes: which of them it needs, and fixed ones to compare two networks with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Batch = dict[str, Tensor]


def complete_inputs(network: PreTrainedModel, batch: Batch) -> Batch:
    """Add what a network needs beside the given inputs: of an encoder-decoder, the tokens of the decoder."""
    config = network.config
    if not config.is_encoder_decoder or "decoder_input_ids" in batch:
        return batch
    candidates = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    start = next((token for token in candidates if token is not None), 0)
    source = batch[network.main_input_name]
    if "input_ids" not in batch:  # audio: the decoder has no text to read
        return {**batch, "decoder_input_ids": torch.full((len(source), 4), start, device=source.device)}
    shifted = torch.cat([torch.full_like(source[:, :1], start), source[:, :-1]], dim=1)
    return {**batch, "decoder_input_ids": shifted}


def random_inputs(network: PreTrainedModel, batch: int = 2, length: int = 24) -> Batch:
    """Make fixed pseudo-random inputs that the network accepts."""
    config: Any = network.config
    generator = torch.Generator().manual_seed(0)
    name = network.main_input_name
    text = config.get_text_config()
    inputs: Batch = {}
    if name == "pixel_values" or (_vision(config) is not None and not _reads_text_alone(network)):
        vision = _vision(config) or config
        size = getattr(vision, "image_size", None) or 64
        height, width = (size, size) if isinstance(size, int) else size
        inputs["pixel_values"] = torch.randn(batch, vision.num_channels, height, width, generator=generator)
    elif name == "input_features":  # log-mel spectrogram
        frames = 2 * getattr(config, "max_source_positions", 50)  # two convolutions halve it
        inputs["input_features"] = torch.randn(batch, config.num_mel_bins, frames, generator=generator)
    elif name == "input_values":  # waveform
        inputs["input_values"] = torch.randn(batch, 4000, generator=generator)
    elif name == "observations":
        inputs["observations"] = torch.randn(batch, config.observation_size, generator=generator)
    if name == "input_ids":
        length = min(length, (getattr(text, "max_position_embeddings", None) or length + 2) - 2)
        ids = torch.randint(text.vocab_size, (batch, max(length, 1)), generator=generator)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return complete_inputs(network, inputs)


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", None)


def _reads_text_alone(network: PreTrainedModel) -> bool:
    """Return whether text without an image is a valid input: true of language models that also see."""
    return network.can_generate()
