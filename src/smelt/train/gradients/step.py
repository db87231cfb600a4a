"""Compressed gradients without DDP: all at once, after backward and before the step of the optimiser.

The plainest form, for models that DDP does not take; nothing is sent while backward runs.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from smelt.train.gradients.autotune.auto import compression_class, resolve_compressor
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.settings import Settings


class CompressedStep:
    """`CompressedStep(model, MiCRO()).reduce()` between `loss.backward()` and `optimizer.step()`."""

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor | str,
        settings: Settings | None = None,
        *,
        group: ProcessGroup | None = None,
        vector_mb: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if isinstance(compressor, str):
            compressor = resolve_compressor(compressor)
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.compression = compression_class(compressor)(
            self._parameters.items(),
            compressor,
            Workers(group),
            settings,
            vector_mb=vector_mb,
            scaler=scaler,
            optimizer=optimizer,
        )

    def reduce(self) -> None:
        """Every gradient becomes its mean over all workers; what has none on this worker counts as zero."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.compression.put(name, parameter.grad)
            for name, parameter in self._parameters.items():
                assert parameter.grad is not None
                self.compression.give(name, parameter.grad)
