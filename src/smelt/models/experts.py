"""Split fused mixture-of-experts layers: each expert becomes a module with ordinary linear layers.

transformers stores all experts of a layer in two 3-D tensors. Methods work on linear layers, so the tensors are split
once, when a network is built. The layer names inside an expert match the published checkpoints, so transformers can
load a saved model and fuses the experts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.models.families import FAMILIES, ExpertPaths

Gating = Callable[[Tensor, Tensor], Tensor]  # outputs of gate and up projection -> inputs of the down projection


class Expert(nn.Module):
    """A gated feed-forward that processes the tokens routed to it."""

    def __init__(self, names: ExpertPaths, gate: nn.Module, up: nn.Module, down: nn.Module, gating: Gating) -> None:
        super().__init__()
        self.names, self.gating = names, gating
        for name, layer in ((names.gate, gate), (names.up, up), (names.down, down)):
            self.add_module(name, layer)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in (self.names.gate, self.names.up, self.names.down))
        output: Tensor = down(self.gating(gate(hidden_states), up(hidden_states)))
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


class StackedExperts(nn.ModuleList):
    """Drop-in replacement for fused experts that get the tokens of all experts as one tensor [experts * tokens, hidden]
    (Llama 4, which sets those of unchosen experts to zero)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        chunks = hidden_states.reshape(len(self), -1, hidden_states.shape[-1])
        return torch.cat([expert(chunk) for expert, chunk in zip(self, chunks, strict=True)])


@torch.no_grad()
def split_experts(network: PreTrainedModel) -> PreTrainedModel:
    """Replace all fused experts of a network by separate ones, in place."""
    for path, module in list(network.named_modules()):
        if _is_fused(module):
            parent, _, name = path.rpartition(".")
            setattr(network.get_submodule(parent), name, _split_fused(module, _names(network, path)))
    return network


def _is_fused(module: nn.Module) -> bool:
    """Return whether a module holds all experts of a layer in 3-D tensors that this module knows how to split."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    fused = isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter) and gate_up.dim() == down.dim() == 3
    return fused and getattr(module, "has_gate", True) and not getattr(module, "has_post_expert_norm", False)


def _names(network: PreTrainedModel, path: str) -> ExpertPaths:
    """Return the names of the layers inside an expert: those of published checkpoints, where a family names them."""
    types = {network.config.model_type, network.config.get_text_config().model_type}
    rows = [family.experts for family in FAMILIES if family.experts and types.intersection(family.model_types)]
    return next(
        (names for names in rows if path.endswith(f".{names.owner}")),
        ExpertPaths(path, "", gate="gate_proj", up="up_proj", down="down_proj", published=False),
    )


def _split_fused(fused: Any, names: ExpertPaths) -> nn.ModuleList:
    dispatched = hasattr(fused, "is_transposed")  # by the expert interface of transformers, with indices and weights
    transposed = getattr(fused, "is_transposed", True)  # [experts, in, out]
    interleaved = not getattr(fused, "is_concatenated", True)  # gate and up alternate
    gating, biases = _gating(fused, interleaved), getattr(fused, "has_bias", False)
    experts, trainable = [], fused.down_proj.requires_grad
    for index in range(len(fused.down_proj)):
        gate_up, down = fused.gate_up_proj[index], fused.down_proj[index]
        if transposed:
            gate_up, down = gate_up.T, down.T
        gate_up_bias = fused.gate_up_proj_bias[index] if biases else None
        halves = [slice(0, None, 2), slice(1, None, 2)] if interleaved else _halves(len(gate_up))
        gate, up = (
            _linear(gate_up[rows], None if gate_up_bias is None else gate_up_bias[rows], trainable) for rows in halves
        )
        out = _linear(down, fused.down_proj_bias[index] if biases else None, trainable)
        experts.append(Expert(names, gate, up, out, gating))
    for name, _ in list(fused.named_parameters(recurse=False)):
        setattr(fused, name, None)  # `gating` may keep the module
    return (SeparateExperts if dispatched else StackedExperts)(experts).train(fused.training)


def _halves(rows: int) -> list[slice]:
    return [slice(0, rows // 2), slice(rows // 2, rows)]


def _gating(fused: Any, interleaved: bool) -> Gating:
    """Return the activation of the experts, as a function of the outputs of gate and up projection."""
    own = getattr(type(fused), "_apply_gate", None)
    if own is None or own.__module__ == "transformers.integrations.moe":
        return partial(_activate, fused.act_fn)
    return partial(_activate_fused, fused, interleaved)


def _activate(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _activate_fused(fused: Any, interleaved: bool, gate: Tensor, up: Tensor) -> Tensor:
    gate_up = torch.stack([gate, up], dim=-1).flatten(-2) if interleaved else torch.cat([gate, up], dim=-1)
    inputs: Tensor = fused._apply_gate(gate_up)
    return inputs


def _linear(weight: Tensor, bias: Tensor | None, requires_grad: bool) -> nn.Linear:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    # Own storage, so that it can be freed separately.
    layer.weight = nn.Parameter(weight.contiguous().clone(), requires_grad=requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone(), requires_grad=requires_grad)
    return layer
