"""Repair after channel pruning: refit each convolution that reads the kept channels, by least squares.

The inputs are unfolded, so that a convolution is a matrix. As in `repair.py`, two copies of the hidden states advance
side by side: the student's through blocks already cut and repaired, the teacher's through the original ones. A
convolution is fitted to what the original one computes; errors that earlier blocks leave in the shortcut stay. The
intercept of the fit moves the running mean of the batch norm that follows, so that no bias is added.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.allocation.unit_search import KeptUnits
from smelt.compression.base import MethodContext
from smelt.compression.calibration.block_inputs import advance, capture_block_inputs, record_io
from smelt.compression.calibration.least_squares import NormalEquations
from smelt.compression.pruning.repair import RepairSettings, reconstruct
from smelt.errors import DataError
from smelt.kernels.conv import ConvShape
from smelt.models.anatomy import Block, Part
from smelt.models.model import Model
from smelt.models.surgery import keep_units, set_output


@torch.no_grad()
def cut_and_refit(model: Model, choice: KeptUnits, settings: RepairSettings, context: MethodContext) -> dict[str, Any]:
    """Cut the channels of every block and refit the convolutions that read them."""
    if not context.batches:
        raise DataError(f"repair: {settings.mode} needs calibration data, and there is none.")
    work = _ConvRepair(model, choice, settings, context)
    for index in context.progress.track(range(len(model.anatomy.blocks)), f"repair ({settings.mode})"):
        work.repair_block(index)
    return {"repaired": len(model.anatomy.parts)}


class _ConvRepair:
    """The hidden states of student and teacher, and the channels to keep."""

    def __init__(self, model: Model, choice: KeptUnits, settings: RepairSettings, context: MethodContext) -> None:
        self.model, self.settings, self.checkpoint = model, settings, context.checkpoint
        self.kept = {part.name: kept.tolist() for part, kept in zip(model.anatomy.parts, choice, strict=True)}
        limit = None if context.memory_limit is None else context.memory_limit // 2
        self.student = capture_block_inputs(model.anatomy, context.batches, limit=limit, folder=context.folder)
        self.teacher = self.student.copy(limit, context.folder)

    def repair_block(self, index: int) -> None:
        """Cut and refit a block, or restore it from the checkpoint; then advance teacher and student."""
        original = copy.deepcopy(self.model.anatomy.blocks[index])
        for part in self.model.anatomy.blocks[index].parts:
            keep_units(self.model.network, part, self.kept[part.name])
        block, name = self.model.anatomy.blocks[index], f"block-{index:03d}"
        stored = self.checkpoint.load(name)
        if stored is None:
            for part, dense in zip(block.parts, original.parts, strict=True):
                self._refit(block, part, original, dense)
            self.checkpoint.save(name, block.module.state_dict())
        else:
            block.module.load_state_dict(stored)
        advance(self.student, block)
        advance(self.teacher, original)

    def _refit(self, block: Block, part: Part, original: Block, dense: Part) -> None:
        """Fit the convolution that reads a part's channels to what the original one computes."""
        shape = ConvShape.of(part.output.module)
        kept_outputs = self._kept_outputs(block, part)
        equations = NormalEquations.zeros(shape.columns, shape.out_channels, part.output.device)
        for batch in range(len(self.student)):
            target: dict[str, Tensor] = {}
            actual: dict[str, Tensor] = {}
            with record_io(dense.output.module, target):
                self.teacher.run(original.module, original.index, batch)
            with record_io(part.output.module, actual, stop=True):
                self.student.run(block.module, block.index, batch)
            targets = target["output"][:, kept_outputs].movedim(1, -1).flatten(0, -2)  # [positions, out channels]
            bias = part.output.bias
            equations.add(shape.unfold(actual["input"])[:, 0], targets if bias is None else targets - bias)
        matrix, offset = reconstruct(
            equations, shape.to_matrix(part.output.weight), damping=self.settings.damping,
            intercept=self.settings.intercept,
        )  # fmt: skip
        set_output(part, shape.to_weight(matrix), None)
        if offset is not None:
            running_mean = self._next_norm(part).running_mean
            assert running_mean is not None
            running_mean -= offset.to(running_mean)

    def _kept_outputs(self, block: Block, part: Part) -> list[int] | slice:
        """Return the output channels of a part's convolution that are left: those the next part of the block keeps."""
        for following in block.parts:
            if following.input_projections[0].path == part.output.path:
                return self.kept[following.name]
        return slice(None)

    def _next_norm(self, part: Part) -> nn.BatchNorm2d:
        """Return the batch norm after a part's convolution, which is its sibling."""
        siblings = self.model.network.get_submodule(part.output.path.rpartition(".")[0]).children()
        return next(module for module in siblings if isinstance(module, nn.BatchNorm2d))
