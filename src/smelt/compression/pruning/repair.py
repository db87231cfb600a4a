"""Repair after pruning: cut block by block and fit each output projection to a teacher.

Two copies of the hidden states advance side by side: the student's through blocks already cut and repaired, the
teacher's through the original blocks. Memory holds one block's activations; each finished block is checkpointed, so a
resumed run repeats only forward passes.

`tune` fits one scale per kept unit by least squares (Kwon et al., 2022). Its solver `lsmr` is the published one: LSMR
on the normal equations with damping 1, accepted only if it converges to scales within [-10, 10]. `ridge` solves the
same equations with damping relative to their scale, independent of the number of tokens. `full` refits the projection.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor, nn

from smelt.compression.allocation.unit_search import KeptUnits
from smelt.compression.base import MethodContext
from smelt.compression.calibration.block_inputs import (
    ActivationStore,
    BlockInputs,
    advance,
    capture_block_inputs,
    record_io,
)
from smelt.compression.calibration.least_squares import NormalEquations, unit_equations
from smelt.compression.calibration.masks import apply_mask
from smelt.errors import DataError
from smelt.models.anatomy import Anatomy, Block, Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.families import Residual
from smelt.models.model import Model
from smelt.models.surgery import keep_units, scale_units, set_output

ACTIVATION_COPIES = 3  # student, teacher and targets share the memory limit


@dataclass(frozen=True)
class RepairSettings:
    """How output projections are repaired: `tune` (one scale per unit) or `full` (refit the projection)."""

    mode: str
    solver: str = "lsmr"
    damping: float = 0.1
    intercept: bool = True
    skip_first_token: bool = False  # a decoder's huge activations there would dominate the fit
    first_token_at_the_end: bool = False  # a classifier reads only the first token of the last block
    published: bool = False  # as released: skip the first attention, stop at the first failed solve


def cut(network: nn.Module, choice: KeptUnits) -> None:
    """Remove all units but the selected ones, without repair."""
    for part, kept in zip(anatomy_of(network).parts, choice, strict=True):
        keep_units(network, part, kept.tolist())


@torch.no_grad()
def cut_and_repair(
    model: Model,
    choice: KeptUnits,
    settings: RepairSettings,
    context: MethodContext,
    assistant: KeptUnits | None = None,
) -> dict[str, Any]:
    """Cut every block and fit it to the teacher: the dense model, or the larger `assistant` selection."""
    if not context.batches:
        raise DataError(f"repair: {settings.mode} needs calibration data, and there is none.")
    work = _Repair(model, choice, settings, context, assistant)
    for index in context.progress.track(range(len(model.anatomy.blocks)), f"repair ({settings.mode})"):
        work.repair_block(index)
    return {"repaired": work.repaired, "gave_up": work.gave_up}


class _Repair:
    """The hidden states of student and teacher, and the progress of the repair."""

    def __init__(
        self,
        model: Model,
        choice: KeptUnits,
        settings: RepairSettings,
        context: MethodContext,
        assistant: KeptUnits | None,
    ) -> None:
        self.model, self.settings, self.checkpoint = model, settings, context.checkpoint
        anatomy = model.anatomy
        self.residual = anatomy.residual
        self.kept = {part.name: kept.tolist() for part, kept in zip(anatomy.parts, choice, strict=True)}
        self.teacher_masks = None if assistant is None else _masks(anatomy, assistant)
        limit = None if context.memory_limit is None else context.memory_limit // ACTIVATION_COPIES
        self.student = capture_block_inputs(anatomy, context.batches, limit=limit, folder=context.folder)
        self.teacher = self.student.copy(limit, context.folder)
        self.targets = ActivationStore(limit, context.folder)  # what the last part of the block should reach
        self.repaired = 0
        self.gave_up = False

    def repair_block(self, index: int) -> None:
        """Cut and repair a block, or restore it from the checkpoint; then advance teacher and student."""
        teacher = Teacher(self._block(index), self.residual, self.teacher_masks)
        for position in range(len(self._block(index).parts)):
            part = self._block(index).parts[position]
            keep_units(self.model.network, part, self.kept[part.name])
        name = f"block-{index:03d}"
        done = self.checkpoint.load(name)
        if done is None:
            self._repair(index, teacher)
            self.checkpoint.save(name, self._repaired_tensors(index))
        else:
            self._restore(index, done)
            for batch in range(len(self.teacher)):
                self._run_teacher(teacher, index, batch)
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
                target = self._run_teacher(teacher, index, batch) if position == 0 else self.targets[batch]
                if part.units and not self.gave_up:
                    self._collect(block, position, batch, target, equations, rows)
            skipped = self.settings.published and index == 0 and part.kind == "heads"
            if part.units and not self.gave_up and not skipped:
                self._solve(part, equations)

    def _run_teacher(self, teacher: Teacher, index: int, batch: int) -> Tensor:
        """Advance the teacher; store the target of the last part, return that of the first."""
        result = teacher.run(self.teacher, index, batch)
        self.teacher.hidden[batch] = result.output
        self.targets[batch] = result.sums[-1]
        return result.sums[0]

    def _collect(
        self, block: Block, position: int, batch: int, target: Tensor, equations: NormalEquations, rows: _Rows
    ) -> None:
        """Add a batch's rows: the inputs of the part's projection, and its target contribution to the residual."""
        inputs, residual = repair_inputs(self.student, block, position, batch, self.residual)
        targets = target.reshape(residual.shape) - residual
        bias = block.parts[position].output.bias
        fits_bias = self.settings.mode == "full" and self.settings.intercept
        if bias is not None and not fits_bias:
            targets = targets - bias
        selected = rows.select(self.student.masks[batch], self.student.hidden[batch].shape[:2])
        inputs, targets = inputs.flatten(0, -2), targets.flatten(0, -2)
        if selected is not None:
            selected = selected.to(inputs.device)
            inputs, targets = inputs[selected], targets[selected]
        equations.add(inputs, targets)

    def _solve(self, part: Part, equations: NormalEquations) -> None:
        settings = self.settings
        if settings.mode == "full":
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
                self.gave_up = settings.published
                return
            scale_units(part, scales)
        self.repaired += 1

    def _repaired_tensors(self, index: int) -> dict[str, Tensor]:
        tensors = {"progress": torch.tensor([self.gave_up, self.repaired], dtype=torch.int64)}
        for position, part in enumerate(self._block(index).parts):
            tensors[f"{position}.weight"] = part.output.weight
            if part.output.bias is not None:
                tensors[f"{position}.bias"] = part.output.bias
        return tensors

    def _restore(self, index: int, tensors: dict[str, Tensor]) -> None:
        self.gave_up, self.repaired = bool(tensors["progress"][0]), int(tensors["progress"][1])
        for position, part in enumerate(self._block(index).parts):
            set_output(part, tensors[f"{position}.weight"], tensors.get(f"{position}.bias"))


def repair_inputs(
    block_inputs: BlockInputs, block: Block, position: int, batch: int, residual: Residual
) -> tuple[Tensor, Tensor]:
    """Return the inputs of a part's output projection, and the residual its output is added to (before any norm)."""
    part, hidden = block.parts[position], block_inputs.hidden[batch]
    recorded: dict[str, Tensor] = {}
    if position == 0:
        with record_io(part.output.module, recorded, stop=True):
            block_inputs.run(block.module, block.index, batch)
        return recorded["input"], hidden
    earlier: dict[str, Tensor] = {}
    neighbor = part.input_projections[0].module if residual == "post" else block.parts[0].output.module
    with record_io(part.output.module, recorded, stop=True), record_io(neighbor, earlier):
        block_inputs.run(block.module, block.index, batch)
    # A post-norm feed-forward reads its own residual; before a pre-norm one the residual is the sum so far.
    own = earlier["input"] if residual == "post" else earlier["output"].view(hidden.shape) + hidden
    return recorded["input"], own.reshape(*recorded["input"].shape[:-1], own.shape[-1])


