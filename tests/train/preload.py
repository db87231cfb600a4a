"""Modules that test workers use, imported once in the fork server."""

import torch._dynamo  # imported by the optimizer
import torch.nn.parallel
import torch.optim

import smelt.train.gradients.compressors
import smelt.train.gradients.ddp
import smelt.train.gradients.hsdp

__all__ = ["smelt", "torch"]
