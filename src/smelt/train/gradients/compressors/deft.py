"""DEFT: every worker runs Top-k on layers of its own; a layer's share of k follows the norm of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2
from typing import ClassVar

import torch
from torch import Tensor

from smelt.train.gradients.compressor import Chosen, Sparsifier, Step, count
from smelt.train.gradients.exclusive import equal_range
from smelt.train.gradients.layout import Layout

Range = tuple[int, int]


@dataclass(frozen=True)
class DEFT(Sparsifier):
    """The worker t mod n gives each layer its k, packs the layers into n bins of like cost and tells the others.

    The published code lets every worker use its own norms for its bin, so that its counts only come near k; here the
    counts are broadcast with the bins, and together they are k (at least one a layer). Needs the whole model in one
    vector."""

    name: ClassVar[str] = "deft"
    paper: ClassVar[str] = (
        "Yoon and Oh, DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient "
        "Sparsification, ICPP 2023 (arXiv 2307.03500)"
    )

    @property
    def route(self) -> str:
        return "exclusive"

    def choose(self, step: Step) -> Chosen:
        memory, workers = step.add(), step.workers
        layers = cut(step.layout, workers.size)
        leader = step.number % workers.size
        plan = torch.zeros(2, len(layers), dtype=torch.int32, device=memory.device)
        if workers.rank == leader:
            norms = torch.stack([torch.linalg.vector_norm(memory[start:stop]) for start, stop in layers]).tolist()
            sizes = [stop - start for start, stop in layers]
            shares = share(count(self.density, len(memory)), norms, sizes)
            plan = torch.tensor([shares, pack(shares, sizes, workers.size)], dtype=torch.int32, device=memory.device)
        shares, bins = workers.broadcast(plan, leader, "plan").tolist()
        mine = (leader + workers.rank) % workers.size
        own, common = [], []
        for (start, stop), number, bin_ in sorted(zip(layers, shares, bins, strict=True)):
            if number == stop - start:
                common.append(torch.arange(start, stop, device=memory.device))
            elif bin_ == mine:
                own.append(memory[start:stop].abs().topk(number, sorted=False).indices.sort().values + start)
        return Chosen(_joined(own, memory), _joined(common, memory))


def cut(layout: Layout, workers: int) -> list[Range]:
    """Layers as they are, except that one of more than G/n elements is cut into n nearly equal ones."""
    ranges = []
    for piece in layout.pieces:
        parts = workers if piece.size * workers > layout.size else 1
        found = (equal_range(part, piece.size, parts) for part in range(parts))
        ranges += [(piece.start + start, piece.start + stop) for start, stop in found if stop > start]
    return ranges


def share(total: int, norms: list[float], sizes: list[int]) -> list[int]:
    """k of each layer, from the largest norm down, at least one; a layer that is too small passes the rest on.

    What the last layers are too small for is shared again by those that have room, so that density 1 is everything.
    """
    shares, left = [0] * len(norms), total
    open_layers = sorted(range(len(norms)), key=lambda layer: -norms[layer])
    while open_layers and (left > 0 or not any(shares)):
        norm_left = sum(norms[layer] for layer in open_layers)
        for layer in open_layers:
            last = layer == open_layers[-1] or norm_left <= 0
            aim = left if last else floor(left * norms[layer] / norm_left)
            more = min(sizes[layer] - shares[layer], max(aim, 0 if shares[layer] else 1))
            shares[layer] += more
            left = max(left - more, 0)
            norm_left -= norms[layer]
        open_layers = [layer for layer in open_layers if shares[layer] < sizes[layer]]
    return shares


def pack(shares: list[int], sizes: list[int], workers: int) -> list[int]:
    """The bin of each layer: in decreasing order of cost, each into the bin that holds least."""
    whole = [number == size for number, size in zip(shares, sizes, strict=True)]
    costs = [
        0.0 if all_of_it else size * (log2(number) if number > 1 else 1.0)
        for number, size, all_of_it in zip(shares, sizes, whole, strict=True)
    ]
    loads, bins = [0.0] * workers, [0] * len(costs)
    for layer in sorted(range(len(costs)), key=lambda layer: -costs[layer]):
        bins[layer] = min(range(workers), key=loads.__getitem__)
        loads[bins[layer]] += costs[layer]
    return bins


def _joined(parts: list[Tensor], memory: Tensor) -> Tensor:
    return torch.cat(parts) if parts else memory.new_empty(0, dtype=torch.int64)
