"""Small mixtures of experts with random weights, as transformers saves them and as Smelt loads them."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from smelt.models.load import load
from smelt.models.model import Model

HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS = 64, 48, 4, 2, 2
_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 99, "max_position_embeddings": 128, "num_experts_per_tok": CHOSEN,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_COMMON, "head_dim": 16, "intermediate_size": 80, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
}  # fmt: skip
_OLMOE: dict[str, Any] = {**_COMMON, "intermediate_size": INNER, "num_experts": EXPERTS}


def _build(network: Any, config: Any) -> PreTrainedModel:
    """Build a network with a config of its own: an engine sets the attention of the config that a network has."""
    built: PreTrainedModel = network(copy.deepcopy(config))
    return built


BUILDS: dict[str, Any] = {
    "mixtral": partial(
        _build, hf.MixtralForCausalLM, hf.MixtralConfig(**_COMMON, intermediate_size=INNER, num_local_experts=EXPERTS)
    ),
    "qwen3-moe": partial(_build, hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**_QWEN)),
    "qwen3-moe-dense-first": partial(_build, hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**_QWEN, mlp_only_layers=[0])),
    "olmoe": partial(_build, hf.OlmoeForCausalLM, hf.OlmoeConfig(**_OLMOE)),
    "olmoe-clipped": partial(_build, hf.OlmoeForCausalLM, hf.OlmoeConfig(**_OLMOE, clip_qkv=0.3)),
}
PLAIN = ("mixtral", "qwen3-moe", "olmoe")


def fused(name: str, *, starved: bool = False) -> PreTrainedModel:
    """Build the transformers network with decisive routers; `starved`: no token reaches expert 3 of block 1."""
    torch.manual_seed(0)
    network: PreTrainedModel = BUILDS[name]().eval()
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            if path.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn_like(parameter))
        if starved:
            _make_expert_unreachable(network)
    return network


def _make_expert_unreachable(network: PreTrainedModel) -> None:
    """Make the first residual channel a positive constant, with a large negative router weight."""
    network.get_input_embeddings().weight[:, 0] = 0.3
    for path, parameter in network.named_parameters():
        if path.endswith(("o_proj.weight", "down_proj.weight")):
            parameter[0] = 0
        elif path.endswith("experts.down_proj"):
            parameter[:, 0] = 0
    network.base_model.layers[-1].mlp.gate.weight[:, 0] = torch.tensor([0.0, 0.0, 0.0, -100.0])


def saved(name: str, folder: Path, **changes: bool) -> tuple[PreTrainedModel, Path]:
    network = fused(name, **changes)
    network.save_pretrained(folder)
    return network, folder


def loaded(name: str, folder: Path, **changes: bool) -> Model:
    return load(saved(name, folder, **changes)[1])


def ids(seed: int = 0, batch: int = 3, length: int = 20, padded: bool = False) -> dict[str, Tensor]:
    tokens = torch.randint(99, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, length - 5 :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def batches(count: int = 4, **settings: Any) -> list[dict[str, Tensor]]:
    return [ids(seed, **settings) for seed in range(count)]
