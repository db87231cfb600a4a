"""Remove whole experts of a mixture together with their router rows, and restore the counts of a saved artifact.

Every layer may keep another number. The router goes on as its family defines it, over the experts that remain: where
it normalizes the weights of the chosen experts, it normalizes those of the remaining ones. Works on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Mixture
from smelt.models.config import EXPERT_COUNTS

_COUNTS = {*EXPERT_COUNTS, "out_features"}  # attributes of a router and of the block around it
_GROUPS = ("num_group", "n_group")  # of experts, among which a router chooses first


def keep_experts(network: nn.Module, mixture: Mixture, keep: Sequence[int]) -> None:
    """Keep the experts of a mixture at these current positions (ascending), and remove all others."""
    if list(keep) == list(range(mixture.num_experts)):
        return
    check_removable(network, mixture)
    if len(keep) < mixture.top_k:
        raise ModelError(
            f"{mixture.path} routes each token to {mixture.top_k} experts, so at least as many must stay, not "
            f"{len(keep)}."
        )
    kept = [mixture.kept[position] for position in keep]
    _keep_router_rows(mixture, keep)
    for module in (*mixture.router.modules(), _owner(network, mixture), mixture.module):
        for name in _COUNTS:
            if getattr(module, name, None) == mixture.num_experts:
                setattr(module, name, len(keep))
    removed = sorted(set(range(mixture.num_experts)) - set(keep), reverse=True)
    for position in removed:
        del mixture.module[position]  # renumbers those behind it
    config: Any = getattr(network, "config", None)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # transformers' load-balancing loss needs the same number in every layer
    _record(mixture, kept, mixture.original_experts)


@contextmanager
def without_expert(network: nn.Module, mixture: Mixture, expert: int) -> Iterator[None]:
    """Remove one expert inside the context, and put everything back afterwards."""
    modules = [*mixture.router.modules(), _owner(network, mixture), mixture.module]
    before = [(module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in modules]
    experts = dict(mixture.module._modules)
    try:
        keep_experts(network, mixture, [position for position in range(mixture.num_experts) if position != expert])
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            for name in set(vars(module)) - set(attributes):
                delattr(module, name)
            vars(module).update(attributes)
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        mixture.module._modules.clear()
        mixture.module._modules.update(experts)


def check_removable(network: nn.Module, mixture: Mixture) -> None:
    """Raise if no expert of the mixture can be removed."""
    for module in (mixture.router, _owner(network, mixture)):
        groups = next((value for name in _GROUPS if isinstance(value := getattr(module, name, None), int)), 1)
        if groups > 1:
            raise ModelError(
                f"the router of {mixture.path} chooses among {groups} groups of equal size before it chooses experts, "
                "so none can be removed; quantize the experts instead (gptq, rtn or hqq)."
            )


def restore_experts(anatomy: Anatomy, entries: Sequence[Mapping[str, Any]]) -> None:
    """Remove from a freshly built network what an artifact lacks; weights are loaded afterwards."""
    mixtures = {mixture.path: mixture for mixture in anatomy.mixtures}
    for entry in entries:
        mixture = mixtures[entry["mixture"]]
        if mixture.num_experts == entry["of"]:
            keep_experts(anatomy.network, mixture, entry["kept"])
        else:  # already built with this number: only record the original one
            _record(mixture, entry["kept"], entry["of"])


def checked_experts(anatomy: Anatomy, entries: Any, where: str) -> list[dict[str, Any]]:
    """Return the `experts` of a smelt.json after checking that every entry fits this network."""
    mixtures = {mixture.path: mixture for mixture in anatomy.mixtures}
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ModelError(f"{where}: the experts in smelt.json are not a list of mixtures.")
    paths = [entry.get("mixture") for entry in entries]
    if not all(isinstance(path, str) and path in mixtures for path in paths) or len(set(paths)) != len(paths):
        raise ModelError(f"{where}: the experts in smelt.json do not name the mixtures of this network.")
    for entry in entries:
        mixture, original, kept = mixtures[entry["mixture"]], entry.get("of"), entry.get("kept")
        numbers = isinstance(kept, list) and all(type(i) is int for i in kept) and type(original) is int
        fits = (
            numbers
            and kept == sorted(set(kept))
            and mixture.top_k <= len(kept) < original
            and kept[0] >= 0
            and kept[-1] < original
            and mixture.num_experts in (len(kept), original)
        )
        if not fits:
            raise ModelError(f"{where}: the experts of {entry['mixture']} in smelt.json do not fit this network.")
    return entries


def _keep_router_rows(mixture: Mixture, keep: Sequence[int]) -> None:
    """Keep the entries of the remaining experts in every tensor of the router: [experts, ...] or [1, experts]."""
    for module in mixture.router.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            rows = _rows(parameter.detach(), mixture.num_experts, keep)
            setattr(module, name, nn.Parameter(rows, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _rows(buffer, mixture.num_experts, keep))


def _rows(tensor: Tensor, num_experts: int, keep: Sequence[int]) -> Tensor:
    dimension = 0 if len(tensor) == num_experts else tensor.dim() - 1
    if tensor.shape[dimension] != num_experts:
        raise ModelError(f"a router has a tensor of shape {list(tensor.shape)}, without an entry per expert.")
    return tensor.index_select(dimension, torch.tensor(list(keep), device=tensor.device)).contiguous()


def _owner(network: nn.Module, mixture: Mixture) -> nn.Module:
    """Return the module that runs router and experts."""
    return network.get_submodule(mixture.path.rpartition(".")[0])


def _record(mixture: Mixture, kept: Sequence[int], original: int) -> None:
    mixture.module.smelt_kept_experts = tuple(kept)
    mixture.module.smelt_original_experts = original
