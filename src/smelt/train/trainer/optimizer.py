"""Optimizer, learning-rate schedule and mixed precision."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from smelt.train.trainer.config import OptimizerConfig, ScheduleConfig

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_optimizer(network: nn.Module, config: OptimizerConfig, *, scaled: bool) -> torch.optim.Optimizer:
    """Build the optimizer, without weight decay of norms and biases.

    It is fused unless the loss is `scaled`: then the scaler decides on the host whether to step.
    """
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = None if scaled else True
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=fused)


def lr_at(step: int, steps: int, lr: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of a step, counted from 0: linear warmup, then constant or cosine decay."""
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return lr
    progress = min((step - schedule.warmup_steps) / max(steps - schedule.warmup_steps, 1), 1.0)
    return lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for a forward pass in this precision."""
    return nullcontext() if precision == "off" else torch.autocast(device.type, dtype=_AUTOCAST_DTYPES[precision])


def grad_scaler_for(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a gradient scaler for fp16, whose exponent range is too small for small gradients."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None
