"""Hessian traces per unit by Hutchinson's estimator: tr(H) = E[v . Hv] for v with independent entries of +1 and -1.

A Hessian-vector product is one more backward pass through the gradient of the loss. The graph of the gradient is built
once per mini-batch and used by all of its probes. Probes have the size of the weights: v is scaled by the root mean
square of each layer, and the product divided by its square, so that a layer of small weights does not drown in the
curvature of others; the estimate of a layer then has the same error however scale is split between layers.

Networks compute in float32 and in eval mode, so that batch norms are affine; attention uses the one implementation that
has a second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from smelt.compression.calibration.gradients import batch_loss, frozen
from smelt.compression.checkpoint import Checkpoint
from smelt.errors import DataError, ModelError
from smelt.models.anatomy import Anatomy, Part, Projection
from smelt.models.quantized import quantized_layers
from smelt.progress import NullProgress, Progress

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class UnitTraces:
    """Estimated traces of the Hessian of the mean loss, for one part.

    A unit has one block of weights per projection (a head: in q, k, v and o); each block has a trace of its own.
    """

    estimates: np.ndarray  # [probes, projections, units], each the mean over mini-batches
    squared_norms: np.ndarray  # of the blocks, [projections, units]
    sizes: np.ndarray  # weights of a block, [projections]

    @property
    def mean(self) -> np.ndarray:
        """Return the traces, [projections, units]."""
        mean: np.ndarray = self.estimates.mean(0)
        return mean

    def rows(self) -> UnitTraces:
        """Return the traces of the weights that compute the units alone."""
        return UnitTraces(self.estimates[:, :-1], self.squared_norms[:-1], self.sizes[:-1])

    def sensitivity(self) -> np.ndarray:
        """Return trace / (2 * size) * squared norm, summed over the blocks of a unit, for each probe: [probes, units].

        It estimates the increase of the loss without the unit. Its mean over probes does not change if weights
        move between two layers with a ReLU in between.
        """
        relative: np.ndarray = self.squared_norms / (2 * self.sizes[:, None])
        return (self.estimates * relative).sum(1)


def hessian_traces(
    anatomy: Anatomy,
    batches: Sequence[Batch],
    probes: int,
    seed: int,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> list[UnitTraces]:
    """Estimate the traces of every part with so many probes per mini-batch; finished mini-batches are not rerun."""
    if not batches:
        raise DataError("Hessian traces need calibration data, and there is none.")
    parts = [part for part in anatomy.parts if part.units]
    modules: dict[int, Any] = {id(p.module): p.module for part in parts for p in projections_of(part)}
    checkpoint = checkpoint or Checkpoint()
    sums: list[np.ndarray] | None = None
    for index in (progress or NullProgress()).track(range(len(batches)), "Hessian traces"):
        name = f"traces-{index:05d}"
        done = checkpoint.load(name)
        if done is None:
            with _differentiable_twice(anatomy, list(modules.values())):
                done = _batch_traces(anatomy, batches[index], parts, modules, probes, seed + index)
            checkpoint.save(name, done)
        rows = [done[key].cpu().double().numpy() / len(batches) for key in sorted(done)]
        sums = rows if sums is None else [total + row for total, row in zip(sums, rows, strict=True)]
    assert sums is not None
    remaining = iter(sums)
    return [_unit_traces(part, next(remaining) if part.units else None, probes) for part in anatomy.parts]


def projections_of(part: Part) -> tuple[Projection, ...]:
    """Return the projections that hold weights of the units: those that compute them and the one that reads them."""
    return (*part.input_projections, part.output)


def sums_per_unit(part: Part, value: Callable[[Projection], Tensor]) -> Tensor:
    """Sum a value per weight ([out, in, ...]) over each block of weights of a unit: [projections, units]."""
    rows = [
        value(projection).flatten(1).sum(1).view(part.units, per_unit).sum(1)
        for projection, per_unit in zip(part.input_projections, part.rows_per_unit, strict=True)
    ]
    columns = value(part.output).transpose(0, 1).flatten(1).sum(1).view(part.units, part.columns_per_unit).sum(1)
    return torch.stack([*rows, columns])


def _batch_traces(
    anatomy: Anatomy, batch: Batch, parts: Sequence[Part], modules: dict[int, Any], probes: int, seed: int
) -> dict[str, Tensor]:
    """Return v . Hv per block for one mini-batch, by the index of the part: [probes, projections, units] each."""
    weights = [module.weight for module in modules.values()]
    loss = batch_loss(anatomy.network, batch)
    gradients = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    reached = [i for i, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad]
    if not reached:
        raise ModelError("the loss of this network does not depend on the weights of its heads and channels.")
    outputs = [gradients[i] for i in reached]
    scales = [_root_mean_square(weight) for weight in weights]
    generator = torch.Generator().manual_seed(seed)
    products: dict[int, Tensor] = {}
    estimates: list[list[Tensor]] = [[] for _ in parts]
    for _ in range(probes):
        vectors = [
            scale * (torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int8) * 2 - 1).to(weight)
            for weight, scale in zip(weights, scales, strict=True)
        ]
        curvature = torch.autograd.grad(
            outputs, weights, [vectors[i] for i in reached], retain_graph=True, allow_unused=True
        )
        for key, vector, product, scale in zip(modules, vectors, curvature, scales, strict=True):
            products[key] = torch.zeros_like(vector) if product is None else vector * product / scale**2
        for part, rows in zip(parts, estimates, strict=True):
            rows.append(sums_per_unit(part, lambda projection: _oriented(projection, products)).detach().cpu())
    return {f"{index:05d}": torch.stack(rows) for index, rows in enumerate(estimates)}


def _root_mean_square(weight: Tensor) -> float:
    return float(weight.detach().double().square().mean().sqrt()) or 1.0


def _oriented(projection: Projection, products: dict[int, Tensor]) -> Tensor:
    """Return the rows of a projection as [out, in, ...] from a tensor of the size of its module's weight."""
    product = products[id(projection.module)].double()
    return (product.T if projection.transposed else product)[projection.slice]


def _unit_traces(part: Part, estimates: np.ndarray | None, probes: int) -> UnitTraces:
    if estimates is None:
        return UnitTraces(np.zeros((probes, 1, 0)), np.zeros((1, 0)), np.ones(1))
    norms = sums_per_unit(part, lambda projection: projection.weight.detach().double().square()).cpu().numpy()
    sizes = [projection.weight.numel() // part.units for projection in projections_of(part)]
    return UnitTraces(estimates, norms, np.array(sizes, dtype=np.float64))


@contextmanager
def _differentiable_twice(anatomy: Anatomy, modules: Sequence[Any]) -> Iterator[None]:
    """Let the loss have second derivatives by these modules' weights inside the context."""
    network = anatomy.network
    if quantized_layers(network):
        raise ModelError("quantized weights have no Hessian; use the model that this one was made from.")
    tensors = chain(network.named_parameters(), network.named_buffers())
    dtypes = {name: tensor.dtype for name, tensor in tensors}
    with frozen(network), sdpa_kernel(SDPBackend.MATH):
        network.float()
        for module in modules:
            module.weight.requires_grad_(True)
        try:
            yield
        finally:
            for module in modules:
                module.weight.requires_grad_(False)
            for name, tensor in chain(network.named_parameters(), network.named_buffers()):
                tensor.data = tensor.data.to(dtypes[name])