@dataclass(frozen=True)
class _Rows:
    """Which tokens are used in a fit."""

    settings: RepairSettings
    last: bool

    def select(self, mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
        """Return a flat boolean mask of rows, or None for all of them."""
        batch, tokens = shape
        if self.last and self.settings.first_token_at_the_end:
            return (torch.arange(batch * tokens) % tokens) == 0
        if mask is None and not self.settings.skip_first_token:
            return None
        selected = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask.cpu().clone()
        if self.settings.skip_first_token:
            selected[:, 0] = False
        return selected.flatten()


def _masks(anatomy: Anatomy, choice: KeptUnits) -> dict[str, Tensor]:
    masks = {}
    for part, kept in zip(anatomy.parts, choice, strict=True):
        mask = np.zeros(part.units, dtype=np.float32)
        mask[kept] = 1
        masks[part.name] = torch.from_numpy(mask).to(part.output.device)
    return masks


MAX_SCALE = 10.0


def tune_scales(
    equations: NormalEquations, weight: Tensor, width: int, *, solver: str, damping: float, intercept: bool
) -> Tensor | None:
    """Return one scale per unit (mask tuning, Kwon et al., 2022), or None where the published solver fails."""
    gram, right = unit_equations(equations, weight, width)
    if intercept:
        gram, right = _with_intercept(gram, right, equations, weight, width)
    residual = right - gram.sum(1)
    change = lsmr_solve(gram, residual) if solver == "lsmr" else ridge_solve(gram, residual, damping)
    if change is None:
        return None
    scales = 1 + (change[:-1] if intercept else change)
    if solver == "lsmr" and float(scales.abs().max()) > MAX_SCALE:
        return None
    return scales


def lsmr_solve(gram: Tensor, right: Tensor) -> Tensor | None:
    """(G^2 + I)^-1 G r by LSMR in float32, or None when it does not converge."""
    if len(right) == 1:
        return right / gram[0, 0]
    matrix = gram.float()

    def product(vector: np.ndarray) -> np.ndarray:
        result: np.ndarray = (matrix @ torch.from_numpy(vector.ravel()).to(matrix)).cpu().numpy()
        return result

    operator = LinearOperator(tuple(matrix.shape), matvec=product, rmatvec=product, dtype=np.float32)
    with np.errstate(over="ignore"):  # its running estimate of the condition may leave float32
        solution, stop, *_ = lsmr(operator, right.float().cpu().numpy(), damp=1.0, atol=1e-6, btol=1e-6, conlim=1e8)
    return torch.from_numpy(np.asarray(solution)).to(gram) if stop in (0, 1, 2) else None


def ridge_solve(gram: Tensor, right: Tensor, damping: float) -> Tensor:
    """(G + damping * mean(diag G) * I)^-1 r."""
    ridge = damping * gram.diagonal().mean()
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), right)


