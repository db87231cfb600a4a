"""Cutting and repairing block by block: the student loses its units, its output projections are fitted to a teacher.

Two streams run side by side from the first block on: the student's through blocks already cut and repaired, the
teacher's through the blocks as they were. Memory holds one block's activations; every finished block is kept in the
checkpoint, so a killed run repeats only forward passes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.calibrate.least_squares import NormalEquations
from smelt.calibrate.masks import apply_mask
from smelt.calibrate.stream import Activations, Stream, advance, open_stream, watching
from smelt.method import Context
from smelt.models.anatomy import Anatomy, Block, Part, anatomy_of
from smelt.models.model import Model
from smelt.models.surgery import keep_units, scale_units, set_output
from smelt.prune.reconstruct import reconstruct
from smelt.prune.search import Choice
from smelt.prune.tune import tune_scales


@dataclass(frozen=True)
class Finisher:
    """How the output projections are repaired: `tune` (one scale a unit) or `full` (the whole projection)."""

    kind: str  # "tune" or "full"
    solver: str = "lsmr"
    damping: float = 0.01
    intercept: bool = True
    skip_first_token: bool = False  # its huge activations would dominate the fit of a decoder
    first_token_at_the_end: bool = False  # a classifier reads only that token of the last block
    published: bool = False  # the released order: first attention left alone, all stops when a solve fails


def cut(network: nn.Module, choice: Choice) -> None:
    """Remove everything that was not chosen, and repair nothing."""
    for position, kept in enumerate(choice):
        keep_units(network, anatomy_of(network).parts[position], kept.tolist())


@torch.no_grad()
def cut_and_repair(
    model: Model, choice: Choice, finisher: Finisher, context: Context, assistant: Choice | None = None
) -> dict[str, Any]:
    """Cut every block and fit it to the teacher: the dense model, or the larger `assistant` choice."""
    work = _Work(model, choice, finisher, context, assistant)
    for block in context.watcher.track(model.anatomy.blocks, f"repair ({finisher.kind})"):
        work.block(block.index)
    return {"repaired": work.repaired, "gave_up": work.given_up}


class _Work:
    def __init__(
        self, model: Model, choice: Choice, finisher: Finisher, context: Context, assistant: Choice | None
    ) -> None:
        self.model, self.finisher, self.context = model, finisher, context
        anatomy = model.anatomy
        self.residual = anatomy.residual
        self.kept = {part.name: kept for part, kept in zip(anatomy.parts, choice, strict=True)}
        self.teacher_masks = None if assistant is None else _masks(anatomy, assistant)
        limit = None if context.memory_limit is None else context.memory_limit // 3  # student, teacher, targets
        self.student = open_stream(anatomy, context.batches, limit=limit, folder=context.folder)
        self.teacher = self.student.copy(limit, context.folder)
        self.targets = Activations(limit, context.folder)
        self.repaired = 0
        self.given_up = False

    def block(self, index: int) -> None:
        name = f"block-{index:03d}"
        teacher = _Teacher(copy.deepcopy(self._block(index).module), self._block(index), self.teacher_masks, self.residual)
        done = self.context.checkpoint.load(name)
        self._cut(index)
        if done is not None:
            self._restore(index, done)
            for batch in range(len(self.teacher)):
                self.teacher.hidden[batch] = teacher.run(self.teacher, index, batch).output
        else:
            self._repair(index, teacher)
            self.context.checkpoint.save(name, self._results(index))
        advance(self.student, self._block(index))

    def _block(self, index: int) -> Block:
        return self.model.anatomy.blocks[index]

    def _cut(self, index: int) -> None:
        for position in range(len(self._block(index).parts)):
            part = self._block(index).parts[position]
            keep_units(self.model.network, part, self.kept[part.name].tolist())

    def _repair(self, index: int, teacher: _Teacher) -> None:
        for position in range(len(self._block(index).parts)):
            block = self._block(index)
            part = block.parts[position]
            first = position == 0
            if self.given_up or not part.units:
                if first:
                    self._run_teacher(index, teacher, None)
                continue
            equations = NormalEquations.zeros(part.output.columns, part.output.rows, part.output.module.weight.device)
            rows = _Rows(self.finisher, last=index == len(self.model.anatomy.blocks) - 1 and position > 0)
            for batch in range(len(self.student)):
                target = self._run_teacher_batch(index, teacher, batch) if first else self.targets[batch]
                self._collect(block, position, batch, target, equations, rows)
            if not (self.finisher.published and index == 0 and part.kind == "heads"):
                self._solve(part, equations)

    def _run_teacher(self, index: int, teacher: _Teacher, _: None) -> None:
        for batch in range(len(self.teacher)):
            self._run_teacher_batch(index, teacher, batch)

    def _run_teacher_batch(self, index: int, teacher: _Teacher, batch: int) -> Tensor:
        """Carry the teacher through its block; keep what its last part should give, return what the first should."""
        result = teacher.run(self.teacher, index, batch)
        self.teacher.hidden[batch] = result.output
        self.targets[batch] = result.sums[-1]
        return result.sums[0]

    def _collect(
        self, block: Block, position: int, batch: int, target: Tensor, equations: NormalEquations, rows: _Rows
    ) -> None:
        """Add a batch's rows: what enters the part's projection, and what it should add to the residual."""
        part = block.parts[position]
        inputs, residual = part_inputs(self.student, block, position, batch, self.residual)
        wanted = target.reshape(residual.shape) - residual
        if not self.finisher.intercept or self.finisher.kind == "tune":
            bias = part.output.bias
            wanted = wanted if bias is None else wanted - bias
        select = rows.select(self.student.masks[batch], self.student.hidden[batch].shape[:2])
        inputs, wanted = inputs.flatten(0, -2), wanted.flatten(0, -2)
        if select is not None:
            inputs, wanted = inputs[select.to(inputs.device)], wanted[select.to(inputs.device)]
        equations.add(inputs, wanted)

    def _solve(self, part: Part, equations: NormalEquations) -> None:
        finisher = self.finisher
        if finisher.kind == "full":
            weight, bias = reconstruct(
                equations, part.output.weight, damping=finisher.damping, intercept=finisher.intercept
            )
            set_output(part, weight, bias)
            self.repaired += 1
            return
        scales = tune_scales(
            equations, part.output.weight, part.width,
            solver=finisher.solver, damping=finisher.damping, intercept=part.kind == "heads" and finisher.intercept,
        )  # fmt: skip
        if scales is None:
            self.given_up = self.given_up or finisher.published
            return
        scale_units(part, scales)
        self.repaired += 1

    def _results(self, index: int) -> dict[str, Tensor]:
        tensors = {"given_up": torch.tensor([self.given_up, self.repaired], dtype=torch.int64)}
        for position, part in enumerate(self._block(index).parts):
            tensors[f"{position}.weight"] = part.output.weight
            if part.output.bias is not None:
                tensors[f"{position}.bias"] = part.output.bias
        return tensors

    def _restore(self, index: int, tensors: dict[str, Tensor]) -> None:
        self.given_up, self.repaired = bool(tensors["given_up"][0]), int(tensors["given_up"][1])
        for position, part in enumerate(self._block(index).parts):
            set_output(part, tensors[f"{position}.weight"], tensors.get(f"{position}.bias"))


def part_inputs(
    stream: Stream, block: Block, position: int, batch: int, residual: str
) -> tuple[Tensor, Tensor]:
    """What enters a part's output projection, and the residual its result is added to (before any norm)."""
    hidden = stream.hidden[batch]
    seen: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    part = block.parts[position]
    if position == 0:
        with watching(part.output.module, seen, stop=True):
            stream.run(block.module, block.index, batch)
        return seen["input"], hidden
    neighbour = part.writers[0].module if residual == "post" else block.parts[0].output.module
    with watching(part.output.module, seen, stop=True), watching(neighbour, before):
        stream.run(block.module, block.index, batch)
    # After the norm of a post-norm block the feed-forward reads the residual itself; before it, the sum so far.
    own = before["input"] if residual == "post" else before["output"].view(hidden.shape) + hidden
    return seen["input"], own.reshape(*seen["input"].shape[:-1], own.shape[-1])


