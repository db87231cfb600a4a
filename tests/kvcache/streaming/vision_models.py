"""Small vision-language models with random weights, and frames for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import Build, build_network

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 99, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
TOWER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
TOKENS = {"image_token_id": 97, "video_token_id": 98}


def qwen2_vl(sections: list[int]) -> PreTrainedModel:
    """Build a Qwen2-VL model whose four rotary angles are split this way over time, rows and columns."""
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = {**TEXT, "rope_parameters": {**ROPE, "mrope_section": sections}}
    config = hf.Qwen2VLConfig(vision_config=vision, text_config=text, **TOKENS, vision_start_token_id=96)
    return build_network(hf.Qwen2VLForConditionalGeneration, config)


def _qwen2_5_vl() -> PreTrainedModel:
    vision = {
        "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    text = {**TEXT, "rope_parameters": ROPE}
    config = hf.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **TOKENS, vision_start_token_id=96)
    return build_network(hf.Qwen2_5_VLForConditionalGeneration, config)


def _llava_onevision() -> PreTrainedModel:
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=hf.Qwen2Config(**TEXT),
        image_token_index=97,
        video_token_index=98,
        image_grid_pinpoints=[[32, 32]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return build_network(hf.LlavaOnevisionForConditionalGeneration, config)


def llava(config: Any, network: Any) -> PreTrainedModel:
    """Build a model of the LLaVA family from its classes."""
    return build_network(
        network,
        config(
            vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
            text_config=hf.LlamaConfig(**TEXT),
            image_token_index=97,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
    )


def _smolvlm() -> PreTrainedModel:
    config = hf.SmolVLMConfig(
        vision_config=TOWER, text_config=hf.LlamaConfig(**TEXT), image_token_id=97, scale_factor=2, pad_token_id=0
    )
    return build_network(hf.SmolVLMForConditionalGeneration, config)


SEEING: dict[str, Build] = {
    "qwen2-vl": lambda: qwen2_vl([1, 1, 2]),
    "qwen2.5-vl": _qwen2_5_vl,
    "llava-onevision": _llava_onevision,
    "llava": lambda: llava(hf.LlavaConfig, hf.LlavaForConditionalGeneration),
    "smolvlm": _smolvlm,
}
JOINED = {"qwen2-vl": 2, "qwen2.5-vl": 2, "llava-onevision": 1, "llava": 1, "smolvlm": 1}  # frames merged into one
PATCHES = {
    "qwen2-vl": 16,
    "qwen2.5-vl": 16,
    "llava-onevision": 4,
    "llava": 16,
    "smolvlm": 4,
}  # of 32 x 32 pixels


def film(frames: int, seed: int = 0) -> Tensor:
    """Return noise in which each frame differs a little from the one before. [frames, 3, 32, 32]"""
    generator = torch.Generator().manual_seed(seed)
    still = torch.randn(1, 3, 32, 32, generator=generator)
    return still + 0.5 * torch.randn(frames, 3, 32, 32, generator=generator)
