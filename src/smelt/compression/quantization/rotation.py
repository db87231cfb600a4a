"""Rotations that leave a network's function as it is (Ashkboos et al., 2024, QuaRot).

A pre-norm network reads its residual stream through norms only. With their weights folded into the layers that read
them, a norm commutes with an orthogonal matrix R: every row that enters the stream is multiplied by R, every layer that
reads it by R too (W R, as x R (W R)^T = x W^T). A LayerNorm also subtracts the mean, and commutes with those R that map
the vector of ones to itself: there R is one of them, where the paper folds the subtraction into what writes the stream
and exchanges the module. Values and the attention output carry a second rotation a block, the same for all heads.
Everything is computed in float64 and cast once.
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
from smelt.models.quantized import linear_weight, quantized_layers

ROWS = 8192  # of an embedding that are in float64 at a time


@dataclass(frozen=True)
class Rotations:
    """Orthogonal matrices, float64: of the residual stream, and of the values of blocks (by their index)."""

    stream: Tensor | None = None  # [hidden, hidden]
    values: Mapping[int, Tensor] = field(default_factory=dict)  # [head_dim, head_dim] each
    facts: Mapping[str, Any] = field(default_factory=dict)  # how they were found


def check_rotatable(anatomy: Anatomy, name: str) -> None:
    """Refuse, before any work, a network whose stream cannot be rotated."""
    if quantized_layers(anatomy.network):
        raise ModelError("this model is quantised already; rotate the model it was made from.")
    if anatomy.residual == "post":
        raise ModelError(f"{name} needs norms before the layers; this network norms the stream itself (post-norm).")
    head = anatomy.network.get_output_embeddings()
    if not isinstance(head, nn.Linear) or anatomy.final_norm is None or not anatomy.embeddings:
        raise ModelError(f"{name} rotates language models with a linear head, and this network is none.")
    hidden = anatomy.parts[0].output.out_features
    if {table.shape[1] for table in (*_tables(anatomy), head.weight)} != {hidden}:
        raise ModelError(f"{name} needs embeddings as wide as the residual stream ({hidden}); here they are projected.")


def _tables(anatomy: Anatomy) -> list[Any]:
    """The embeddings' weights [rows, hidden]."""
    return [table.weight for table in anatomy.embeddings]


def has_layer_norms(anatomy: Anatomy) -> bool:
    return isinstance(anatomy.final_norm, nn.LayerNorm)


def random_rotations(anatomy: Anatomy, seed: int, *, stream: bool = True, values: bool = True) -> Rotations:
    """A random rotation of the stream, and one of the values of every block that has an attention."""
    generator = torch.Generator().manual_seed(seed)
    hidden = anatomy.parts[0].output.out_features
    turned = random_rotation(hidden, generator, keeps_mean=has_layer_norms(anatomy)) if stream else None
    heads = [part for part in anatomy.parts if part.kind == "heads" and part.units and not part.clipped]
    matrices = {part.block: random_rotation(part.head_dim, generator) for part in heads} if values else {}
    return Rotations(turned, matrices)


def random_rotation(size: int, generator: torch.Generator, *, keeps_mean: bool = False) -> Tensor:  # [size, size]
    """A Hadamard matrix between random signs, or any orthogonal matrix where there is none of that order.

    With `keeps_mean` the vector of ones is mapped to itself: the mean of a rotated vector is the mean it had.
    """
    if hadamard_order(size) is None:
        return _random_orthogonal(size, generator, keeps_mean)
    matrix = hadamard_matrix(size)
    before, after = _signs(size, generator), _signs(size, generator)
    if not keeps_mean:
        return before[:, None] * matrix * after
    matrix = matrix * matrix[:, :1].sign()  # the first column is constant: the ones reach the first place only
    after[0] = 1
    return (matrix * after) @ matrix.T


def _signs(size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (size,), generator=generator).double() * 2 - 1