@dataclass(frozen=True)
class _TeacherResult:
    output: Tensor
    sums: list[Tensor]  # for each part: residual plus what the part gives, the target of the student's


class _Teacher:
    """A copy of a block as it was. With an assistant's masks its stream is carried masked; the feed-forward's target
    has all its filters on that stream, as in the released code."""

    def __init__(self, module: nn.Module, block: Block, masks: dict[str, Tensor] | None, residual: str) -> None:
        prefix = len(block.path) + 1
        self.module, self.parts, self.residual = module, block.parts, residual
        self.outputs = [module.get_submodule(part.output.path[prefix:]) for part in block.parts]
        self.writer = module.get_submodule(block.parts[-1].writers[0].path[prefix:]) if block.parts[-1].writers else None
        self.masks = None if masks is None else [masks[part.name] for part in block.parts]

    def run(self, stream: Stream, index: int, batch: int) -> _TeacherResult:
        hidden = stream.hidden[batch]
        seen: list[dict[str, Tensor]] = [{} for _ in self.parts]
        writer: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(self._mask(position, seen[position]))
            for position, module in enumerate(self.outputs)
        ]
        try:
            with watching(self.outputs[0], seen[0]), watching(self.outputs[-1], seen[-1]):
                if self.writer is not None:
                    with watching(self.writer, writer):
                        output = stream.run(self.module, index, batch)
                else:
                    output = stream.run(self.module, index, batch)
        finally:
            for hook in hooks:
                hook.remove()
        first = hidden + seen[0]["output"].view(hidden.shape)
        if len(self.parts) == 1:
            return _TeacherResult(output, [first])
        rest = writer["input"].view(hidden.shape) if self.residual == "post" else first
        full = seen[-1]["output"] if self.masks is None else self.outputs[-1](seen[-1]["unmasked"])
        return _TeacherResult(output, [first, rest + full.view(hidden.shape)])

    def _mask(self, position: int, seen: dict[str, Tensor]) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if self.masks is None or "unmasked" in seen:
                return None
            seen["unmasked"] = args[0]
            return (apply_mask(self.parts[position], self.masks[position], args[0]), *args[1:])

        return hook


@dataclass(frozen=True)
class _Rows:
    """Which tokens count in a fit."""

    finisher: Finisher
    last: bool

    def select(self, mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
        """A flat boolean choice of rows, or None for all of them."""
        batch, tokens = shape
        if self.last and self.finisher.first_token_at_the_end:
            return _column(batch, tokens, 0)
        if mask is None and not self.finisher.skip_first_token:
            return None
        chosen = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask.cpu().clone()
        if self.finisher.skip_first_token:
            chosen[:, 0] = False
        return chosen.flatten()


def _column(batch: int, tokens: int, position: int) -> Tensor:
    chosen = torch.zeros(batch, tokens, dtype=torch.bool)
    chosen[:, position] = True
    return chosen.flatten()


def _masks(anatomy: Anatomy, choice: Choice) -> dict[str, Tensor]:
    masks = {}
    for part, kept in zip(anatomy.parts, choice, strict=True):
        mask = np.zeros(part.units, dtype=np.float32)
        mask[kept] = 1
        masks[part.name] = torch.from_numpy(mask).to(part.output.module.weight.device)
    return masks
