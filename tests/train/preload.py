"""What workers of tests use, so that it is loaded once."""

import torch._dynamo  # an optimiser asks for it
import torch.nn.parallel
import torch.optim

import smelt.train.gradients.compressors
import smelt.train.gradients.ddp
import smelt.train.gradients.hsdp

__all__ = ["smelt", "torch"]
