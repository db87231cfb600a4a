"""Optimizer, learning-rate schedule and low precision."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from smelt.train.fp8.chunked import convert_to_chunked_training
from smelt.train.fp8.layers import LowPrecisionTraining
from smelt.train.fp8.optimizer import Fp16AdamW, Fp16Rounding, Fp16SGD
from smelt.train.fp8.scaled import convert_to_float8_training
from smelt.train.trainer.config import FP8, FP8_CHUNKED, ScheduleConfig, TrainConfig

logger = logging.getLogger(__name__)

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, FP8: torch.bfloat16}
_NEVER = 2**31 - 1  # steps


def build_optimizer(network: nn.Module, train_config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer, without weight decay of norms and biases.

    It is fused unless the loss is scaled: then the scaler decides on the host whether to step. A parameter with an
    attribute `lr_scale` learns at that multiple of the learning rate.
    """
    config = train_config.optimizer
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for scale in sorted({getattr(parameter, "lr_scale", 1.0) for parameter in trainable}):
        alike = [parameter for parameter in trainable if getattr(parameter, "lr_scale", 1.0) == scale]
        matrices, others = [p for p in alike if p.ndim > 1], [p for p in alike if p.ndim <= 1]
        groups.append({"params": matrices, "weight_decay": config.weight_decay, "lr_scale": scale})
        groups.append({"params": others, "weight_decay": 0.0, "lr_scale": scale})
    groups = [group for group in groups if group["params"]]
    fused = None if train_config.precision in ("fp16", FP8_CHUNKED) else True
    options: dict[str, Any] = (
        {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov, "fused": fused}
        if config.name == "sgd"
        else {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.epsilon, "fused": fused}
    )
    if train_config.precision == FP8_CHUNKED:
        rounding = Fp16Rounding(train_config.seed, stochastic=train_config.fp8_chunked.stochastic_rounding)
        return (Fp16SGD if config.name == "sgd" else Fp16AdamW)(groups, rounding, **options)
    return (torch.optim.SGD if config.name == "sgd" else torch.optim.AdamW)(groups, **options)


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
        group["lr"] = lr * group.get("lr_scale", 1.0)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for a forward pass in this precision."""
    dtype = _AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def grad_scaler_for(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a gradient scaler for precisions whose exponent range is too small for small gradients.

    The scale of fp8-chunked does not grow.
    """
    if config.precision == FP8_CHUNKED:
        scale = config.fp8_chunked.loss_scale
        return torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=_NEVER)
    return torch.amp.GradScaler(device.type) if config.precision == "fp16" else None


def convert_layers(network: nn.Module, config: TrainConfig) -> LowPrecisionTraining:
    """Let the layers of a network multiply in FP8 if the precision says so."""
    if config.precision == FP8:
        training = convert_to_float8_training(network, config.fp8)
        if training.native and not config.compile:
            logger.warning("FP8 is slower than bf16 in eager mode: casts are many small kernels; set compile: true")
        return training
    if config.precision == FP8_CHUNKED:
        return convert_to_chunked_training(network, config.fp8_chunked)
    return LowPrecisionTraining()
