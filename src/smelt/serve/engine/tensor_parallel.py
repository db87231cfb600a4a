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
from smelt.serve.engine.attention import ATTN_IMPLEMENTATION, PagedCache, paged_attention_fn
from smelt.serve.engine.runner import InflightBatch, ModelRunner, eager_logits
from smelt.serve.engine.scheduler import ScheduledBatch
from smelt.serve.engine.shard import partition_units, shard
from smelt.subprocesses import python_command, python_environment

TIMEOUT = 300  # seconds that a rank waits for the others
MAX_TENSORS = 8  # broadcast per step


@dataclass(frozen=True)
class RunnerSizes:
    """Sizes of a runner, equal on all ranks."""

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class TensorParallelRunner(ModelRunner):
    """The runner of rank 0; the worker ranks run_worker its steps."""

    def __init__(self, model: Model, sizes: RunnerSizes, ranks: int, device_type: str, adapters: Adapters) -> None:
        partition_units(model, ranks)  # refuse what cannot be split before a process is started
        self._workers = _start_workers(model.source, sizes, ranks, device_type, adapters)
        init_distributed(0, ranks, device_type)
        shard(model, 0, ranks, adapters)
        model.network.to(_device(device_type, 0))
        adapters.to(_device(device_type, 0))
        super().__init__(model, **vars(sizes), compiled=False)
        self.ranks, self._shared_adapters = ranks, adapters
        self._adapter_indices = torch.zeros(0, dtype=torch.int64)  # of each token of a step; empty: none

    @property
    def backend(self) -> str:
        return f"eager, tensor parallel over {self.ranks} devices"

    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        indices = self._shared_adapters.token_indices(batch.chunks)
        self._adapter_indices = torch.from_numpy(indices if indices.any() else indices[:0]).to(self.device)
        return super().launch(batch)

    def _logits(self, ids: Tensor, positions: Tensor, rows: Tensor, metadata: AttentionMetadata) -> Tensor:
        ended = next((worker for worker in self._workers if worker.poll() is not None), None)
        if ended is not None:
            raise RuntimeError(f"a tensor-parallel worker exited with {ended.returncode}")
        tensors = [metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables.flatten(), metadata.slot_mapping]
        _broadcast([ids, positions, rows, *tensors, self._adapter_indices], self.device)
        with self._shared_adapters.apply_by_index(self._adapter_indices):
            return super()._logits(ids, positions, rows, metadata)

    def close(self) -> None:
        """Stop the worker ranks."""
        _broadcast([], self.device)
        for worker in self._workers:
            worker.wait(TIMEOUT)
        distributed.destroy_process_group()


def _start_workers(
    source: str, sizes: RunnerSizes, ranks: int, device_type: str, adapters: Adapters
) -> list[subprocess.Popen[bytes]]:
    """Start a process per rank from 1 on, with a rendezvous at a free local port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = [source, json.dumps(adapters.folders), device_type, str(ranks), *map(str, vars(sizes).values())]
    command = python_command("-m", "smelt.serve.engine.tensor_parallel")
    environment = python_environment()
    return [subprocess.Popen([*command, str(rank), *arguments], env=environment) for rank in range(1, ranks)]


def _device(device_type: str, rank: int) -> torch.device:
    return torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)


def init_distributed(rank: int, ranks: int, device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))


def _broadcast(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Broadcast the lengths of the tensors, then their concatenation; no tensors tell the workers to stop."""
    lengths = torch.zeros(MAX_TENSORS, dtype=torch.int64)
    lengths[: len(tensors)] = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
    distributed.broadcast(lengths.to(device), 0)
    if tensors:
        distributed.broadcast(torch.cat([tensor.to(torch.int64) for tensor in tensors]).to(device), 0)


def _receive(device: torch.device) -> list[Tensor] | None:
    """Receive the tensors of a step; None: stop."""
    lengths = torch.zeros(MAX_TENSORS, dtype=torch.int64, device=device)
    distributed.broadcast(lengths, 0)
    sizes = lengths.tolist()
    if not any(sizes):
        return None
    content = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    distributed.broadcast(content, 0)
    return list(content.split(sizes))


@torch.inference_mode()
def run_worker(
    source: str, folders: dict[str, str], sizes: RunnerSizes, rank: int, ranks: int, device_type: str
) -> None:
    """Run a worker rank: compute its shard of every step until rank 0 stops."""
    init_distributed(rank, ranks, device_type)
    device = _device(device_type, rank)
    model = load(source)
    adapters = Adapters(model, folders)
    shard(model, rank, ranks, adapters)
    model.network.to(device)
    adapters.to(device)
    cache = PagedCache.empty(model.anatomy, sizes.num_blocks, sizes.block_size, model.network.dtype, device)
    model.network.set_attn_implementation(ATTN_IMPLEMENTATION)
    while (tensors := _receive(device)) is not None:
        ids, positions, rows, cu_seqlens_q, seq_lens, block_tables, slot_mapping, adapter_indices = tensors
        metadata = AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q.int(), seq_lens=seq_lens.int(),
            block_tables=block_tables.int().view(len(seq_lens), -1), slot_mapping=slot_mapping,
            max_seq_len=int(seq_lens.max()), query_lens=(cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist(),
        )  # fmt: skip
        with adapters.apply_by_index(adapter_indices):
            eager_logits(model.network, paged_attention_fn(cache, metadata), ids, positions, rows)
    distributed.destroy_process_group()


if __name__ == "__main__":
    rank_, source_, folders_, device_type_, ranks_, *sizes_ = sys.argv[1:]
    run_worker(source_, json.loads(folders_), RunnerSizes(*map(int, sizes_)), int(rank_), int(ranks_), device_type_)
