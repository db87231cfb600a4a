"""What workers of tests use, so that it is loaded once."""

import torch._dynamo  # an optimiser asks for it
import torch.nn.parallel
import torch.optim

import smelt.train.compressors
import smelt.train.ddp
import smelt.train.replicas

__all__ = ["smelt", "torch"]
