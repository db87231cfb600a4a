"""Dense inside a node, sparse between nodes: the workers of a node add up their gradients, then each has a share of
the sum to compress, together with its peers in the other nodes, and the node puts the shares together again.

Between nodes then travels what n nodes send, not what n m workers would, over the links of all m workers of a node; the
memory of a worker is that of its share. The workers of a node are those of consecutive ranks, as torchrun counts them.
(The two levels are common practice, such as in 1-bit Adam, Tang et al., ICML 2021; which worker has which share is
ours.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as distributed
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.groups import part_of_group
from smelt.train.gradients.layout import Layout, Piece

LOCAL = "local"  # as many as torchrun has started on each machine


@dataclass(frozen=True)
class Nodes:
    """Where one worker stands."""

    inside: Workers  # of its node
    peers: Workers  # one of each node, with the same place in it and the same share

    @classmethod
    def of(cls, workers: Workers, node: int | str) -> Nodes:
        """All workers call it together. `node`: workers of a node, or "local"."""
        size = _size(workers, node)
        ranks = distributed.get_process_group_ranks(workers.group)
        first, place = workers.rank // size * size, workers.rank % size
        groups = (ranks[first : first + size], ranks[place::size])
        inside, peers = (part_of_group(each, workers.group) for each in groups)
        return cls(Workers(inside), Workers(peers))

    def share(self, layout: Layout) -> Layout:
        """The part of a vector that this worker compresses; all parts are of one size, the last ones padded."""
        size = -(-layout.size // self.inside.size)
        return part_of(layout, self.inside.rank * size, size)

    def reduce(self, flat: Tensor) -> Tensor:
        """[workers of the node * share] -> [share]: the node's mean.

        Where any share is not finite all become so: a compressor refuses a step by what it is given itself, and the
        peers of other shares must refuse the same one.
        """
        share = self.inside.scatter_sum(flat.view(self.inside.size, -1), "inside").div_(self.inside.size)
        spoilt = torch.linalg.vector_norm(share, torch.inf) * 0  # 0, or not a number
        return share.add_(self.inside.sum(spoilt.view(1), "inside"))

    def gather(self, share: Tensor) -> Tensor:
        """[share] -> [workers of the node * share]"""
        return self.inside.gather(share, "inside").flatten()


def part_of(layout: Layout, start: int, size: int) -> Layout:
    """`size` elements of a vector from `start` on. A tensor that is cut is one row there; what lies past the end of
    the vector is a tensor of its own."""
    pieces, stop = [], start + size
    for piece in layout.pieces:
        first, last = max(piece.start, start), min(piece.stop, stop)
        if first < last:
            row = (last - first,) if len(piece.shape) < 2 else (1, last - first)
            pieces.append(Piece(piece.name, piece.shape if last - first == piece.size else row, first - start))
    filled = sum(piece.size for piece in pieces)
    if filled < size:
        pieces.append(Piece("", (1, size - filled), filled))
    return Layout(tuple(pieces))


def _size(workers: Workers, node: int | str) -> int:
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if node == LOCAL else int(node)
    if not size:
        raise ConfigError('node is "local", and LOCAL_WORLD_SIZE is not set; start with torchrun, or give a number.')
    workers.require_equal(str(size), "number of workers in a node")
    if workers.size % size:
        raise ConfigError(f"{workers.size} workers cannot be nodes of {size}; start as many on every node.")
    if workers.size == size:
        raise ConfigError(
            f"all {size} workers are in one node, so nothing travels between nodes; leave node at None, or start more."
        )
    return size
