"""Compressed gradients without DDP: reduced all at once, between backward and the optimizer step.

The simplest form, for models that DDP does not support; nothing is sent during backward.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from smelt.train.gradients.autotune.auto import compression_class, resolve_compressor
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.deprecated import renamed_parameter
from smelt.train.gradients.settings import CompressionSettings


class CompressedStep:
    """Call `CompressedStep(model, MiCRO()).reduce()` between `loss.backward()` and `optimizer.step()`."""

    @renamed_parameter("vector_mb", "bucket_cap_mb")
    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor | str,
        settings: CompressionSettings | None = None,
        *,
        group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if isinstance(compressor, str):
            compressor = resolve_compressor(compressor)
        self._parameters = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        self.compression = compression_class(compressor)(
            self._parameters.items(),
            compressor,
            Comm(group),
            settings,
            bucket_cap_mb=bucket_cap_mb,
            scaler=scaler,
            optimizer=optimizer,
        )

    def reduce(self) -> None:
        """Replace every gradient by its mean over all ranks; a missing gradient counts as zero."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.compression.add(name, parameter.grad)
            for name, parameter in self._parameters.items():
                assert parameter.grad is not None
                self.compression.write_back(name, parameter.grad)
