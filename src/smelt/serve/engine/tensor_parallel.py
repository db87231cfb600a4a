"""Tensor parallelism with torch.distributed: each rank has some heads and FFN channels of every layer.

Rank 0 schedules and samples; before each step it broadcasts its inputs to the others. `shard.py` splits the model.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.models.load import load
from smelt.models.model import Model
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.attention import NAME, PagedCache, paged
from smelt.serve.engine.runner import InflightBatch, ModelRunner, module_logits
from smelt.serve.engine.scheduler import ScheduledBatch
from smelt.serve.engine.shard import shard, shares
from smelt.subprocesses import python_command, python_environment

PATIENCE = 300  # seconds a rank waits for the others
TENSORS = 8  # broadcast per step


@dataclass(frozen=True)
class RunnerSizes:
    """Sizes of a runner, equal on all ranks."""

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class TensorParallelRunner(ModelRunner):
    """The runner of rank 0; the other ranks follow its steps."""

    def __init__(self, model: Model, sizes: RunnerSizes, ranks: int, kind: str, adapters: Adapters) -> None:
        shares(model, ranks)  # refuse what cannot be split before a process is started
        self._others = _start_others(model.source, sizes, ranks, kind, adapters)
        join(0, ranks, kind)
        shard(model, 0, ranks, adapters)
        model.network.to(_device(kind, 0))
        adapters.to(_device(kind, 0))
        super().__init__(model, **vars(sizes), compiled=False)
        self.ranks, self._shared_adapters = ranks, adapters
        self._numbers = torch.zeros(0, dtype=torch.int64)  # adapter number of each token of a step

    @property
    def backend(self) -> str:
        return f"eager, tensor parallel over {self.ranks} devices"

    def launch(self, step: ScheduledBatch) -> InflightBatch:
        self._numbers = self._shared_adapters.numbers(step.pieces).to(self.device)
        return super().launch(step)

    def _logits(self, ids: Tensor, positions: Tensor, rows: Tensor, pages: AttentionMetadata) -> Tensor:
        ended = next((other for other in self._others if other.poll() is not None), None)
        if ended is not None:
            raise RuntimeError(f"a tensor-parallel worker exited with {ended.returncode}")
        metadata = [pages.cu_seqlens_q, pages.seq_lens, pages.block_tables.flatten(), pages.slot_mapping]
        _tell([ids, positions, rows, *metadata, self._numbers], self.device)
        with self._shared_adapters.applied_by(self._numbers):
            return super()._logits(ids, positions, rows, pages)

    def close(self) -> None:
        """Stop the other ranks."""
        _tell([], self.device)
        for other in self._others:
            other.wait(PATIENCE)
        distributed.destroy_process_group()


def _start_others(
    source: str, sizes: RunnerSizes, ranks: int, kind: str, adapters: Adapters
) -> list[subprocess.Popen[bytes]]:
    """Start processes for ranks 1 and up, with a rendezvous at a free local port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = [source, json.dumps(adapters.folders), kind, str(ranks), *map(str, vars(sizes).values())]
    command = python_command("-m", "smelt.serve.engine.tensor_parallel")
    environment = python_environment()
    return [subprocess.Popen([*command, str(rank), *arguments], env=environment) for rank in range(1, ranks)]


def _device(kind: str, rank: int) -> torch.device:
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def join(rank: int, ranks: int, kind: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE))


def _tell(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Broadcast the lengths of the tensors, then their concatenation; no tensors mean the end."""
    lengths = torch.zeros(TENSORS, dtype=torch.int64)
    lengths[: len(tensors)] = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
    distributed.broadcast(lengths.to(device), 0)
    if tensors:
        distributed.broadcast(torch.cat([tensor.to(torch.int64) for tensor in tensors]).to(device), 0)


def _told(device: torch.device) -> list[Tensor] | None:
    lengths = torch.zeros(TENSORS, dtype=torch.int64, device=device)
    distributed.broadcast(lengths, 0)
    sizes = lengths.tolist()
    if not any(sizes):
        return None
    content = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    distributed.broadcast(content, 0)
    return list(content.split(sizes))


@torch.inference_mode()
def follow(source: str, folders: dict[str, str], sizes: RunnerSizes, rank: int, ranks: int, kind: str) -> None:
    """Run another rank: compute its shard of every step until rank 0 stops."""
    join(rank, ranks, kind)
    device = _device(kind, rank)
    model = load(source)
    adapters = Adapters(model, folders)
    shard(model, rank, ranks, adapters)
    model.network.to(device)
    adapters.to(device)
    cache = PagedCache.empty(model.anatomy, sizes.num_blocks, sizes.block_size, model.network.dtype, device)
    model.network.set_attn_implementation(NAME)
    while (tensors := _told(device)) is not None:
        ids, positions, rows, starts, lengths, tables, slot_mapping, numbers = tensors
        counts = (starts[1:] - starts[:-1]).tolist()
        metadata = AttentionMetadata(
            starts.int(), lengths.int(), tables.int().view(len(lengths), -1), slot_mapping, int(lengths.max()), counts
        )
        with adapters.applied_by(numbers):
            module_logits(model.network, paged(cache, metadata), ids, positions, rows)
    distributed.destroy_process_group()


if __name__ == "__main__":
    number, name, adapted, where, count, *values = sys.argv[1:]
    follow(name, json.loads(adapted), RunnerSizes(*map(int, values)), int(number), int(count), where)
