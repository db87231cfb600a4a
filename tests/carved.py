"""Tiny networks whose feed-forwards are carved into experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smelt.models.anatomy_builder import anatomy_of
from smelt.models.carved_experts import LayerChannels, carve
from smelt.models.expert_router import ExpertRouter, RouterConfig
from smelt.models.model import Model
from tests.tiny import BUILDS

SHARED, OWN = tuple(range(0, 48, 3)), (tuple(range(1, 48, 6)), tuple(range(4, 48, 6)), tuple(range(2, 48, 6)))
CHANNELS = LayerChannels(SHARED, OWN)  # 16 shared channels, and 8 for each of 3 experts


def router(
    network: Any, experts: int = 3, *, width: int = 16, layers: int = 2, window: int = 4, seed: int = 0
) -> ExpertRouter:
    config = RouterConfig(network.config.vocab_size, experts, width, layers, window)
    built = ExpertRouter(config)
    built.init_weights(network.get_input_embeddings().weight, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        built.embed_tokens.weight.mul_(4)  # so that experts alternate
    return built.eval()


def carved(
    family: str = "llama", channels: Sequence[LayerChannels] | None = None, experts: int = 3, **sizes: int
) -> Model:
    network = BUILDS[family]()
    anatomy = anatomy_of(network)
    carve(anatomy, channels or [CHANNELS] * len(anatomy.blocks), router(network, experts, **sizes))
    return Model(network)


def ids(batch: int = 3, length: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(seed))
