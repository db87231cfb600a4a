"""The model: a trained network, its tokenizer and the compression steps applied to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.feature_extractor import FeatureExtractor
from smelt.models.image_processor import FILE, ImageProcessor
from smelt.models.kv_cache import KVCacheFormat, QuantizedKVCache
from smelt.models.program_network import outline_of

_TASK_OF_HEAD = {
    "ForCausalLM": "language",
    "LMHeadModel": "language",
    "ForSequenceClassification": "classification",
    "ForImageClassification": "images",
    "ForMaskedLM": "masked-language",
    "ForCTC": "speech",
    "Policy": "policy",
}


@dataclass
class Model:
    """A network with its tokenizer.

    `history` lists the applied recipe steps; `kv` is the KV cache format if it differs from the network's dtype;
    `image_processor` prepares images for a network that reads them.
    """

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    source: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    kv: KVCacheFormat | None = None
    image_processor: ImageProcessor | None = None
    feature_extractor: FeatureExtractor | None = None  # of a speech model

    @property
    def anatomy(self) -> Anatomy:
        """The structural view of the network in its current state."""
        return anatomy_of(self.network)

    @property
    def task(self) -> str:
        """The task of the head: language, classification, images, masked-language, sequence-to-sequence, speech,
        policy, or embedding (no head)."""
        name = type(outline_of(self.network)).__name__
        if name.endswith("ForConditionalGeneration"):  # a vision-language model continues text like a language model
            if not self.network.config.is_encoder_decoder:
                return "language"
            return "sequence-to-sequence" if self.network.main_input_name == "input_ids" else "speech"
        return next((task for head, task in _TASK_OF_HEAD.items() if name.endswith(head)), "embedding")

    @property
    def device(self) -> torch.device:
        return next(itertools.chain(self.network.parameters(), self.network.buffers())).device

    def prepare_images(self, images: Sequence[Any]) -> Tensor:
        """Convert PIL images to pixel values [images, channels, height, width] on CPU."""
        config = self.network.config
        channels = int(getattr(getattr(config, "vision_config", config), "num_channels", 3))
        return self.check_image_processor()(images, channels)

    def check_image_processor(self) -> ImageProcessor:
        """Return the image processor; raise if the model has none."""
        if self.image_processor is None:
            raise ModelError(
                f"{self.source or 'this model'} has no {FILE}, which says how images are resized and normalized; copy "
                "that file from the model it was made from."
            )
        return self.image_processor

    def parameters(self) -> list[nn.Parameter]:
        return list(self.network.parameters())

    def new_cache(self) -> QuantizedKVCache | None:
        """Return a KV cache to pass as `past_key_values` for one batch, or None if the network creates its own."""
        return None if self.kv is None else self.kv.cache(self.network.config)

    @torch.no_grad()
    def generate(self, prompt: str, max_new_tokens: int = 32) -> str:
        """Return the greedy continuation of the prompt."""
        if self.task != "language" or self.tokenizer is None:
            raise ModelError(
                f"{self.source or 'this model'} cannot generate text: it has no language head or tokenizer."
            )
        inputs = self.tokenizer(prompt, return_tensors="pt").to(self.device)
        output: Tensor = self.network.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, past_key_values=self.new_cache()
        )
        return str(self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
