"""Make the residual stream of a pre-norm network narrower: every matrix that reads or writes it loses dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy


def check_sliceable(anatomy: Anatomy, what: str) -> None:
    """Raise if the residual stream of this network cannot become narrower."""
    network = anatomy.network
    norm, config = anatomy.final_norm, network.config
    if norm is None or not type(norm).__name__.endswith("RMSNorm") or isinstance(norm, nn.LayerNorm):
        raise ModelError(
            f"{what} needs RMSNorm, as Llama, Mistral, Qwen2 and Qwen3 have; {config.model_type} networks have another "
            "norm."
        )
    if config.get_text_config() is not config or any(part.mixture is not None for part in anatomy.parts):
        raise ModelError(f"{what} needs a dense language model; use a method that removes heads or channels.")


def stream_parameters(anatomy: Anatomy) -> int:
    """Return the parameters of the blocks that one dimension of the residual stream takes."""
    total = 0
    for block in anatomy.blocks:
        total += len(block.norm_consumers)  # weights of norms
        for _, consumers in block.norm_consumers:
            total += sum(int(consumer.weight.shape[0]) for consumer in consumers)
        for part in block.parts:
            total += part.output.in_features + (part.output.bias is not None)
    return total


@torch.no_grad()
def slice_stream(anatomy: Anatomy, size: int) -> None:
    """Keep the first dimensions of the residual stream; norms must have weights of one, folded into what reads them.

    A norm divides by the root of the mean square, over fewer dimensions now; its weight makes up for that.
    """
    network, config = anatomy.network, anatomy.network.config
    before, head_dim = anatomy.hidden_size, next(part.head_dim for part in anatomy.parts if part.kind == "heads")
    correction = math.sqrt(before / size)
    norms = []
    for block in anatomy.blocks:
        for norm, consumers in block.norm_consumers:
            norms.append(norm)
            for consumer in consumers:
                _keep(consumer, "weight", consumer.weight[:, :size])
                consumer.in_features = size
        for part in block.parts:
            module = part.output.module
            _keep(module, "weight", module.weight[:size])
            if module.bias is not None:
                _keep(module, "bias", module.bias[:size])
            module.out_features = size
    assert anatomy.final_norm is not None
    for norm in (*norms, anatomy.final_norm):
        _keep(norm, "weight", norm.weight[:size] * correction)
    tables: Any = anatomy.embeddings
    for table in tables:
        _keep(table, "weight", table.weight[:, :size])
        table.embedding_dim = size
    head: Any = network.get_output_embeddings()
    _keep(head, "weight", head.weight[:, :size])
    head.in_features = size
    for (
        module
    ) in network.modules():  # relative to a mean over fewer dimensions; others have the same field of the config
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= before / size
    config.rms_norm_eps *= before / size
    config.head_dim = head_dim  # no longer the hidden size divided by the heads
    config.hidden_size = size


def _keep(module: Any, name: str, tensor: Tensor) -> None:
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(tensor.detach().contiguous().clone(), requires_grad=old.requires_grad))
