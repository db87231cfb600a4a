"""Small random networks of every family, for exactness tests, never for quality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from smelt.models.all_attention import AllAttentionConfig, AllAttentionForCausalLM

Build = Callable[[], PreTrainedModel]

ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8}

NO_HEAD_DIM = {name: value for name, value in DECODER.items() if name != "head_dim"}


def build_network(cls: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    network = cls(config).eval()
    with torch.no_grad():  # biases and norms away from 0 and 1, so that failing to slice one shows
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in network.named_buffers():
            if "running" in name:
                buffer.add_(0.3 * torch.rand_like(buffer))
    return network


BUILDS: dict[str, Build] = {
    "bert": lambda: build_network(hf.BertForSequenceClassification, hf.BertConfig(**ENCODER, num_labels=2)),
    "roberta": lambda: build_network(hf.RobertaForSequenceClassification, hf.RobertaConfig(**ENCODER, num_labels=2)),
    "distilbert": lambda: build_network(
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=48, vocab_size=99, num_labels=2),
    ),
    "mpnet": lambda: build_network(hf.MPNetForSequenceClassification, hf.MPNetConfig(**ENCODER, num_labels=2)),
    "vit": lambda: build_network(
        hf.ViTForImageClassification,
        hf.ViTConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
            image_size=32, patch_size=8,
        ),
    ),
    "gpt2": lambda: build_network(
        hf.GPT2LMHeadModel, hf.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_inner=48, vocab_size=99, n_positions=128)
    ),
    "opt": lambda: build_network(
        hf.OPTForCausalLM,
        hf.OPTConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=48, vocab_size=99,
            word_embed_proj_dim=32, max_position_embeddings=128,
        ),
    ),
    "opt-post-norm": lambda: build_network(
        hf.OPTForCausalLM,
        hf.OPTConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=48, vocab_size=99,
            word_embed_proj_dim=32, max_position_embeddings=128, do_layer_norm_before=False,
        ),
    ),
    "llama": lambda: build_network(hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER)),
    "llama-tied": lambda: build_network(hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "mistral": lambda: build_network(hf.MistralForCausalLM, hf.MistralConfig(**DECODER)),
    "qwen2": lambda: build_network(hf.Qwen2ForCausalLM, hf.Qwen2Config(**NO_HEAD_DIM)),
    "qwen3": lambda: build_network(hf.Qwen3ForCausalLM, hf.Qwen3Config(**DECODER)),
    "all-attention": lambda: build_network(
        AllAttentionForCausalLM,
        AllAttentionConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_persistent_vectors=6, vocab_size=99,
            max_position_embeddings=128,
        ),
    ),
    "resnet": lambda: build_network(
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 24], depths=[2, 2], layer_type="basic", num_labels=5),
    ),
    "resnet-bottleneck": lambda: build_network(
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[32, 64], depths=[2, 2], layer_type="bottleneck", num_labels=5),
    ),
}  # fmt: skip

DECODERS = ("gpt2", "opt", "opt-post-norm", "llama", "llama-tied", "mistral", "qwen2", "qwen3", "all-attention")
IMAGES = ("vit", "resnet", "resnet-bottleneck")
TRANSFORMERS = tuple(name for name in BUILDS if not name.startswith("resnet"))


def inputs(name: str, batch: int = 3, length: int = 11, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return a batch for a family; text encoders get padding in one row."""
    generator = torch.Generator().manual_seed(seed)
    if name in IMAGES:
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}
    ids = torch.randint(3, 99, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if name not in DECODERS:
        mask[0, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def labeled(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return the same batch with labels."""
    batch = inputs(name, seed=seed)
    batch["labels"] = batch["input_ids"].clone() if name in DECODERS else torch.tensor([0, 1, 1])
    return batch
