"""The contract of a compression method, and the registry of all methods.

A method is a frozen dataclass of checked parameters with one verb, `apply`. It declares what it needs, so that a
missing input is one sentence before any work starts. To add one, see docs/adding-a-method.md.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from smelt.compression.checkpoint import Checkpoint
from smelt.errors import RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.models.quantization_scheme import LinearGroupSpec
from smelt.progress import NullProgress, Progress
from smelt.registry import Registry

Batch = dict[str, Tensor]


class Choices:
    """What the searches of a step decided, as JSON data by name.

    A repeated run takes the `recorded` choices of the first one, because a search that measures the machine could
    decide differently.
    """

    def __init__(self, recorded: Mapping[str, Any] | None = None) -> None:
        self._recorded = dict(recorded or {})
        self.made: dict[str, Any] = {}

    def recorded(self, name: str) -> Any:
        """Return the choice to repeat, or None if the search is to decide; it comes from a file, so check it."""
        return self._recorded.get(name)

    def record(self, name: str, choice: Any) -> None:
        self.made[name] = choice


@dataclass(frozen=True)
class SpeedGuard:
    """What quantization asks before it quantizes a layer, if the recipe says `guard: speed`."""

    time_ratio: Callable[[LinearGroupSpec], float]  # of quantized layers, relative to unquantized ones
    device: str  # its name
    workload: str
    formats: tuple[str, ...] = ()  # to try in this order for layers that would be slower


@dataclass(frozen=True)
class WidthTimer:
    """What pruning asks for its alignment, if the recipe says `alignment: measured`."""

    seconds: Callable[[Sequence[LinearGroupSpec]], list[float]]  # of each group, timed in turns
    device: str  # its name
    workload: str


@dataclass(frozen=True)
class MethodContext:
    """What a method gets besides the model: calibration batches, seed, progress and checkpoint."""

    batches: Sequence[Batch] = ()
    seed: int = 0
    progress: Progress = field(default_factory=NullProgress)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    memory_limit: int | None = None  # bytes of activations kept in memory; None: no limit
    folder: Path | None = None  # activations beyond that limit are written here
    device: torch.device | None = None  # blocks are moved here one at a time; None: compute where the network is
    choices: Choices = field(default_factory=Choices)
    speed_guard: SpeedGuard | None = None
    width_timer: WidthTimer | None = None

    @property
    def mean_tokens(self) -> float:
        """Return the mean number of unpadded tokens per calibration sequence."""
        masks = [batch["attention_mask"] for batch in self.batches if "attention_mask" in batch]
        sequences = sum(len(mask) for mask in masks)
        return sum(int(mask.sum()) for mask in masks) / sequences if sequences else 1.0


@dataclass(frozen=True)
class CalibrationSize:
    """How much calibration data a step will use, known before any of it is read."""

    samples: int
    seq_len: int
    batch_size: int

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_len


@dataclass(frozen=True)
class ResourceEstimate:
    """What a step will take: passes of the blocks over all calibration tokens, and bytes besides the weights."""

    passes: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class UndecidedWidth:
    """The number of inputs of a layer that a step decides during the run, such as a pruned width."""

    multiple: int  # the number is certainly a multiple of this
    largest: int  # if nothing is removed; or what this is certainly a multiple of
    per_unit: int  # inputs that are removed together
    method: str
    setting: str  # of the method: keeps units in multiples of its value


class Method(ABC):
    """One published technique. Subclasses are frozen dataclasses; their fields are the parameters."""

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]  # when to use it: the first line of the docstring
    offloads: ClassVar[bool] = False  # can move blocks to an accelerator one at a time
    trains: ClassVar[bool] = False  # the whole network, which several ranks can share
    last: ClassVar[bool] = False  # leaves a program that no later step can change
    needs: ClassVar[tuple[str, ...]] = ()  # of "calibration data", "labels", "gradients"

    @abstractmethod
    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        """Change the model in place; return plain facts about what changed."""

    def check(self, anatomy: Anatomy) -> None:  # noqa: B027  (most methods support any network)
        """Raise, before any work starts, if the method does not support the network."""

    @property
    def input_multiple(self) -> int:
        """The number of inputs of each linear layer in the blocks must be a multiple of this."""
        return 1

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        """Give a network on the meta device the shape that the step leaves, so that later steps can be checked on it.

        `undecided` holds, by path, the layers whose width the steps up to now decide during the run; return it with the
        changes of this step. The network then has one of the possible widths there.
        """
        return undecided

    @property
    def keeps_plain_shape(self) -> bool:
        """Whether the result certainly has one width in all layers and no added biases, as other programs need."""
        return True

    @property
    def uses_data(self) -> bool:
        """Whether the method reads calibration data with its current parameters."""
        return "calibration data" in self.needs

    def targets(self) -> dict[str, float]:
        """Return what the result will meet, for the plan: measure -> value."""
        return {}

    def added_parameters(self, anatomy: Anatomy) -> int:
        """Return an upper bound on the parameters the method adds to the network, for the plan."""
        return 0

    def bytes_change(self, anatomy: Anatomy) -> int:
        """Return by how many bytes the step changes the blocks besides pruning (negative: smaller), for the plan."""
        return 4 * self.added_parameters(anatomy)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Estimate the cost of the step on this network (which may be on the meta device)."""
        return ResourceEstimate()

    @classmethod
    def from_config(cls, value: Any) -> Method:
        """Build the step of a recipe: `{method: gptq, bits: 4}`."""
        if not isinstance(value, Mapping):
            raise RecipeError(f"a step of a recipe must be a mapping with a `method`, not {value!r:.80}.")
        if not isinstance(value.get("method"), str):
            raise RecipeError(f"`method` of a step must be the name of a method, not {value.get('method')!r:.80}.")
        return METHODS.build(value)

    @classmethod
    def config_class(cls, settings: Mapping[str, Any]) -> type[Method] | None:
        """Return the method that a step of a recipe names."""
        return METHODS.get(str(settings.get("method")))

    @classmethod
    def config_schema(cls) -> dict[str, Any]:
        return METHODS.json_schema()

    @property
    def times_layers(self) -> bool:
        """Whether the step times layers in the engine that serves language models."""
        return False

    def with_choices(self, choices: Mapping[str, Any]) -> Self:
        """Return the step with the settings filled in that its searches decided."""
        return self

    def for_device(self, device: str) -> Self:
        """Return the step with the defaults that depend on the device filled in."""
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the parameters as a step of a recipe."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        plain = {name: value.to_json() if hasattr(value, "to_json") else value for name, value in values.items()}
        return {"method": self.name, **plain}


METHODS: Registry[Method] = Registry("method", error=RecipeError)


def one_of(method_name: str, key: str, value: str, options: Sequence[str]) -> None:
    """Check that a parameter is one of its options."""
    if value not in options:
        raise RecipeError(f"{key} of {method_name} must be one of {', '.join(options)}, not {value!r}.")


def within(method_name: str, key: str, value: float, low: float, high: float) -> None:
    """Check that a parameter lies in a range, ends included."""
    if not low <= value <= high:
        raise RecipeError(f"{key} of {method_name} must lie between {low:g} and {high:g}, not {value!r}.")
