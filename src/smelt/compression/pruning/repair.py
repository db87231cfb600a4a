"""Cutting and repairing block by block: the student loses its units, its output projections are fitted to a teacher.

Two streams run side by side from the first block on: the student's through blocks already cut and repaired, the
teacher's through the blocks as they were. Memory holds one block's activations; every finished block is kept in the
checkpoint, so a killed run repeats only forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.compression.allocation.unit_search import Choice
from smelt.compression.base import MethodContext
from smelt.compression.calibration.least_squares import NormalEquations
from smelt.compression.calibration.stream import Activations, Stream, advance, open_stream, watching
from smelt.compression.pruning.reconstruct import reconstruct
from smelt.compression.pruning.teacher import Teacher
from smelt.compression.pruning.tune import tune_scales
from smelt.errors import DataError
from smelt.models.anatomy import Anatomy, Block, Part, anatomy_of
from smelt.models.families import Residual
from smelt.models.model import Model
from smelt.models.surgery import keep_units, scale_units, set_output

STREAMS = 3  # student, teacher, and the teacher's targets: what shares a memory limit


@dataclass(frozen=True)
class RepairSettings:
    """How the output projections are repaired: `tune` (one scale a unit) or `full` (the whole projection)."""

    kind: str
    solver: str = "lsmr"
    damping: float = 0.1
    intercept: bool = True
    skip_first_token: bool = False  # its huge activations would dominate the fit of a decoder
    first_token_at_the_end: bool = False  # a classifier reads only that token of the last block
    published: bool = False  # the released order: first attention left alone, all stops when a solve fails


def cut(network: nn.Module, choice: Choice) -> None:
    """Remove everything that was not chosen, and repair nothing."""
    for part, kept in zip(anatomy_of(network).parts, choice, strict=True):
        keep_units(network, part, kept.tolist())


@torch.no_grad()
def cut_and_repair(
    model: Model,
    choice: Choice,
    settings: RepairSettings,
    context: MethodContext,
    assistant: Choice | None = None,
) -> dict[str, Any]:
    """Cut every block and fit it to the teacher: the dense model, or the larger `assistant` choice."""
    if not context.batches:
        raise DataError(f"repair: {settings.kind} needs calibration data, and there is none.")
    work = _Work(model, choice, settings, context, assistant)
    for index in context.progress.track(range(len(model.anatomy.blocks)), f"repair ({settings.kind})"):
        work.repair_block(index)
    return {"repaired": work.repaired, "gave_up": work.given_up}


class _Work:
    """The two streams and how far they have come."""

    def __init__(
        self,
        model: Model,
        choice: Choice,
        settings: RepairSettings,
        context: MethodContext,
        assistant: Choice | None,
    ) -> None:
        self.model, self.settings, self.checkpoint = model, settings, context.checkpoint
        anatomy = model.anatomy
        self.residual = anatomy.residual
        self.kept = {part.name: kept.tolist() for part, kept in zip(anatomy.parts, choice, strict=True)}
        self.teacher_masks = None if assistant is None else _masks(anatomy, assistant)
        limit = None if context.memory_limit is None else context.memory_limit // STREAMS
        self.student = open_stream(anatomy, context.batches, limit=limit, folder=context.folder)
        self.teacher = self.student.copy(limit, context.folder)
        self.targets = Activations(limit, context.folder)  # what the last part of the block should reach
        self.repaired = 0
        self.given_up = False

    def repair_block(self, index: int) -> None:
        """Cut and repair a block, or take the repair of a killed run; carry both streams through."""
        teacher = Teacher(self._block(index), self.residual, self.teacher_masks)
        for position in range(len(self._block(index).parts)):
            part = self._block(index).parts[position]
            keep_units(self.model.network, part, self.kept[part.name])
        name = f"block-{index:03d}"
        done = self.checkpoint.load(name)
        if done is None:
            self._repair(index, teacher)
            self.checkpoint.save(name, self._results(index))
        else:
            self._restore(index, done)
            for batch in range(len(self.teacher)):
                self._teach(teacher, index, batch)
        advance(self.student, self._block(index))

    def _block(self, index: int) -> Block:
        return self.model.anatomy.blocks[index]

    def _repair(self, index: int, teacher: Teacher) -> None:
        last = index == len(self.model.anatomy.blocks) - 1
        block = self._block(index)
        for position, part in enumerate(block.parts):
            equations = NormalEquations.zeros(part.output.in_features, part.output.out_features, part.output.device)
            rows = _Rows(self.settings, last=last and position > 0)
            for batch in range(len(self.student)):
                target = self._teach(teacher, index, batch) if position == 0 else self.targets[batch]
                if part.units and not self.given_up:
                    self._collect(block, position, batch, target, equations, rows)
            left_alone = self.settings.published and index == 0 and part.kind == "heads"
            if part.units and not self.given_up and not left_alone:
                self._solve(part, equations)

    def _teach(self, teacher: Teacher, index: int, batch: int) -> Tensor:
        """Carry the teacher's stream on; keep what its last part should reach, return what its first should."""
        lesson = teacher.teach(self.teacher, index, batch)
        self.teacher.hidden[batch] = lesson.output
        self.targets[batch] = lesson.sums[-1]
        return lesson.sums[0]

    def _collect(
        self, block: Block, position: int, batch: int, target: Tensor, equations: NormalEquations, rows: _Rows
    ) -> None:
        """Add a batch's rows: what enters the part's projection, and what it should add to the residual."""
        inputs, residual = part_inputs(self.student, block, position, batch, self.residual)
        wanted = target.reshape(residual.shape) - residual
        bias = block.parts[position].output.bias
        fits_bias = self.settings.kind == "full" and self.settings.intercept
        if bias is not None and not fits_bias:
            wanted = wanted - bias
        chosen = rows.select(self.student.masks[batch], self.student.hidden[batch].shape[:2])
        inputs, wanted = inputs.flatten(0, -2), wanted.flatten(0, -2)
        if chosen is not None:
            chosen = chosen.to(inputs.device)
            inputs, wanted = inputs[chosen], wanted[chosen]
        equations.add(inputs, wanted)

    def _solve(self, part: Part, equations: NormalEquations) -> None:
        settings = self.settings
        if settings.kind == "full":
            weight, bias = reconstruct(
                equations, part.output.weight, damping=settings.damping, intercept=settings.intercept
            )
            set_output(part, weight, bias)
        else:
            scales = tune_scales(
                equations, part.output.weight, part.columns_per_unit,
                solver=settings.solver, damping=settings.damping, intercept=part.kind == "heads",
            )  # fmt: skip
            if scales is None:
                self.given_up = settings.published
                return
            scale_units(part, scales)
        self.repaired += 1

    def _results(self, index: int) -> dict[str, Tensor]:
        tensors = {"progress": torch.tensor([self.given_up, self.repaired], dtype=torch.int64)}
        for position, part in enumerate(self._block(index).parts):
            tensors[f"{position}.weight"] = part.output.weight
            if part.output.bias is not None:
                tensors[f"{position}.bias"] = part.output.bias
        return tensors

    def _restore(self, index: int, tensors: dict[str, Tensor]) -> None:
        self.given_up, self.repaired = bool(tensors["progress"][0]), int(tensors["progress"][1])
        for position, part in enumerate(self._block(index).parts):
            set_output(part, tensors[f"{position}.weight"], tensors.get(f"{position}.bias"))


