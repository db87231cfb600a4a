"""The contract of a method: a dataclass of checked parameters with one verb, `apply`, and the list of all methods.

A method says what it needs, so that a missing need is one sentence before any work starts. Adding one is adding a
file with a decorated class: see docs/adding-a-method.md.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from smelt.compression.budget import Budget
from smelt.compression.checkpoint import Checkpoint
from smelt.errors import RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.progress import Silent, Watcher

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Context:
    """What a method is given besides the model: data, seed, and where to show and keep its progress."""

    batches: Sequence[Batch] = ()
    seed: int = 0
    watcher: Watcher = field(default_factory=Silent)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    memory_limit: int | None = None  # bytes of activations that may stay in memory; None: all
    folder: Path | None = None  # where activations past that limit are put
    device: torch.device | None = None  # where blocks are brought one at a time; None: where the network is

    @property
    def mean_tokens(self) -> float:
        """Mean number of real tokens a calibration sequence has."""
        counts = [int(batch["attention_mask"].sum()) for batch in self.batches if "attention_mask" in batch]
        sequences = [len(batch["attention_mask"]) for batch in self.batches if "attention_mask" in batch]
        return sum(counts) / sum(sequences) if sequences else 1.0


@dataclass(frozen=True)
class CalibrationSize:
    """How much calibration data a step will see, known before any of it is read."""

    samples: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.samples * self.length


@dataclass(frozen=True)
class Demand:
    """What a step will ask for: passes of the blocks over all calibration tokens, and bytes besides the weights."""

    passes: float = 0.0
    memory: int = 0


class Method(ABC):
    """One published technique. Subclasses are frozen dataclasses; their fields are all that can be told to them."""

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    offloads: ClassVar[bool] = False  # it can bring blocks to an accelerator one at a time
    needs: ClassVar[tuple[str, ...]] = ()  # of "calibration data", "labels", "gradients"

    @abstractmethod
    def apply(self, model: Model, context: Context) -> dict[str, Any]:
        """Change the model in place; return plain facts about what was changed."""

    def check(self, anatomy: Anatomy) -> None:  # noqa: B027  (most methods take any network)
        """Refuse, before any work starts, a network that the method cannot be applied to."""

    @property
    def uses_data(self) -> bool:
        """Whether it looks at calibration data with the parameters it has."""
        return "calibration data" in self.needs

    def aim(self) -> dict[str, float]:
        """What the result will meet, for the plan: a measure and its value."""
        return {}

    def added_parameters(self, anatomy: Anatomy) -> int:
        """How many it puts beside those of the network at most, for the plan."""
        return 0

    def demand(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> Demand:
        """What the step will ask for on this network (which may lie on the meta device)."""
        return Demand()

    def to_json(self) -> dict[str, Any]:
        """The parameters as they stand in a recipe."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        plain = {name: value.to_json() if hasattr(value, "to_json") else value for name, value in values.items()}
        return {"method": self.name, **plain}


METHODS: dict[str, type[Method]] = {}
AnyMethod = TypeVar("AnyMethod", bound=type[Method])


def method(name: str, *, paper: str, needs: tuple[str, ...] = ()) -> Callable[[AnyMethod], AnyMethod]:
    """Put a class on the list of methods. Its summary is the first line of its docstring."""

    def register(cls: AnyMethod) -> AnyMethod:
        cls.name, cls.paper, cls.needs = name, paper, needs
        cls.summary = (cls.__doc__ or "").strip().splitlines()[0]
        METHODS[name] = cls
        return cls

    return register


def make(settings: Mapping[str, Any]) -> Method:
    """A method from a step of a recipe; unknown names, unknown keys and values of the wrong type are errors."""
    settings = dict(settings)
    name = settings.pop("method", None)
    if name not in METHODS:
        raise RecipeError(f"there is no method {name!r}; there are {', '.join(sorted(METHODS))}.")
    cls = METHODS[name]
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in settings:
        if key not in fields:
            raise RecipeError(f"the method {name} has no parameter {key!r}; it has {', '.join(fields)}.")
    if "budget" in fields:
        if "budget" not in settings:
            raise RecipeError(f"the method {name} needs a budget, such as `budget: {{parameters: 0.8}}`.")
        settings["budget"] = Budget.parse(settings["budget"])
    for key, value in settings.items():
        _check_type(name, key, value, str(fields[key].type))
    return cls(**settings)


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def _check_type(method_name: str, key: str, value: Any, declared: str) -> None:
    """Compare a value with the field's declared plain type."""
    options = [option.strip() for option in declared.split("|")]
    if value is None and "None" in options:
        return
    wanted = [option for option in options if option in _TYPES]
    if not wanted:
        return
    is_flag = isinstance(value, bool)
    if not any(isinstance(value, _TYPES[option]) and (not is_flag or option == "bool") for option in wanted):
        raise RecipeError(f"{key} of {method_name} must be {' or '.join(wanted)}, not {value!r}.")


def one_of(method_name: str, key: str, value: str, options: Sequence[str]) -> None:
    """Check a choice."""
    if value not in options:
        raise RecipeError(f"{key} of {method_name} is one of {', '.join(options)}, not {value!r}.")


def within(method_name: str, key: str, value: float, low: float, high: float) -> None:
    """Check a range, ends included."""
    if not low <= value <= high:
        raise RecipeError(f"{key} of {method_name} must lie between {low:g} and {high:g}, not {value!r}.")
