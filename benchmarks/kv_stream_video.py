"""A small vision-language model with random weights, and a video for it: a still background and one moving square."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration

SIDE = 56  # pixels
SQUARE = 14
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 4096, "rope_parameters": _ROPE,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7}


def small_network(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2VLConfig(
        text_config=_TEXT, vision_config=_VISION, image_token_id=253, video_token_id=254, vision_start_token_id=252
    )
    return Qwen2VLForConditionalGeneration(config).eval()


def film(first: int, count: int, seed: int) -> Tensor:
    """Return frames from this one on: [count, 3, SIDE, SIDE]"""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(3, SIDE, SIDE, generator=generator).repeat(count, 1, 1, 1)
    for frame in range(count):
        offset = (first + frame) % (SIDE - SQUARE)
        frames[frame, :, offset : offset + SQUARE, offset : offset + SQUARE] = 2.0
    return frames