def _with_intercept(
    gram: Tensor, right: Tensor, equations: NormalEquations, weight: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Add a column of ones: a common offset that is fitted and discarded."""
    contributions = (equations.input_sum * weight.double().sum(0)).view(-1, width).sum(1)  # [units]
    entries = equations.rows * weight.shape[0]
    corner = torch.tensor([float(entries)], dtype=gram.dtype, device=gram.device)
    gram = torch.cat([torch.cat([gram, contributions[:, None]], 1), torch.cat([contributions, corner])[None]], 0)
    return gram, torch.cat([right, equations.target_sum.sum()[None]])


def reconstruct(
    equations: NormalEquations, weight: Tensor, *, damping: float, intercept: bool
) -> tuple[Tensor, Tensor | None]:
    """Solve for the whole output projection (K-prune, SlimGPT, FASP); return weight [outputs, inputs] and bias.

    W' = argmin ||H W' - B||^2 + lambda ||W' - W||^2 with lambda = damping * mean(diag H'H): a ridge toward the current
    weights. With an intercept the bias is fitted too.
    """
    gram, cross = equations.centered() if intercept else (equations.gram, equations.cross)
    old = weight.double().T  # [inputs, outputs]
    ridge = damping * gram.diagonal().mean().clamp(min=1e-12)
    system = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed.item():  # rounding errors of a matrix that should be zero
        raise DataError(
            "the calibration data gives nearly the same activations everywhere, so the repair has nothing to fit: "
            "give more varied data, or set `repair: none`."
        )
    new = old + torch.cholesky_solve(cross - gram @ old, factor)
    if not intercept:
        return new.T, None
    bias = (equations.target_sum - equations.input_sum @ new) / max(equations.rows, 1)
    return new.T, bias


@dataclass(frozen=True)
class TeacherOutput:
    """The teacher's results on one batch: the block's output, and for each part the residual plus its output."""

    output: Tensor
    sums: list[Tensor]


class Teacher:
    """A copy of a block before it was cut.

    With an assistant's masks its hidden states are masked; the feed-forward target then has all FFN channels on those
    states, as in the released code.
    """

    def __init__(self, block: Block, residual: Residual, masks: dict[str, Tensor] | None = None) -> None:
        inside = len(block.path) + 1
        self.module = copy.deepcopy(block.module)
        self.parts, self.residual = block.parts, residual
        self.outputs = [self.module.get_submodule(part.output.path[inside:]) for part in block.parts]
        projections = block.parts[-1].input_projections
        self.last_input_projection = self.module.get_submodule(projections[0].path[inside:]) if projections else None
        self.masks = None if masks is None else [masks[part.name] for part in block.parts]

    def run(self, block_inputs: BlockInputs, index: int, batch: int) -> TeacherOutput:
        """Run the block on the current hidden states."""
        hidden = block_inputs.hidden[batch]
        recorded: list[dict[str, Tensor]] = [{} for _ in self.parts]
        last_input: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for position, module in enumerate(self.outputs):
                stack.enter_context(record_io(module, recorded[position]))
                if self.masks is not None:
                    hook = module.register_forward_pre_hook(self._mask_hook(position))
                    stack.callback(hook.remove)
            if self.last_input_projection is not None:
                stack.enter_context(record_io(self.last_input_projection, last_input))
            output = block_inputs.run(self.module, index, batch)
        first = hidden + recorded[0]["output"].view(hidden.shape)
        if len(self.parts) == 1:
            return TeacherOutput(output, [first])
        before = last_input["input"].view(hidden.shape) if self.residual == "post" else first
        full = recorded[-1]["output"] if self.masks is None else self.outputs[-1](recorded[-1]["input"])
        return TeacherOutput(output, [first, before + full.view(hidden.shape)])

    def _mask_hook(self, position: int) -> Any:
        """Return a hook that runs after the recording one, so that recorded values are unmasked."""
        assert self.masks is not None
        part, mask = self.parts[position], self.masks[position]

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (apply_mask(part, mask, args[0]), *args[1:])

        return hook
