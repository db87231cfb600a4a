"""Rotations that do not change a network's function (Ashkboos et al., 2024, QuaRot).

A pre-norm network reads its residual stream through norms only. With their weights folded into the layers that read
them, a norm commutes with an orthogonal matrix R: every row written to the stream is multiplied by R, and so is every
layer that reads it (W R, as x R (W R)^T = x W^T). A LayerNorm also subtracts the mean, and commutes with those R that
map the vector of ones to itself: we choose such an R, whereas the paper folds the subtraction into the layers that
write the stream and replaces the module. Values and attention output have a second rotation per block, shared by all
heads. Everything is computed in float64 and cast once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.compression.calibration.block_inputs import on_device
from smelt.errors import ModelError
from smelt.kernels.hadamard import hadamard_matrix, hadamard_order
from smelt.models.anatomy import Anatomy, Block, Part
from smelt.models.quantized import quantized_layers
from smelt.models.quantized_network import linear_weight

ROWS_PER_CHUNK = 8192  # of an embedding, converted to float64 at a time


@dataclass(frozen=True)
class Rotations:
    """Orthogonal matrices in float64: of the residual stream, and of the values by block index."""

    stream: Tensor | None = None  # [hidden, hidden]
    values: Mapping[int, Tensor] = field(default_factory=dict)  # [head_dim, head_dim] each
    facts: Mapping[str, Any] = field(default_factory=dict)  # about how they were chosen


def check_rotatable(anatomy: Anatomy, name: str) -> None:
    """Raise, before any work, if the residual stream of this network cannot be rotated."""
    if quantized_layers(anatomy.network):
        raise ModelError("this model is quantized already; rotate the model it was made from.")
    if anatomy.residual == "post":
        raise ModelError(f"{name} needs a pre-norm network; this one is post-norm: it normalizes the residual stream.")
    if anatomy.residual == "other" or any(block.other_layers for block in anatomy.blocks):
        raise ModelError(
            f"{name} needs blocks of attention and feed-forward that read one norm each; use gptq or awq for "
            f"{anatomy.family.name} networks."
        )
    head = anatomy.network.get_output_embeddings()
    if not isinstance(head, nn.Linear) or anatomy.final_norm is None or not anatomy.embeddings:
        raise ModelError(f"{name} rotates language models with a linear head, and this network is not one.")
    if any(part.pre_norm is None for part in anatomy.parts):
        raise ModelError(f"{name} folds the weights of norms into layers, which it cannot for {anatomy.family.name}.")
    hidden = anatomy.hidden_size
    if {table.shape[1] for table in (*_tables(anatomy), head.weight)} != {hidden}:
        raise ModelError(f"{name} needs embeddings as wide as the residual stream ({hidden}); here they are projected.")


def _tables(anatomy: Anatomy) -> list[Any]:
    """Return the weights of the embeddings [rows, hidden]."""
    return [table.weight for table in anatomy.embeddings]


def has_layer_norms(anatomy: Anatomy) -> bool:
    return isinstance(anatomy.final_norm, nn.LayerNorm)


def random_rotations(anatomy: Anatomy, seed: int, *, stream: bool = True, values: bool = True) -> Rotations:
    """Return a random rotation of the residual stream, and one of the values per block with attention."""
    generator = torch.Generator().manual_seed(seed)
    hidden = anatomy.hidden_size
    rotation = random_rotation(hidden, generator, keeps_mean=has_layer_norms(anatomy)) if stream else None
    heads = [part for part in anatomy.parts if part.kind == "heads" and part.units and part.values is not None]
    matrices = {part.block: random_rotation(part.head_dim, generator) for part in heads} if values else {}
    return Rotations(rotation, matrices)


def random_rotation(size: int, generator: torch.Generator, *, keeps_mean: bool = False) -> Tensor:  # [size, size]
    """Return a Hadamard matrix with random signs, or a random orthogonal matrix if no Hadamard matrix has this order.

    With `keeps_mean` the vector of ones is mapped to itself, so that rotating a vector keeps its mean.
    """
    if hadamard_order(size) is None:
        return _random_orthogonal(size, generator, keeps_mean)
    matrix = hadamard_matrix(size)
    before, after = _signs(size, generator), _signs(size, generator)
    if not keeps_mean:
        return before[:, None] * matrix * after
    matrix = matrix * matrix[:, :1].sign()  # the first column is constant: ones map to the first basis vector
    after[0] = 1
    return (matrix * after) @ matrix.T


def _signs(size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (size,), generator=generator).double() * 2 - 1


def _random_orthogonal(size: int, generator: torch.Generator, keeps_mean: bool) -> Tensor:
    """Return the product of two uniformly random orthogonal matrices (QR of Gaussian ones). With `keeps_mean` the first
    column of both is constant, so that the vector of ones maps to itself."""
    factors = []
    for _ in range(2):
        gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64)
        if keeps_mean:
            gaussian[:, 0] = 1
        orthogonal, upper = torch.linalg.qr(gaussian)
        factors.append(orthogonal * upper.diagonal().sign())
    return factors[0] @ factors[1].T


@torch.no_grad()
def rotate_network(anatomy: Anatomy, rotations: Rotations, device: torch.device | None = None) -> dict[str, Any]:
    """Rotate in place, one block at a time on `device`; return facts, such as the parameters added by untying."""
    added = 0
    if rotations.stream is not None:
        _check_norms(anatomy)
        added = untie(anatomy.network)
        for table in _tables(anatomy):
            _rotate_rows(table, rotations.stream)
    for block in anatomy.blocks:
        with on_device(block.module, device), _in_float64(block.module):
            _rotate_block(block, rotations)
    if rotations.stream is not None:
        _rotate_head(anatomy, rotations.stream)
    return {
        "stream_rotated": rotations.stream is not None,
        "blocks_with_rotated_values": len(rotations.values),
        "head_untied": added > 0,
        "parameters_added": added,
    }


def untie(network: PreTrainedModel) -> int:
    """Untie the head from the input embedding; return the number of parameters added."""
    head, table = network.get_output_embeddings(), network.get_input_embeddings()
    network.config.tie_word_embeddings = False  # recorded in the artifact
    if head.weight.data_ptr() != table.weight.data_ptr():
        return 0
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    head_paths = {name for name, module in network.named_modules() if module is head}
    tied: dict[str, str] = getattr(network, "all_tied_weights_keys", {})
    network.all_tied_weights_keys = {
        key: source for key, source in tied.items() if key.rpartition(".")[0] not in head_paths
    }
    return int(head.weight.numel())


def _rotate_block(block: Block, rotations: Rotations) -> None:
    device = block.parts[0].output.device
    if rotations.stream is not None:
        rotation = rotations.stream.to(device)
        for norm, consumers in block.norm_consumers:
            _fold_norm(norm, consumers, rotation)
            for consumer in consumers:
                weight = linear_weight(consumer)
                weight.copy_(weight @ rotation)
        for part in block.parts:
            for tensor in (part.output.weight, part.output.bias):  # [hidden, in], [hidden]
                if tensor is not None:
                    tensor.copy_(rotation.T @ tensor)
    for part in block.parts:
        if part.kind == "heads" and part.block in rotations.values:
            _rotate_values(part, rotations.values[part.block].to(device))


def _fold_norm(norm: Any, consumers: list[Any], rotation: Tensor) -> None:
    """Fold a norm's weight into its consumers. Its bias is folded into their biases; if one has none, the norm keeps
    its bias, divided by the weight and rotated."""
    bias = getattr(norm, "bias", None)
    if bias is not None:
        if all(consumer.bias is not None for consumer in consumers):
            for consumer in consumers:
                consumer.bias.add_(linear_weight(consumer) @ bias)
            bias.zero_()
        else:
            bias.copy_(torch.where(bias == 0, 0.0, bias / norm.weight) @ rotation)
    if norm.weight is not None:
        for consumer in consumers:
            linear_weight(consumer).mul_(norm.weight)
        norm.weight.fill_(1.0)


def _rotate_values(part: Part, rotation: Tensor) -> None:
    """Rotate the values of every head by one matrix, and undo it in the attention output projection."""
    values, output = part.values, part.output.weight
    assert values is not None
    for tensor in (values.weight, values.bias):  # [units * head_dim, ...]
        if tensor is not None:
            rows = tensor.unflatten(0, (part.units, part.head_dim)).transpose(0, 1)
            tensor.copy_((rotation.T @ rows.flatten(1)).view_as(rows).transpose(0, 1).flatten(0, 1))
    output.copy_((output.unflatten(1, (-1, part.head_dim)) @ rotation).flatten(1))


def _rotate_rows(table: Tensor, rotation: Tensor) -> None:
    rotation = rotation.to(table.device)
    for rows in table.split(ROWS_PER_CHUNK):
        rows.copy_(rows.double() @ rotation)


def _rotate_head(anatomy: Anatomy, rotation: Tensor) -> None:
    head, norm = anatomy.network.get_output_embeddings(), anatomy.final_norm
    with _in_float64(head), _in_float64(norm):
        rotation = rotation.to(head.weight.device)
        _fold_norm(norm, [head], rotation)
        head.weight.copy_(head.weight @ rotation)


def _check_norms(anatomy: Anatomy) -> None:
    """Raise if a norm must keep its bias where its weight is zero, which would be a division by zero."""
    pairs = [pair for block in anatomy.blocks for pair in block.norm_consumers]
    for norm, consumers in [*pairs, (anatomy.final_norm, [anatomy.network.get_output_embeddings()])]:
        bias = getattr(norm, "bias", None)
        if bias is None or all(consumer.bias is not None for consumer in consumers):
            continue
        if bool(((norm.weight == 0) & (bias != 0)).any()):
            raise ModelError("a norm has a bias where its weight is zero; no rotation can be folded into it.")


@contextmanager
def _in_float64(module: Any) -> Iterator[None]:
    """Convert the parameters to float64 inside the context, and back to their dtypes afterwards."""
    dtypes = [(parameter, parameter.dtype) for parameter in module.parameters()]
    for parameter, _ in dtypes:
        parameter.data = parameter.data.double()
    try:
        yield
    finally:
        for parameter, dtype in dtypes:
            parameter.data = parameter.data.to(dtype)
