"""Batch norms: normalize by the batch without training, and fold them into the layers before them.

In inference a batch norm is an affine function of each channel, which that layer can compute. A folded norm leaves a
`FoldedNorm` in its place, so that an artifact can say which ones are gone and which layers got their biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.models.finite import is_finite
from smelt.models.quantized_network import replace_module

Batch = dict[str, Tensor]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Linear)
_MAX_RELATIVE_CHANGE = 1e-4  # of the outputs; float32 gives 1e-6
_MAX_ROUNDING_ERRORS = 16  # in half precision, whose weights are rounded again: the change in units of the last place


class FoldedNorm(nn.Identity):
    """Stands where a batch norm was before it was folded into the layer at this path."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer


def batch_norms(network: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norms with running statistics, by path."""
    return {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, BATCH_NORMS) and module.running_mean is not None
    }


@contextmanager
def batch_statistics(network: nn.Module) -> Iterator[None]:
    """Normalize by the statistics of the batch inside the context, as in training, but keep the running ones."""
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.training) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.train()
    try:
        yield
    finally:
        for norm, (momentum, training) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.train(training)


@torch.no_grad()
def fold_batch_norms(network: PreTrainedModel, inputs: Batch) -> dict[str, str]:
    """Fold every batch norm that directly follows a convolution or linear layer into it, in place.

    Which follows which is found by running `inputs`. Return the paths of the layers by those of the folded norms, which
    become `FoldedNorm`: `w' = w * gamma / sqrt(var + eps)`, `b' = (b - mean) * gamma / sqrt(var + eps) + beta`.
    """
    network.eval()
    with _no_tf32():  # its rounding of weights would look like an error of the fold
        before, pairs = _run_and_pair(network, inputs)
        if not is_finite(before):
            raise ModelError("the network computes NaN or infinity; check its weights and its inputs.")
        for norm_path, layer_path in pairs.items():
            _fold(network.get_submodule(layer_path), network.get_submodule(norm_path))
            replace_module(network, norm_path, FoldedNorm(layer_path))
        after: Tensor = network(**inputs)[0]
    change = (after - before).abs().max() / before.abs().max().clamp(min=1e-12)
    if not change <= max(_MAX_RELATIVE_CHANGE, _MAX_ROUNDING_ERRORS * torch.finfo(after.dtype).eps):
        raise ModelError(
            f"folding the batch norms changed the outputs by {change:.1e}: something else reads the outputs of a "
            f"convolution before its batch norm, such as {next(iter(pairs.values()), 'none')}."
        )
    return pairs


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Multiply float32 on a GPU in full precision inside the context; PyTorch's convolutions use TF32 by default."""
    settings: Any = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [each.allow_tf32 for each in settings]
    for each in settings:
        each.allow_tf32 = False
    try:
        yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.allow_tf32 = value


def folded_norms(network: nn.Module) -> dict[str, str]:
    """Return the paths of the layers by those of the batch norms that were folded into them."""
    return {path: module.layer for path, module in network.named_modules() if isinstance(module, FoldedNorm)}


def restore_folded_norms(network: nn.Module, entries: Any, where: str) -> None:
    """Remove the batch norms of a freshly built network that were folded, and give their layers biases.

    `entries`, as from `folded_norms`, come from a file and are checked first.
    """
    modules = dict(network.named_modules())
    if not isinstance(entries, dict) or not all(
        isinstance(layer, str) and _fits(modules.get(norm), modules.get(layer)) for norm, layer in entries.items()
    ):
        raise ModelError(f"{where}: the folded batch norms in smelt.json do not fit the layers of this network.")
    if len(set(entries.values())) != len(entries):
        raise ModelError(f"{where}: smelt.json folds two batch norms into one layer.")
    for norm_path, layer_path in entries.items():
        layer: Any = modules[layer_path]
        if layer.bias is None:
            layer.bias = nn.Parameter(layer.weight.new_empty(len(layer.weight)), requires_grad=False)
        replace_module(network, norm_path, FoldedNorm(layer_path))


def _fits(norm: nn.Module | None, layer: nn.Module | None) -> bool:
    fits = isinstance(norm, BATCH_NORMS) and isinstance(layer, _FOLDABLE)
    return fits and norm.num_features == len(layer.weight)  # type: ignore[union-attr, arg-type]


def _run_and_pair(network: PreTrainedModel, inputs: Batch) -> tuple[Tensor, dict[str, str]]:
    """Return the outputs, and the paths of the layers whose outputs batch norms read, by those of the norms."""
    produced: list[tuple[Tensor, str]] = []  # keeps the tensors, so that no other gets their address
    pairs: dict[str, str] = {}
    calls: dict[str, int] = {}

    def after(path: str) -> object:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            calls[path] = calls.get(path, 0) + 1
            produced.append((output, path))

        return hook

    def before(path: str) -> object:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            source = next((layer for output, layer in produced if output is args[0]), None)
            if source is not None:
                pairs[path] = source

        return hook

    handles = [
        module.register_forward_hook(after(path))  # type: ignore[arg-type]
        for path, module in network.named_modules()
        if isinstance(module, _FOLDABLE)
    ]
    handles += [norm.register_forward_pre_hook(before(path)) for path, norm in batch_norms(network).items()]  # type: ignore[arg-type]
    try:
        outputs: Tensor = network(**inputs)[0]
    finally:
        for handle in handles:
            handle.remove()
    return outputs, {norm: layer for norm, layer in pairs.items() if calls[layer] == 1}


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    assert isinstance(layer, _FOLDABLE) and isinstance(norm, BATCH_NORMS)
    assert norm.running_mean is not None and norm.running_var is not None
    weight = layer.weight.double()
    mean, deviation = norm.running_mean.double(), (norm.running_var.double() + norm.eps).sqrt()
    scale = (torch.ones_like(mean) if norm.weight is None else norm.weight.double()) / deviation
    shift = torch.zeros_like(mean) if norm.bias is None else norm.bias.double()
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.double()
    layer.weight.copy_(weight * scale.reshape(-1, *[1] * (weight.dim() - 1)))
    layer.bias = nn.Parameter(((bias - mean) * scale + shift).to(layer.weight.dtype), requires_grad=False)