def _random_orthogonal(size: int, generator: torch.Generator, keeps_mean: bool) -> Tensor:
    """QR of Gaussian matrices, uniform over orthogonal ones; with the ones as first column of both, they map to it."""
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
    """Rotate in place, one block at a time on `device`; the facts say what a tied head's own weight adds."""
    added = 0
    if rotations.stream is not None:
        _check_norms(anatomy)
        added = untie(anatomy.network)
        for table in _tables(anatomy):
            _rotate_rows(table, rotations.stream)
    for block in anatomy.blocks:
        with on_device(block.module, device), _in_double(block.module):
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
    """Give a head that shares the embedding's weight its own copy; how many parameters that adds."""
    head, table = network.get_output_embeddings(), network.get_input_embeddings()
    network.config.tie_word_embeddings = False  # how an artifact remembers it
    if head.weight.data_ptr() != table.weight.data_ptr():
        return 0
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    own = {name for name, module in network.named_modules() if module is head}
    tied: dict[str, str] = getattr(network, "all_tied_weights_keys", {})
    network.all_tied_weights_keys = {key: of for key, of in tied.items() if key.rpartition(".")[0] not in own}
    return int(head.weight.numel())


def _rotate_block(block: Block, rotations: Rotations) -> None:
    device = block.parts[0].output.device
    if rotations.stream is not None:
        turn = rotations.stream.to(device)
        for norm, readers in block.norm_consumers:
            _fold_norm(norm, readers, turn)
            for reader in readers:
                weight = linear_weight(reader)
                weight.copy_(weight @ turn)
        for part in block.parts:
            for tensor in (part.output.weight, part.output.bias):  # [hidden, in], [hidden]
                if tensor is not None:
                    tensor.copy_(turn.T @ tensor)
    for part in block.parts:
        if part.kind == "heads" and part.block in rotations.values:
            _rotate_values(part, rotations.values[part.block].to(device))


def _fold_norm(norm: Any, readers: list[Any], turn: Tensor) -> None:
    """Leave a norm without a weight. A bias goes on into the readers' biases; where one has none, the norm keeps it,
    divided by the weight and rotated."""
    bias = getattr(norm, "bias", None)
    if bias is not None:
        if all(reader.bias is not None for reader in readers):
            for reader in readers:
                reader.bias.add_(linear_weight(reader) @ bias)
            bias.zero_()
        else:
            bias.copy_(torch.where(bias == 0, 0.0, bias / norm.weight) @ turn)
    if norm.weight is not None:
        for reader in readers:
            linear_weight(reader).mul_(norm.weight)
        norm.weight.fill_(1.0)


def _rotate_values(part: Part, turn: Tensor) -> None:
    """Every head's values by one matrix, undone where the attention output reads them."""
    values, output = part.input_projections[2], part.output.weight
    for tensor in (values.weight, values.bias):  # [units * head_dim, ...]
        if tensor is not None:
            rows = tensor.unflatten(0, (part.units, part.head_dim)).transpose(0, 1)
            tensor.copy_((turn.T @ rows.flatten(1)).view_as(rows).transpose(0, 1).flatten(0, 1))
    output.copy_((output.unflatten(1, (-1, part.head_dim)) @ turn).flatten(1))


def _rotate_rows(table: Tensor, turn: Tensor) -> None:
    turn = turn.to(table.device)
    for rows in table.split(ROWS):
        rows.copy_(rows.double() @ turn)


def _rotate_head(anatomy: Anatomy, turn: Tensor) -> None:
    head, norm = anatomy.network.get_output_embeddings(), anatomy.final_norm
    with _in_double(head), _in_double(norm):
        turn = turn.to(head.weight.device)
        _fold_norm(norm, [head], turn)
        head.weight.copy_(head.weight @ turn)


def _check_norms(anatomy: Anatomy) -> None:
    """A bias that no reader can take needs a weight to be divided by."""
    pairs = [pair for block in anatomy.blocks for pair in block.norm_consumers]
    for norm, readers in [*pairs, (anatomy.final_norm, [anatomy.network.get_output_embeddings()])]:
        bias = getattr(norm, "bias", None)
        if bias is None or all(reader.bias is not None for reader in readers):
            continue
        if bool(((norm.weight == 0) & (bias != 0)).any()):
            raise ModelError("a norm has a bias where its weight is zero, which no rotation can be folded around.")


@contextmanager
def _in_double(module: Any) -> Iterator[None]:
    """Inside, the parameters are float64; afterwards they are cast back to what they were."""
    kinds = [(parameter, parameter.dtype) for parameter in module.parameters()]
    for parameter, _ in kinds:
        parameter.data = parameter.data.double()
    try:
        yield
    finally:
        for parameter, kind in kinds:
            parameter.data = parameter.data.to(kind)
