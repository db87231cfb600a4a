"""DEFT: every rank runs top-k on its own layers; a layer's share of k follows the norm of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2

import torch
from torch import Tensor

from smelt.train.gradients.compressor import COMPRESSORS, CompressionStep, SelectedIndices, Sparsifier, topk_count
from smelt.train.gradients.exclusive import even_range
from smelt.train.gradients.layout import BucketLayout

Range = tuple[int, int]


@COMPRESSORS.register(
    "deft",
    paper=(
        "Yoon and Oh, DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient "
        "Sparsification, ICPP 2023 (arXiv 2307.03500)"
    ),
)
@dataclass(frozen=True)
class DEFT(Sparsifier):
    """Exact top-k per layer without build-up, where sorting cost matters and layers differ in gradient norm.

    Rank t mod n gives each layer its k, packs the layers into n bins of similar cost and broadcasts both. The published
    code lets every rank use its own norms for its bin, so that its counts only approach k; here the counts are
    broadcast with the bins, and add up to k (at least one per layer). Needs the whole model in one bucket."""

    @property
    def exchange_mode(self) -> str:
        return "exclusive"

    def select(self, step: CompressionStep) -> SelectedIndices:
        accumulated, comm = step.accumulate(), step.comm
        device = accumulated.device
        layers = split_layers(step.layout, comm.world_size)
        leader = step.iteration % comm.world_size
        plan = torch.zeros(2, len(layers), dtype=torch.int32, device=device)
        if comm.rank == leader:
            norms = torch.stack([torch.linalg.vector_norm(accumulated[start:stop]) for start, stop in layers]).tolist()
            sizes = [stop - start for start, stop in layers]
            counts = allocate_counts(topk_count(self.density, len(accumulated)), norms, sizes)
            bins = pack_into_bins(counts, sizes, comm.world_size)
            plan = torch.tensor([counts, bins], dtype=torch.int32, device=device)
        counts, bins = comm.broadcast(plan, leader, "plan").tolist()
        own_bin = (leader + comm.rank) % comm.world_size
        own, dense = [], []
        for (start, stop), k, layer_bin in sorted(zip(layers, counts, bins, strict=True)):
            if k == stop - start:
                dense.append(torch.arange(start, stop, device=device))
            elif layer_bin == own_bin:
                own.append(accumulated[start:stop].abs().topk(k, sorted=False).indices.sort().values + start)
        return SelectedIndices(_concat(own, accumulated), _concat(dense, accumulated))


def split_layers(layout: BucketLayout, world_size: int) -> list[Range]:
    """Return the layers; one of more than G/n elements is split into n nearly equal ones."""
    ranges = []
    for part in layout.slices:
        splits = world_size if part.numel * world_size > layout.numel else 1
        chunks = (even_range(index, part.numel, splits) for index in range(splits))
        ranges += [(part.start + start, part.start + stop) for start, stop in chunks if stop > start]
    return ranges


def allocate_counts(total: int, norms: list[float], sizes: list[int]) -> list[int]:
    """Return k of each layer, from the largest norm down, at least one; a saturated layer passes the rest on.

    What the last layers cannot take is allocated again to those that are not full, so that density 1 is everything.
    """
    counts, left = [0] * len(norms), total
    open_layers = sorted(range(len(norms)), key=lambda layer: -norms[layer])
    while open_layers and (left > 0 or not any(counts)):
        norm_left = sum(norms[layer] for layer in open_layers)
        for layer in open_layers:
            last = layer == open_layers[-1] or norm_left <= 0
            share = left if last else floor(left * norms[layer] / norm_left)
            more = min(sizes[layer] - counts[layer], max(share, 0 if counts[layer] else 1))
            counts[layer] += more
            left = max(left - more, 0)
            norm_left -= norms[layer]
        open_layers = [layer for layer in open_layers if counts[layer] < sizes[layer]]
    return counts


def pack_into_bins(counts: list[int], sizes: list[int], num_bins: int) -> list[int]:
    """Return the bin of each layer: in decreasing order of cost, each into the bin with the least load."""
    costs = [0.0 if k == size else size * (log2(k) if k > 1 else 1.0) for k, size in zip(counts, sizes, strict=True)]
    loads, bins = [0.0] * num_bins, [0] * len(costs)
    for layer in sorted(range(len(costs)), key=lambda layer: -costs[layer]):
        bins[layer] = min(range(num_bins), key=loads.__getitem__)
        loads[bins[layer]] += costs[layer]
    return bins


def _concat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like.new_empty(0, dtype=torch.int64)
