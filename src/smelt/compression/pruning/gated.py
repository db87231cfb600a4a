"""Base class of pruning by learned gates: train gates with the weights, decide which units stay, cut, check the result.

A method supplies the gates and the term of the loss that closes them. The base class supplies the training loop of
`smelt.train` with its checkpoints, the budget, surgery, and the facts about the run.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from smelt.compression.allocation.unit_search import Candidates, KeptUnits, search_threshold
from smelt.compression.base import Batch, MethodContext, UndecidedWidth, within
from smelt.compression.budget import Budget
from smelt.compression.calibration.masks import apply_mask
from smelt.compression.distillation.losses import Labels, LossTerm
from smelt.compression.distillation.network_training import VALIDATION, LogitDistillation
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import NetworkTeacher, Student
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.compression.distillation.training_run import remember_dtypes, restore_dtypes
from smelt.compression.pruning.repair import cut
from smelt.compression.pruning.selection import checkpointed_selection
from smelt.errors import BudgetError, ModelError, RecipeError
from smelt.measure.cost import block_parameters, unit_parameters
from smelt.models.anatomy import Anatomy, Part
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.surgery import scale_units
from smelt.models.token_pruning import refuse_token_pruning
from smelt.train.trainer.config import OptimizerConfig, ScheduleConfig
from smelt.train.trainer.tasks import TrainingTask

MAX_REMOVAL_ERROR = 1e-3  # of logits after surgery, relative to the largest logit
GATE_TRAVEL = 20.0  # of a logit over a training in which it always goes the same way
MAX_GATE_LR = 0.2
MEASURES = ("heads", "parameters")


class Gates(nn.Module):
    """The gates of the heads of one layer: a logit each, [units], which is positive where the head is to stay."""

    kept: Tensor  # the decision, [units] of bool
    decided = False  # whether the decision holds; on the host, so that nothing waits for the device

    def __init__(self, units: int, initial_logit: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.full((units,), initial_logit))
        self.register_buffer("kept", torch.ones(units, dtype=torch.bool))  # checkpoints contain it

    def decide(self, kept: np.ndarray) -> None:
        """Open the gates of these units for good, and close the others."""
        self.kept.zero_()
        self.kept[torch.from_numpy(kept).to(self.kept.device)] = True
        self.decided = True

    def forward(self) -> Tensor:
        """Return the factor of each unit, [units]: random until decided in training, else 0 or that of an open gate."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GatedPruning(LogitDistillation):
    """Train gates on the heads together with the weights, and remove the heads whose gates close."""

    budget: Budget | None = field(  # of heads or parameters that stay; null: the coefficient decides
        default=None, metadata={"example": "budget: {heads: 0.5}"}
    )
    coefficient: float | None = None  # of the penalty per open head; null: adapted to the budget
    min_heads: int = 1  # heads (or KV groups) that every layer keeps; 0: a layer may lose all and add nothing
    head_multiple: int = 1  # keep heads (or KV groups) in multiples of this
    losses: tuple[LossTerm, ...] = (Labels(),)  # terms that are added up, beside the penalty
    epochs: float = 20.0  # over the samples of the recipe's data
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4))
    gate_training: float = 0.5  # fraction of the training after which gates are fixed and the weights train on; 1: none
    gate_lr: float | None = None  # learning rate of the gates; null: 20 over their steps, so that all can close in time
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(name="constant"))
    max_grad_norm: float | None = 0.5  # gradients of a larger norm are scaled down to it; null: never
    checkpoint_every: int = 500  # steps

    needs: ClassVar[tuple[str, ...]] = ("calibration data",)

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.coefficient is None):
            raise RecipeError(
                f"{self.name} takes either a budget, such as heads=0.5, or a `coefficient`, such as 0.02."
            )
        if self.budget is not None and self.budget.measure not in MEASURES:
            raise RecipeError(f"{self.name} removes heads; give a budget of heads or parameters, such as heads=0.5.")
        if self.budget is not None and self.budget.keep == 1:
            raise RecipeError(f"{self.name} would remove nothing with {self.budget.measure}=1; give less than 1.")
        if self.coefficient is not None and not 0 < self.coefficient <= 1e6:
            raise RecipeError(f"coefficient of {self.name} must be above 0, not {self.coefficient!r}.")
        within(self.name, "min_heads", self.min_heads, 0, 4096)
        within(self.name, "head_multiple", self.head_multiple, 1, 1024)
        within(self.name, "gate_training", self.gate_training, 0.01, 1.0)
        if self.gate_lr is not None:
            within(self.name, "gate_lr", self.gate_lr, 1e-8, 10.0)
        super().__post_init__()

    @abstractmethod
    def make_gates(self, part: Part) -> Gates:
        """Return the gates of a layer."""

    @abstractmethod
    def penalty(self, gates: Sequence[Gates], costs: Sequence[float], state: Tensor) -> Tensor:
        """Return the term of the loss that closes gates, []; `costs` are those of one unit of each layer."""

    @abstractmethod
    def new_state(self) -> Tensor:
        """Return what the penalty keeps from step to step, such as a multiplier; checkpoints contain it."""

    @abstractmethod
    def update_state(
        self, state: Tensor, gates: Sequence[Gates], costs: Sequence[float], target: float | None, step: int, steps: int
    ) -> None:
        """Change the state in place before a step; `target` is the share of the gates' cost that the budget leaves."""

    def check(self, anatomy: Anatomy) -> None:
        if quantized_layers(anatomy.network):
            raise ModelError("this model is already quantized; prune its source model, then quantize the result.")
        refuse_token_pruning(anatomy.network, f"{self.name} trains with all tokens")
        parts = gated_parts(anatomy)
        if not parts:
            fixed = next((part.fixed for part in anatomy.parts if part.kind == "heads" and part.fixed), None)
            why = f", because its heads {fixed}" if fixed else ""
            raise ModelError(
                f"{self.name} needs attention heads that can be removed, and this {anatomy.family.name} network has "
                f"none{why}."
            )
        if self.budget is not None:
            self._check_reachable(anatomy, parts)

    def _check_reachable(self, anatomy: Anatomy, parts: Sequence[Part]) -> None:
        assert self.budget is not None
        costs = self._costs(parts)
        fixed = self._fixed_cost(anatomy, parts, costs)
        total = fixed + sum(cost * part.units for cost, part in zip(costs, parts, strict=True))
        least = fixed + sum(cost * self._required(part) for cost, part in zip(costs, parts, strict=True))
        if least > self.budget.keep * total * (1 + 1e-9):
            raise BudgetError(
                f"{self.name} cannot reach {self.budget.measure}={self.budget.keep:g}: "
                f"{math.ceil(1000 * least / total) / 10:g} % remain if every layer keeps as few heads as it can; allow "
                f"more{', or lower `min_heads`' if self.min_heads else ''}."
            )

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        anatomy = model.anatomy
        self.check(anatomy)
        self.check_labels(context.batches)
        before, parts = block_parameters(anatomy), gated_parts(anatomy)
        dtypes, device = remember_dtypes(model.network), context.device or model.device
        teacher = None if self.teacher is None else DenseTeacher(copy.deepcopy(model.network).to(device))
        model.network.float().to(device)
        gates = [self.make_gates(part).to(device) for part in parts]
        samples = Samples.from_batches(context.batches, device, augment=False, seed=context.seed)
        with gated(parts, gates):
            facts = self._train_gates(model, gates, teacher, samples, context)
            choice = checkpointed_selection(context, anatomy, "choice", lambda: self.choose(anatomy, gates))
            self.decide(anatomy, gates, choice)
            kept_units = {part.name: kept for part, kept in zip(anatomy.parts, choice, strict=True)}
            first = {name: tensor[: self.batch_size] for name, tensor in samples.tensors.items()}
            logits = _logits(model, first)
        facts["removal_error"] = self._remove(model, parts, gates, choice, first, logits)
        restore_dtypes(model.network, dtypes)
        removed = before - block_parameters(model.anatomy)
        if removed <= 0:
            raise BudgetError(
                f"{self.name} removed nothing, as all gates stayed open; raise `coefficient`, `gate_lr` or `epochs`."
            )
        return {
            "parameters_removed": removed,
            "block_parameters_before": before,
            "heads_per_layer": [len(kept_units[part.name]) for part in parts],
            "heads_kept": sum(len(kept_units[part.name]) for part in parts) / sum(part.units for part in parts),
            "gate_logits": [[round(value, 3) for value in gate.logits.tolist()] for gate in gates],
            **facts,
        }

    def choose(self, anatomy: Anatomy, gates: Sequence[Gates]) -> KeptUnits:
        """Return the units to keep of every part: the open gates, or the largest logits that the budget allows."""
        parts = gated_parts(anatomy)
        if all(gate.decided for gate in gates):
            kept = [gate.kept.nonzero()[:, 0].cpu().numpy() for gate in gates]
        elif self.budget is not None:
            costs = self._costs(parts)
            candidates = [
                Candidates("heads", _numpy(gate.logits), cost, self.min_units(part), self.head_multiple)
                for gate, cost, part in zip(gates, costs, parts, strict=True)
            ]
            fixed = self._fixed_cost(anatomy, parts, costs)
            total = fixed + sum(cost * part.units for cost, part in zip(costs, parts, strict=True))
            kept = search_threshold(candidates, self.budget.keep * total - fixed)
        else:
            kept = [self._open(part, _numpy(gate.logits)) for part, gate in zip(parts, gates, strict=True)]
        choice = dict(zip((part.name for part in parts), kept, strict=True))
        return [choice.get(part.name, np.arange(part.units)) for part in anatomy.parts]

    def decide(self, anatomy: Anatomy, gates: Sequence[Gates], choice: KeptUnits) -> None:
        """Open and close the gates for good."""
        kept_units = {part.name: kept for part, kept in zip(anatomy.parts, choice, strict=True)}
        for gate, part in zip(gates, gated_parts(anatomy), strict=True):
            gate.decide(kept_units[part.name])

    def _open(self, part: Part, logits: np.ndarray) -> np.ndarray:
        """Return the units whose gates are open, and as many more as a layer has to keep."""
        count = max(int((logits >= 0).sum()), self.min_units(part))
        count = min(-(-count // self.head_multiple) * self.head_multiple, part.units)
        return np.sort(np.argsort(-logits, kind="stable")[:count])

    def min_units(self, part: Part) -> int:
        """Return the number of units that a layer keeps at least."""
        stays = part.attention is not None and not part.attention.removable
        return min(max(self.min_heads, 1 if stays else 0), part.units)

    def _required(self, part: Part) -> int:
        return min(-(-self.min_units(part) // self.head_multiple) * self.head_multiple, part.units)

    def _costs(self, parts: Sequence[Part]) -> list[float]:
        by_heads = self.budget is None or self.budget.measure == "heads"
        return [1.0 if by_heads else float(unit_parameters(part)) for part in parts]

    def _fixed_cost(self, anatomy: Anatomy, parts: Sequence[Part], costs: Sequence[float]) -> float:
        """Return the cost of what no gate can remove."""
        if self.budget is None or self.budget.measure == "heads":
            return 0.0
        return block_parameters(anatomy) - sum(cost * part.units for cost, part in zip(costs, parts, strict=True))

    def target(self, anatomy: Anatomy) -> float | None:
        """Return the share of the gated units' cost that the budget leaves; None without a budget."""
        if self.budget is None:
            return None
        parts = gated_parts(anatomy)
        costs = self._costs(parts)
        units = sum(cost * part.units for cost, part in zip(costs, parts, strict=True))
        fixed = self._fixed_cost(anatomy, parts, costs)
        return max((self.budget.keep * (fixed + units) - fixed) / units, 0.0)

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        """Cut one step from every layer; how many heads stay is decided in the run."""
        widths, choice = dict(undecided), []
        names = {part.name for part in gated_parts(anatomy)}
        for part in anatomy.parts:
            if part.name not in names or self._required(part) == part.units:
                choice.append(np.arange(part.units))
                continue
            path, per_unit = part.output.path, part.columns_per_unit
            largest = undecided[path].multiple if path in undecided else part.output.in_features
            certain = math.gcd(self.head_multiple * per_unit, largest)
            widths[path] = UndecidedWidth(certain, largest, per_unit, self.name, "head_multiple")
            below = (part.units - 1) // self.head_multiple * self.head_multiple
            choice.append(np.arange(max(below, self._required(part))))
        cut(anatomy.network, choice)
        return widths

    @property
    def keeps_plain_shape(self) -> bool:
        return False

    def targets(self) -> dict[str, float]:
        return {} if self.budget is None else self.budget.to_json()

    def added_parameters(self, anatomy: Anatomy) -> int:
        """Return minus the parameters that certainly leave, by a budget of heads."""
        if self.budget is None or self.budget.measure != "heads":
            return 0
        parts = gated_parts(anatomy)
        removed = math.ceil((1 - self.budget.keep) * sum(part.units for part in parts) - 1e-9)
        return -removed * min(unit_parameters(part) for part in parts)

    def _train_gates(
        self, model: Model, gates: Sequence[Gates], teacher: NetworkTeacher | None, samples: Samples,
        context: MethodContext,
    ) -> dict[str, Any]:  # fmt: skip
        """Train weights and gates together; return facts about the training."""
        train, validation = samples.split(VALIDATION)
        steps = self.steps(len(train))
        costs, target = self._costs(gated_parts(model.anatomy)), self.target(model.anatomy)
        gate_steps = math.ceil(self.gate_training * steps)
        gate_lr = min(GATE_TRAVEL / gate_steps, MAX_GATE_LR) if self.gate_lr is None else self.gate_lr
        for gate in gates:
            gate.logits.lr_scale = gate_lr / self.optimizer.lr  # type: ignore[attr-defined]
        student = GatedStudent(model.network, self, teacher, gates, costs)
        device, num_labels = samples.device, getattr(model.network.config, "num_labels", 0)

        def on_step(step: int) -> None:
            if step == gate_steps:
                self.decide(model.anatomy, gates, self.choose(model.anatomy, gates))
            student.start_step(target, step, gate_steps)

        task = TrainingTask(
            student.to(device), train, validation, model.task in ("classification", "images") and num_labels > 1,
            log_values=student.log_values, on_step=on_step,
            saves_model=False,
        )  # fmt: skip
        facts = self.train(task, model, context, device)
        model.network.eval()
        student.eval()
        return facts

    @torch.no_grad()
    def _remove(
        self, model: Model, parts: Sequence[Part], gates: Sequence[Gates], choice: KeptUnits, first: Batch,
        logits: Tensor,
    ) -> float:  # fmt: skip
        """Fold what open gates scale by into the output projections, cut, and return the relative error of logits."""
        for part, gate in zip(parts, gates, strict=True):
            scale_units(part, gate())
        cut(model.network, choice)
        error = float((_logits(model, first) - logits).abs().max() / logits.abs().max().clamp(min=1e-12))
        if not error <= MAX_REMOVAL_ERROR:
            raise ModelError(f"the pruned network's logits differ by {error:.1e} of the largest; this is a bug.")
        return error


class GatedStudent(Student):
    """A network that trains with gates, and the penalty that closes them."""

    penalty_state: Tensor

    def __init__(
        self, network: Any, method: GatedPruning, teacher: NetworkTeacher | None, gates: Sequence[Gates],
        costs: Sequence[float],
    ) -> None:  # fmt: skip
        super().__init__(network, method.losses, teacher)
        self.gates: Any = nn.ModuleList(gates)
        self._method, self._costs = method, costs
        self.register_buffer("penalty_state", method.new_state())

    @torch.no_grad()
    def start_step(self, target: float | None, step: int, gate_steps: int) -> None:
        """Update the state of the penalty in place, where a captured step reads it; after the gates' steps it is 0."""
        if step < gate_steps:
            self._method.update_state(self.penalty_state, self.gates, self._costs, target, step, gate_steps)
            return
        self.penalty_state.zero_()
        for gate in self.gates:  # of a resumed run, too
            gate.decided = True

    def graph_state(self) -> Hashable:
        state = super().graph_state()
        return None if state is None else (state, self.gates[0].decided)

    def penalty(self) -> Tensor | float:
        return self._method.penalty(self.gates, self._costs, self.penalty_state)

    def log_values(self) -> dict[str, float]:
        """Return the fraction of open gates."""
        opened = torch.cat([gate.kept if gate.decided else gate.logits.detach() >= 0 for gate in self.gates])
        return {"open_gates": float(opened.float().mean())}


@contextmanager
def gated(parts: Sequence[Part], gates: Sequence[Gates]) -> Iterator[None]:
    """Multiply the output of each head by its gate inside the context, before the output projection reads it."""

    def multiply(part: Part, gate: Gates) -> Any:
        return lambda _, args: (apply_mask(part, gate(), args[0]), *args[1:])

    hooks = [
        part.output.module.register_forward_pre_hook(multiply(part, gate))
        for part, gate in zip(parts, gates, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gated_parts(anatomy: Anatomy) -> list[Part]:
    """Return the parts with heads that can be removed."""
    return [part for part in anatomy.parts if part.kind == "heads" and part.units and part.fixed is None]


def _numpy(logits: Tensor) -> np.ndarray:
    values: np.ndarray = logits.detach().double().cpu().numpy()
    return values


@torch.no_grad()
def _logits(model: Model, batch: Batch) -> Tensor:
    reads_labels = getattr(model.network.config, "is_encoder_decoder", False)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels" or reads_labels}
    logits: Tensor = model.network(**inputs).logits
    return logits.float()