def part_inputs(stream: Stream, block: Block, position: int, batch: int, residual: Residual) -> tuple[Tensor, Tensor]:
    """What enters a part's output projection, and the residual its result is added to (before any norm)."""
    part, hidden = block.parts[position], stream.hidden[batch]
    seen: dict[str, Tensor] = {}
    if position == 0:
        with watching(part.output.module, seen, stop=True):
            stream.run(block.module, block.index, batch)
        return seen["input"], hidden
    earlier: dict[str, Tensor] = {}
    neighbour = part.input_projections[0].module if residual == "post" else block.parts[0].output.module
    with watching(part.output.module, seen, stop=True), watching(neighbour, earlier):
        stream.run(block.module, block.index, batch)
    # A post-norm feed-forward reads its own residual; before a pre-norm one the residual is the sum so far.
    own = earlier["input"] if residual == "post" else earlier["output"].view(hidden.shape) + hidden
    return seen["input"], own.reshape(*seen["input"].shape[:-1], own.shape[-1])


@dataclass(frozen=True)
class _Rows:
    """Which tokens count in a fit."""

    settings: RepairSettings
    last: bool

    def select(self, mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
        """A flat boolean choice of rows, or None for all of them."""
        batch, tokens = shape
        if self.last and self.settings.first_token_at_the_end:
            return (torch.arange(batch * tokens) % tokens) == 0
        if mask is None and not self.settings.skip_first_token:
            return None
        chosen = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask.cpu().clone()
        if self.settings.skip_first_token:
            chosen[:, 0] = False
        return chosen.flatten()


def _masks(anatomy: Anatomy, choice: Choice) -> dict[str, Tensor]:
    masks = {}
    for part, kept in zip(anatomy.parts, choice, strict=True):
        mask = np.zeros(part.units, dtype=np.float32)
        mask[kept] = 1
        masks[part.name] = torch.from_numpy(mask).to(part.output.device)
    return masks
