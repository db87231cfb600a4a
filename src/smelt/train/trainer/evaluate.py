"""The loss, and where there are classes the accuracy, on samples that are held out; every worker takes a part."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as distributed

from smelt.train.trainer.optimizer import autocast
from smelt.train.trainer.task import TrainingTask


@torch.no_grad()
def evaluate(task: TrainingTask, samples: int, batch: int, precision: str, device: torch.device) -> dict[str, float]:
    """The first `samples` held-out ones, in their order."""
    rank, workers = distributed.get_rank(), distributed.get_world_size()
    count = min(samples, len(task.held_out))
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right ones, samples
    _share_buffers(task)
    task.network.eval()
    for start in range(rank * batch, count, workers * batch):
        places = np.arange(start, min(start + batch, count))
        given = {name: tensor.to(device) for name, tensor in task.held_out.take(places).items()}
        with autocast(precision, device):
            found = task.network(**given, **task.options)
        right = (found.logits.argmax(dim=-1) == given["labels"]).sum().item() if task.has_classes else 0.0
        sums += torch.tensor([found.loss.item() * len(places), right, len(places)], dtype=torch.float64)
    task.network.train()
    distributed.all_reduce(sums)
    loss, right, seen = sums.tolist()
    if task.has_classes:
        return {"loss": loss / seen, "accuracy": right / seen}
    return {"loss": loss / seen, "perplexity": math.exp(min(loss / seen, 700.0))}


def _share_buffers(task: TrainingTask) -> None:
    """Running means of norms differ between workers until the next pass; those of the first one are what is saved."""
    for buffer in task.network.buffers():
        distributed.broadcast(buffer, 0)
