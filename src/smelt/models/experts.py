"""Split fused mixture-of-experts layers: each expert becomes a module with ordinary linear layers.

transformers stores all experts of a layer in two 3-D tensors. Methods work on linear layers, so the tensors are split
once, when a network is built. The layer names inside an expert match the published checkpoints, so transformers can
load a saved model and fuses the experts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.models.families import FAMILIES, ExpertPaths


class Expert(nn.Module):
    """A gated feed-forward that processes the tokens routed to it."""

    def __init__(self, names: ExpertPaths, gate: nn.Module, up: nn.Module, down: nn.Module, activation: Any) -> None:
        super().__init__()
        self.names, self.activation = names, activation
        for name, layer in ((names.gate, gate), (names.up, up), (names.down, down)):
            self.add_module(name, layer)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in (self.names.gate, self.names.up, self.names.down))
        output: Tensor = down(self.activation(gate(hidden_states)) * up(hidden_states))
        return output


class SeparateExperts(nn.ModuleList):
    """Drop-in replacement for the fused experts. An expert that no token is routed to is not run."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)  # [tokens, hidden]
        for expert, indices in zip(self, self.routed_indices(top_k_index), strict=True):
            if len(indices):
                tokens = indices // top_k_index.shape[-1]
                weighted = expert(hidden_states[tokens]) * top_k_weights.flatten()[indices, None]
                output.index_add_(0, tokens, weighted.to(output.dtype))
        return output

    def routed_indices(self, top_k_index: Tensor) -> Sequence[Tensor]:
        """Return each expert's indices into the flattened `top_k_index` [tokens * top_k], in token order."""
        flat = top_k_index.flatten()
        return torch.argsort(flat, stable=True).split(torch.bincount(flat, minlength=len(self)).tolist())

    def tokens(self, top_k_index: Tensor) -> list[Tensor]:
        """Return the positions of the tokens routed to each expert, in the order it receives them."""
        return [indices // top_k_index.shape[-1] for indices in self.routed_indices(top_k_index)]


@torch.no_grad()
def split_experts(network: PreTrainedModel) -> PreTrainedModel:
    """Replace the fused experts of a network of a known family by separate ones, in place."""
    model_type = network.config.model_type
    paths = next((family.experts for family in FAMILIES if model_type in family.model_types), None)
    if paths is None:
        return network
    for path, module in list(network.named_modules()):
        if path.endswith(f".{paths.owner}") and not isinstance(module, SeparateExperts):
            parent, _, name = path.rpartition(".")
            setattr(network.get_submodule(parent), name, _split_fused(module, paths))
    return network


def _split_fused(fused: Any, names: ExpertPaths) -> SeparateExperts:
    experts = []
    for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):  # [2 * inner, hidden], [hidden, inner]
        gate, up, out = (_linear(weight, fused.down_proj.requires_grad) for weight in (*gate_up.chunk(2), down))
        experts.append(Expert(names, gate, up, out, fused.act_fn))
    return SeparateExperts(experts).train(fused.training)


def _linear(weight: Tensor, requires_grad: bool) -> nn.Linear:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(
        weight.clone(), requires_grad=requires_grad
    )  # own storage, so that it can be freed separately
    return layer
