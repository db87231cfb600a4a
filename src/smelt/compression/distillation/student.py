"""What computes the loss of a batch: the network that trains, and what it learns from."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smelt.compression.base import Batch
from smelt.compression.distillation.fake_quantize import fake_quantized_layers
from smelt.compression.distillation.intermediates import NetworkOutputs, ObservedNetwork
from smelt.compression.distillation.losses import SAMPLE_WEIGHTS, LossTerm
from smelt.compression.distillation.samples import SAMPLE_INDICES, Samples
from smelt.progress import Progress


class NetworkTeacher:
    """Computes outputs that the student learns from, without gradients."""

    capturable: ClassVar[bool] = True  # in a CUDA graph: the kernels follow from the shapes of the batch alone

    def begin(self, student: Student, samples: Samples, folder: Path, batch_size: int, progress: Progress) -> None:
        """Prepare for the training samples; what is worth keeping goes into the folder."""
        return

    def compile(self) -> None:
        """Let torch.compile run what it is worth for; the student is compiled with what it calls in any case."""
        return

    def outputs(self, student: Student, batch: Batch) -> Any:
        raise NotImplementedError

    def check(self, student: Student, batch: Batch) -> None:
        """Raise, before training begins, if the student cannot learn from this teacher."""
        return


class Student(nn.Module):
    """The network that trains. In training, its loss is the sum of the method's terms and the quantizers' penalties."""

    def __init__(self, network: nn.Module, losses: tuple[LossTerm, ...], teacher: NetworkTeacher | None) -> None:
        super().__init__()
        self.network, self.losses, self.config = network, losses, network.config
        self.observed = ObservedNetwork(network)
        self.intervention: str | None = None  # which intermediate outputs the teacher's replace in the next passes
        reads_labels = getattr(network.config, "is_encoder_decoder", False)
        self._needs_labels = reads_labels or any(term.uses_own_loss for term in losses)
        self._teacher = [teacher]  # in a list: its parameters are none of this module's

    def inputs(self, batch: Batch) -> Batch:
        """Return the part of a batch that is passed to the network: labels only where its own loss is used."""
        unused = {SAMPLE_WEIGHTS, SAMPLE_INDICES}
        if self.training and not self._needs_labels:
            unused.add("labels")
        return {name: tensor for name, tensor in batch.items() if name not in unused}

    def forward(self, **batch: Tensor) -> Any:
        batch.pop("use_cache", None)
        if not self.training:
            return self.observed(batch)
        taught = self.taught(batch)
        outputs = self.observed(self.inputs(batch), self.intervention, taught)
        return NetworkOutputs(outputs.logits, self.loss(outputs, taught, batch))

    def graph_state(self) -> Hashable:
        """Return what the kernels of a step depend on; None if they cannot be captured as a CUDA graph."""
        teacher = self._teacher[0]
        if teacher is not None and not teacher.capturable:
            return None
        return (self.intervention,)

    def taught(self, batch: Batch) -> Any:
        """Return the teacher's outputs, or None without a teacher."""
        teacher = self._teacher[0]
        if teacher is None:
            return None
        with torch.no_grad():
            return teacher.outputs(self, batch)

    def loss(self, outputs: NetworkOutputs, taught: Any, batch: Batch) -> Tensor:
        """Return the sum of the terms and penalties, []."""
        loss: Any = sum(term.weight * term.compute(outputs, taught, batch) for term in self.losses) + self.penalty()
        if outputs.intermediates:
            loss = loss + 0 * outputs.logits.sum()  # DDP waits for a gradient of the head, too
        return loss

    def penalty(self) -> Tensor | float:
        """Return the sum of the layers' own terms of the loss."""
        return sum(layer.penalty() for layer in fake_quantized_layers(self.network).values())
