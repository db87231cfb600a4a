"""Base class of channel search: a supernet trains on one half of the data, its widths learn on the other, one is kept.

A method supplies the candidates, the loss of the widths and the rule by which candidates are added. The base class
supplies the supernet with its quantizers, both optimizers, checkpoints, the budgets, and the network that is derived.
The widths searched are those inside the residual blocks; the layers of a stage share the width between them, which
stays.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smelt.compression.base import (
    CalibrationSize,
    Method,
    MethodContext,
    ResourceEstimate,
    UndecidedWidth,
    within,
)
from smelt.compression.budget import Budget
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.channel_search.supernet import Supernet, WidthChoice
from smelt.compression.distillation.fake_quantize import init_activations
from smelt.compression.distillation.losses import Labels
from smelt.compression.distillation.quantizers import ActivationQuantizer, WeightQuantizer
from smelt.compression.distillation.quantizers.pact import Pact
from smelt.compression.distillation.quantizers.sawb import Sawb
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.training_run import remember_dtypes, restore_dtypes
from smelt.errors import BudgetError, DataError, DivergenceError, ModelError, RecipeError
from smelt.measure.cost import (
    CostMetric,
    CostTerm,
    Workload,
    block_parameters,
    convolution_cost_terms,
    evaluate_cost,
)
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.train.trainer.config import OptimizerConfig, ScheduleConfig, TrainConfig
from smelt.train.trainer.dataloader import ShuffledSampler
from smelt.train.trainer.optimizer import build_optimizer, lr_at, set_lr

MEASURES = ("macs", "parameters")
_STATE = "search"  # the checkpoint after an epoch


@dataclass(frozen=True)
class ChannelSearch(Method):
    """Search how many channels each convolution gets, with the quantizers that the network will be trained with."""

    budget: Budget = field(metadata={"example": "budget: {macs: 1.0}"})
    second_budget: Budget | None = None  # of the other measure, macs or parameters; null: it may not grow
    weights: WeightQuantizer = field(default_factory=Sawb)
    inputs: ActivationQuantizer | None = field(default_factory=Pact)  # null: activations stay in float
    exclude: tuple[str, ...] = ()  # layers whose path contains one of these stay in float, such as shortcut
    epochs: int = 30  # of the search, over half of the samples each for weights and widths
    batch_size: int = 256  # samples per step
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    )
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    width_lr: float = 1e-3  # of Adam for the logits of the widths; a short search needs 1e-2 or more
    width_weight_decay: float = 1e-3  # of the logits
    channel_multiple: int = 1  # widths are multiples of this; kernels of 2 bits like 32 or 64
    tolerance: float = 0.05  # by which both costs may fall short of their budgets
    augment: bool = True  # crop and flip images randomly

    needs: ClassVar[tuple[str, ...]] = ("calibration data", "labels")

    def __post_init__(self) -> None:
        measures = [budget.measure for budget in (self.budget, self.second_budget) if budget is not None]
        if not set(measures) <= set(MEASURES):
            raise RecipeError(f"the budgets of {self.name} are of macs and parameters, such as macs=1.0.")
        if len(set(measures)) < len(measures):
            raise RecipeError(
                f"both budgets of {self.name} limit {measures[0]}; give one of macs and one of parameters."
            )
        within(self.name, "epochs", self.epochs, 1, 100_000)
        within(self.name, "batch_size", self.batch_size, 2, 1_000_000)
        within(self.name, "width_lr", self.width_lr, 1e-6, 1.0)
        within(self.name, "width_weight_decay", self.width_weight_decay, 0.0, 1.0)
        within(self.name, "tolerance", self.tolerance, 0.0, 0.5)
        within(self.name, "channel_multiple", self.channel_multiple, 1, 1024)

    @property
    def budgets(self) -> dict[str, float]:
        """The fraction of each measure that may remain."""
        given = [budget for budget in (self.budget, self.second_budget) if budget is not None]
        return {**dict.fromkeys(MEASURES, 1.0), **{budget.measure: budget.keep for budget in given}}

    @abstractmethod
    def candidates(self, units: int) -> tuple[list[int], list[int]]:
        """Return the first candidate widths of a part, ascending, and those that may be added, one after another."""

    @abstractmethod
    def sample(self, run: ChannelSearchRun, step: int) -> None:
        """Choose the candidates of the next forward pass of all parts."""

    @abstractmethod
    def width_loss(self, run: ChannelSearchRun, loss: Tensor) -> Tensor:
        """Return what the widths minimize, [], from the loss on the half of the data that they learn on."""

    @abstractmethod
    def expand(self, run: ChannelSearchRun, epoch: int) -> list[str]:
        """Add candidates after an epoch; return the names of the parts that got one."""

    def check(self, anatomy: Anatomy) -> None:
        if quantized_layers(anatomy.network):
            raise ModelError(f"this model is quantized already; apply {self.name} to the model it was made from.")
        if not anatomy.parts or any(part.kind != "channels" for part in anatomy.parts):
            raise ModelError(
                f"{self.name} searches the channels of convolutions in residual blocks, as ResNets have; this is a "
                f"{anatomy.network.config.model_type} network."
            )
        if Model(anatomy.network).task != "images":
            raise ModelError(f"{self.name} trains with labels, and {type(anatomy.network).__name__} has no classifier.")
        for part in anatomy.parts:
            if part.units % self.channel_multiple:
                raise RecipeError(
                    f"channel_multiple of {self.name} is {self.channel_multiple}, which does not divide the "
                    f"{part.units} channels of {part.name}."
                )
            if any(getattr(each.module, "groups", 1) > 1 for each in (*part.input_projections, part.output)):
                raise ModelError(f"{self.name} cannot change the channels of the grouped convolutions of {part.path}.")
        self._check_reachable(anatomy, getattr(anatomy.network.config, "image_size", None) or Workload.image_size)

    def _check_reachable(self, anatomy: Anatomy, image_size: int) -> None:
        """Raise if even the smallest candidates exceed a budget."""
        units = [part.units for part in anatomy.parts]
        smallest = [self.candidates(count)[0][0] for count in units]
        for measure, keep in self.budgets.items():
            terms = _cost_terms(anatomy, measure, image_size)
            least = evaluate_cost(terms, smallest) / evaluate_cost(terms, units)
            if least > keep:
                raise BudgetError(
                    f"no widths of {self.name} reach {measure}={keep:g}: the smallest choices leave "
                    f"{100 * least:.1f} % of the {measure}; allow at least {measure}={math.ceil(100 * least) / 100:g}, "
                    "or give smaller choices."
                )

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        searched = {
            part.output.path: UndecidedWidth(self.channel_multiple, part.units, 1, self.name, "channel_multiple")
            for part in anatomy.parts
        }
        return {**undecided, **searched}

    @property
    def keeps_plain_shape(self) -> bool:
        return False

    def targets(self) -> dict[str, float]:
        return self.budgets

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        widest = max(
            (initial + added)[-1] / part.units
            for part in anatomy.parts
            for initial, added in [self.candidates(part.units)]
        )
        trained = 4 * sum(parameter.numel() for parameter in anatomy.network.parameters())
        activations = gradient_bytes(anatomy, self.batch_size, size.seq_len)
        return ResourceEstimate(passes=3.0 * self.epochs, memory=int(widest * (3 * trained + activations)))

    def to_json(self) -> dict[str, Any]:
        optimizer, schedule = dataclasses.asdict(self.optimizer), dataclasses.asdict(self.schedule)
        return {**super().to_json(), "optimizer": optimizer, "schedule": schedule}

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        if any("labels" not in batch for batch in context.batches):
            raise DataError(f"{self.name} trains on labels, and the data has none; name labeled data.")
        before, dtypes = block_parameters(model.anatomy), remember_dtypes(model.network)
        run = ChannelSearchRun(self, model, context)
        self._check_reachable(model.anatomy, run.image_size)
        facts = run.search()
        positions = run.fit_budgets()
        widths = run.derive(positions)
        restore_dtypes(model.network, dtypes)
        return {
            "parameters_removed": before - block_parameters(model.anatomy),
            "block_parameters_before": before,
            **{f"{measure}_kept": run.share(measure, positions) for measure in MEASURES},
            "widths": widths,
            **facts,
        }


class ChannelSearchRun:
    """What a search works with: the supernet and its choices, both halves of the data, and the costs of widths."""

    def __init__(self, method: ChannelSearch, model: Model, context: MethodContext) -> None:
        self.method, self.model, self.context = method, model, context
        self.device = context.device or model.device
        samples = Samples.from_batches(context.batches, self.device, augment=method.augment, seed=context.seed)
        if "pixel_values" not in samples.tensors:
            raise DataError(f"{method.name} trains on images; name a folder of images.")
        self.halves = samples.split(0.5)  # of the weights, and of the widths
        model.network.float().to(self.device).eval()
        anatomy = model.anatomy
        stated: int | None = getattr(anatomy.network.config, "image_size", None)
        self.image_size = stated or samples.tensors["pixel_values"].shape[-1]
        self.terms = {measure: _cost_terms(anatomy, measure, self.image_size) for measure in MEASURES}
        units = [part.units for part in anatomy.parts]
        self.costs_before = {measure: evaluate_cost(terms, units) for measure, terms in self.terms.items()}
        generator = torch.Generator().manual_seed(context.seed)
        self.choices = []
        for part in anatomy.parts:
            initial, added = method.candidates(part.units)
            self.choices.append(WidthChoice(part, [*initial, *added], len(initial), generator))

    def expected_share(self, measure: str) -> Tensor:
        """Return the expected cost of a network drawn from the probabilities, as a fraction of the cost before: [].

        Parts are independent, so that the expectation of a product of widths is the product of their expectations.
        """
        expected = [choice.expected() for choice in self.choices]
        share: Tensor = evaluate_cost(self.terms[measure], expected) / self.costs_before[measure]
        return share

    def share(self, measure: str, positions: Sequence[int]) -> float:
        """Return the cost with these candidates as a fraction of the cost before."""
        widths = [choice.candidates[position] for choice, position in zip(self.choices, positions, strict=True)]
        return float(evaluate_cost(self.terms[measure], widths)) / self.costs_before[measure]

    def best_share(self, measure: str) -> float:
        """Return the cost of the most probable candidates."""
        return self.share(measure, [choice.best for choice in self.choices])

    def search(self) -> dict[str, Any]:
        """Train weights and widths in turns, epoch by epoch, or resume after the last finished one; return facts."""
        self._prepare()
        epochs = range(self._load(), self.method.epochs)
        for epoch in self.context.progress.track(epochs, self.method.name):
            loss = self._train_epoch(epoch)
            facts = {
                "step": (epoch + 1) * self.steps_per_epoch,
                "loss": loss,
                "expansions": len(self.method.expand(self, epoch)),
                **{f"{measure}_kept": self.best_share(measure) for measure in MEASURES},
            }
            self.context.checkpoint.save_facts(f"epoch-{epoch}", facts)
            self._history.append(facts)
            self._save(epoch + 1)
        curves = ("loss", *(f"{measure}_kept" for measure in MEASURES))
        return {
            "final_loss": self._history[-1]["loss"],
            "expansions": sum(entry["expansions"] for entry in self._history),
            **{f"{name}_curve": [[entry["step"], entry[name]] for entry in self._history] for name in curves},
        }

    def fit_budgets(self) -> list[int]:
        """Return the most probable candidates that meet both budgets and come near to one.

        Starting from the most probable ones, parts are narrowed until both budgets are met, or widened while neither is
        nearly used: always the part that loses least probability for the cost it changes.
        """
        positions = [choice.best for choice in self.choices]
        while exceeded := [measure for measure in MEASURES if self.share(measure, positions) > self._keep(measure)]:
            positions = self._moved(positions, -1, exceeded)
        while self.is_small(positions):
            widened = self._moved(positions, 1, MEASURES)
            if widened == positions:
                break
            positions = widened
        return positions

    def is_small(self, positions: Sequence[int]) -> bool:
        """Return whether both costs are below the budgets by more than the tolerance."""
        near = 1 - self.method.tolerance
        return all(self.share(measure, positions) < near * self._keep(measure) for measure in MEASURES)

    def _moved(self, positions: list[int], step: int, measures: Sequence[str]) -> list[int]:
        """Return the candidates with one part a step narrower, or wider within the budgets; the same if none can be."""
        best, lowest = positions, math.inf
        for index, choice in enumerate(self.choices):
            moved = [*positions[:index], positions[index] + step, *positions[index + 1 :]]
            if not 0 <= moved[index] < choice.count:
                continue
            if step > 0 and any(self.share(measure, moved) > self._keep(measure) for measure in MEASURES):
                continue
            change = sum(abs(self.share(measure, moved) - self.share(measure, positions)) for measure in measures)
            logs = choice.probabilities.log().tolist()
            price = (logs[positions[index]] - logs[moved[index]]) / change
            if price < lowest:
                best, lowest = moved, price
        return best

    def _keep(self, measure: str) -> float:
        return self.method.budgets[measure]

    def derive(self, positions: Sequence[int]) -> dict[str, list[int]]:
        """Replace the supernet by a plain network with these candidates; return the width of each part, and before."""
        self.supernet.derive(positions)
        self.model.network.zero_grad()
        self.model.network.eval()
        widths = [choice.candidates[position] for choice, position in zip(self.choices, positions, strict=True)]
        return {choice.name: [choice.before, width] for choice, width in zip(self.choices, widths, strict=True)}

    def _prepare(self) -> None:
        """Build the supernet and both optimizers; quantizers are initialized on the first batch."""
        method, network, anatomy = self.method, self.model.network, self.model.anatomy
        parts = [each.path for part in anatomy.parts for each in (*part.input_projections, part.output)]
        paths = {id(module): path for path, module in network.named_modules() if isinstance(module, nn.Conv2d)}
        others = [paths[id(m)] for block in anatomy.blocks for m in block.module.modules() if id(m) in paths]
        kept = [path for path in others if path not in parts and not any(name in path for name in method.exclude)]
        torch.manual_seed(self.context.seed)  # of the new filters
        self.supernet = Supernet(anatomy, self.choices, method.weights, method.inputs, kept)
        self.supernet.choose([choice.candidates.index(choice.before) for choice in self.choices])
        weights, widths = self.halves
        first = {name: tensor[: method.batch_size] for name, tensor in weights.tensors.items()}
        init_activations(network, {"pixel_values": first["pixel_values"]})
        self.student = Student(network, (Labels(),), None).to(self.device).train()
        config = TrainConfig(model="network", optimizer=method.optimizer, batch_size=method.batch_size)
        self.optimizer = build_optimizer(self.student, config)
        for parameter in self.student.parameters():  # the fused optimizer wants one for candidates that are not drawn
            parameter.grad = torch.zeros_like(parameter)
        logits = [choice.logits for choice in self.choices]
        self.width_optimizer = torch.optim.Adam(
            logits, lr=method.width_lr, betas=(0.5, 0.999), weight_decay=method.width_weight_decay
        )
        self._samplers = [ShuffledSampler(len(half), self.context.seed + i) for i, half in enumerate((weights, widths))]
        self.steps_per_epoch = max(len(weights) // method.batch_size, 1)
        self._history: list[dict[str, Any]] = []

    def _train_epoch(self, epoch: int) -> float:
        """Train weights and widths in turns, a batch each; return the mean loss of the weights."""
        losses = []
        steps = self.steps_per_epoch * self.method.epochs
        for step in range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch):
            set_lr(self.optimizer, lr_at(step, steps, self.method.optimizer.lr, self.method.schedule))
            losses.append(self.train_weights(step))
            if not bool(self.train_widths(step).isfinite()):
                raise DivergenceError(
                    f"the loss of {self.method.name} is not finite in epoch {epoch + 1}; lower the learning rate."
                )
        return float(torch.stack(losses).mean())

    def train_weights(self, step: int) -> Tensor:
        """Step the weights with the candidates that are drawn for this step; return the loss, []."""
        self.method.sample(self, 2 * step)
        with torch.no_grad():
            for choice in self.choices:
                choice.weights = None if choice.weights is None else choice.weights.detach()
        loss: Tensor = self.student(**self._batch(0, step)).loss
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train_widths(self, step: int) -> Tensor:
        """Step the logits of the widths; return their loss, []."""
        self.method.sample(self, 2 * step + 1)
        loss = self.method.width_loss(self, self.student(**self._batch(1, step)).loss)
        logits = [choice.logits for choice in self.choices]
        for tensor, gradient in zip(logits, torch.autograd.grad(loss, logits), strict=True):
            tensor.grad = gradient
        self.width_optimizer.step()
        return loss.detach()

    def _batch(self, half: int, step: int) -> dict[str, Tensor]:
        """Return a batch of one half of the data; it and the random numbers of the pass depend on the step alone."""
        torch.manual_seed(self.context.seed * 1_000_003 + 2 * step + half)
        size = min(self.method.batch_size, len(self.halves[half]))
        return self.halves[half].batch(self._samplers[half].indices(step * size, size))

    def generator(self, number: int) -> torch.Generator:
        """Return the random numbers by which the candidates of a pass are drawn."""
        return torch.Generator().manual_seed(self.context.seed * 1_000_003 + number)

    def _save(self, epoch: int) -> None:
        """Save what the next epoch starts from."""
        tensors = {f"network.{name}": tensor for name, tensor in self.model.network.state_dict().items()}
        for name, optimizer in self._optimizers().items():
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{name}.{index}.{key}": torch.as_tensor(value) for key, value in state.items()
                            if value is not None}  # fmt: skip
        tensors |= {f"logits.{index}": choice.logits for index, choice in enumerate(self.choices)}
        tensors["counts"] = torch.tensor([choice.count for choice in self.choices])
        tensors["epoch"] = torch.tensor(epoch)
        self.context.checkpoint.save(_STATE, {name: tensor.clone() for name, tensor in tensors.items()})

    def _load(self) -> int:
        """Load what an interrupted search has saved; return the epoch to go on with."""
        saved = self.context.checkpoint.load(_STATE)
        if saved is None:
            return 0
        epoch = int(saved["epoch"])
        self.model.network.load_state_dict(_inside(saved, "network."))
        for name, optimizer in self._optimizers().items():
            state: dict[int, dict[str, Any]] = {}
            for key, tensor in _inside(saved, f"{name}.").items():
                number, _, entry = key.partition(".")
                state.setdefault(int(number), {})[entry] = tensor
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for index, choice in enumerate(self.choices):
            choice.count = int(saved["counts"][index])
            with torch.no_grad():
                choice.logits.copy_(saved[f"logits.{index}"])
        load: Callable[[str], dict[str, Any] | None] = self.context.checkpoint.load_facts
        self._history = [facts for number in range(epoch) if (facts := load(f"epoch-{number}")) is not None]
        return epoch

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"weights": self.optimizer, "widths": self.width_optimizer}


def _cost_terms(anatomy: Anatomy, measure: str, image_size: int) -> list[CostTerm]:
    metric: CostMetric = "macs" if measure == "macs" else "parameters"
    return convolution_cost_terms(anatomy, metric, Workload(image_size=image_size))


def _inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
