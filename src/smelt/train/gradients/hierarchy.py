"""Two-level reduction: dense inside a node, compressed between nodes.

The ranks of a node reduce-scatter their gradients, each compresses its shard of the sum together with the ranks that
hold the same shard in the other nodes, and the node all-gathers the shards. So n nodes exchange what n ranks would, not
n m ranks, over the links of all m ranks of a node, and a rank's residual is that of its shard. The ranks of a node are
consecutive, as torchrun numbers them. (Two levels are common practice, such as in 1-bit Adam, Tang et al., ICML 2021;
the assignment of shards is ours.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as distributed
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.comm import Comm, new_subgroup
from smelt.train.gradients.layout import BucketLayout
from smelt.train.gradients.settings import LOCAL


@dataclass(frozen=True)
class NodeTopology:
    """The two groups that a rank belongs to."""

    intra_node: Comm  # the ranks of its node
    inter_node: Comm  # one rank per node, with the same local rank and shard

    @classmethod
    def create(cls, comm: Comm, ranks_per_node: int | str) -> NodeTopology:
        """Create both groups; called on all ranks together. `ranks_per_node`: a number, or "local"."""
        size = _num_local_ranks(comm, ranks_per_node)
        ranks = distributed.get_process_group_ranks(comm.group)
        first, local_rank = comm.rank // size * size, comm.rank % size
        groups = (ranks[first : first + size], ranks[local_rank::size])
        intra_node, inter_node = (new_subgroup(members, comm.group) for members in groups)
        return cls(Comm(intra_node), Comm(inter_node))

    def shard(self, layout: BucketLayout) -> BucketLayout:
        """Return the part of a bucket that this rank compresses; all shards have one size, the last are padded."""
        numel = -(-layout.numel // self.intra_node.world_size)
        return layout.cut(self.intra_node.rank * numel, numel)

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """[ranks_per_node * shard] -> [shard]: the node's mean.

        If any shard is not finite all become so: a reducer rejects a step by its own gradient, and the reducers of the
        other shards must reject the same step.
        """
        rows = flat.view(self.intra_node.world_size, -1)
        shard = self.intra_node.reduce_scatter(rows, "intra_node").div_(self.intra_node.world_size)
        poison = torch.linalg.vector_norm(shard, torch.inf) * 0  # 0, or NaN
        return shard.add_(self.intra_node.all_reduce(poison.view(1), "intra_node"))

    def all_gather(self, shard: Tensor) -> Tensor:
        """[shard] -> [ranks_per_node * shard]"""
        return self.intra_node.all_gather(shard, "intra_node").flatten()


def _num_local_ranks(comm: Comm, ranks_per_node: int | str) -> int:
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if ranks_per_node == LOCAL else int(ranks_per_node)
    if not size:
        raise ConfigError(
            'ranks_per_node is "local", but LOCAL_WORLD_SIZE is not set; start with torchrun, or pass a number.'
        )
    comm.require_equal(str(size), "number of ranks per node")
    if comm.world_size % size:
        raise ConfigError(f"{comm.world_size} ranks cannot be split into nodes of {size}; start as many on every node.")
    if comm.world_size == size:
        raise ConfigError(
            f"all {size} ranks are in one node, so nothing is sent between nodes; leave ranks_per_node at None, or "
            "start more."
        )
    return size
