"""One model on several devices: each rank holds some heads and filters of every layer, and their outputs are summed.

A rank's share is what surgery leaves when all other units are removed, so that nothing here knows a family. The first
rank plans and samples; before a step it tells the others what to compute, in one tensor. By torch.distributed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from smelt.errors import ModelError
from smelt.kernels.paged import Pages
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.surgery import keep_units
from smelt.serve.engine.attention import NAME, PagedCache
from smelt.serve.engine.runner import Runner, module_logits

PATIENCE = 300  # seconds that a rank waits for the others


def shard(model: Model, rank: int, ranks: int) -> None:
    """Leave a rank's share of every layer, and sum the outputs over the ranks."""
    if quantized_layers(model.network):
        raise ModelError(
            "a quantised model cannot be split over several devices yet; serve the model it was made from."
        )
    for part in model.anatomy.parts:
        if part.units < ranks:
            raise ModelError(f"{part.path} has {part.units} {part.kind}, too few for {ranks} devices.")
    for position in range(len(model.anatomy.parts)):
        part = model.anatomy.parts[position]
        bounds = [part.units * each // ranks for each in (rank, rank + 1)]
        keep_units(model.network, part, range(*bounds))
    for part in model.anatomy.parts:
        output: Any = part.output.module
        if rank and output.bias is not None:
            nn.init.zeros_(output.bias)  # the first rank adds it
        output.register_forward_hook(_summed)


def _summed(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    distributed.all_reduce(output)
    return output


@dataclass(frozen=True)
class Sizes:
    """Of a runner, as all ranks must have them."""

    blocks: int
    size: int
    most_tokens: int
    most_requests: int
    context: int


class ParallelRunner(Runner):
    """The first rank's: what it computes, the others compute with it."""

    def __init__(self, model: Model, sizes: Sizes, ranks: int, kind: str) -> None:
        self._others = _start_others(model.source, sizes, ranks, kind)
        join(0, ranks, kind)
        shard(model, 0, ranks)
        model.network.to(_device(kind, 0))
        super().__init__(model, **vars(sizes), compiled=False)
        self.ranks = ranks

    @property
    def path(self) -> str:
        return f"module on {self.ranks} devices"

    def _logits(self, ids: Tensor, positions: Tensor, rows: Tensor, pages: Pages) -> Tensor:
        gone = next((other for other in self._others if other.poll() is not None), None)
        if gone is not None:
            raise RuntimeError(f"a process that held a part of the model ended with {gone.returncode}")
        _tell([ids, positions, rows, pages.starts, pages.lengths, pages.tables.flatten(), pages.places], self.device)
        return super()._logits(ids, positions, rows, pages)

    def close(self) -> None:
        """The other ranks end."""
        _tell([], self.device)
        for other in self._others:
            other.wait(PATIENCE)
        distributed.destroy_process_group()


def _start_others(source: str, sizes: Sizes, ranks: int, kind: str) -> list[subprocess.Popen[bytes]]:
    """Processes for all ranks but this one, which meet at a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = [source, kind, str(ranks), *(str(value) for value in vars(sizes).values())]
    command = [sys.executable, "-m", "smelt.serve.engine.parallel"]
    return [subprocess.Popen([*command, str(rank), *arguments]) for rank in range(1, ranks)]


def _device(kind: str, rank: int) -> torch.device:
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def join(rank: int, ranks: int, kind: str) -> None:
    from datetime import timedelta

    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE))


def _tell(tensors: Sequence[Tensor], device: torch.device) -> None:
    """First how long each is, then all of them behind one another. Nothing: the end."""
    lengths = torch.zeros(8, dtype=torch.int64)
    lengths[: len(tensors)] = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
    distributed.broadcast(lengths.to(device), 0)
    if tensors:
        distributed.broadcast(torch.cat([tensor.to(torch.int64) for tensor in tensors]).to(device), 0)


def _told(device: torch.device) -> list[Tensor] | None:
    lengths = torch.zeros(8, dtype=torch.int64, device=device)
    distributed.broadcast(lengths, 0)
    sizes = lengths.tolist()[:7]
    if not any(sizes):
        return None
    content = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    distributed.broadcast(content, 0)
    return list(content.split(sizes))


@torch.inference_mode()
def follow(source: str, sizes: Sizes, rank: int, ranks: int, kind: str) -> None:
    """What another rank does: its share of every step, until it is told the end."""
    join(rank, ranks, kind)
    device = _device(kind, rank)
    model = load(source)
    shard(model, rank, ranks)
    model.network.to(device)
    cache = PagedCache.empty(model.anatomy, sizes.blocks, sizes.size, model.network.dtype, device)
    model.network.set_attn_implementation(NAME)
    while (told := _told(device)) is not None:
        ids, positions, rows, starts, lengths, tables, places = told
        counts = (starts[1:] - starts[:-1]).tolist()
        pages = Pages(
            starts.int(), lengths.int(), tables.int().view(len(lengths), -1), places, int(lengths.max()), counts
        )
        module_logits(model.network, cache, ids, positions, rows, pages)
    distributed.destroy_process_group()


if __name__ == "__main__":
    number, name, where, count, *values = sys.argv[1:]
    follow(name, Sizes(*map(int, values)), int(number), int(count), where)
