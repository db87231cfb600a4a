"""The optimiser, its learning rate over the steps, and the precision that a pass is computed in."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from smelt.train.trainer.config import OptimizerConfig, ScheduleConfig

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_optimizer(network: nn.Module, config: OptimizerConfig, *, scaled: bool) -> torch.optim.Optimizer:
    """Norms and biases do not decay. One pass over the weights, unless the loss is `scaled`: then the scaler decides
    on the host whether there is a step."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = None if scaled else True
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=fused)


def lr_at(step: int, steps: int, lr: float, schedule: ScheduleConfig) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then constant or half a cosine to the floor."""
    if step < schedule.warm_up:
        return lr * (step + 1) / schedule.warm_up
    if schedule.name == "constant":
        return lr
    done = min((step - schedule.warm_up) / max(steps - schedule.warm_up, 1), 1.0)
    return lr * (schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * done)) / 2)


def set_lr(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """What a forward pass stands in."""
    return nullcontext() if precision == "off" else torch.autocast(device.type, dtype=_HALVES[precision])


def grad_scaler_for(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """fp16 has too few exponents for small gradients: its loss is scaled."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None
