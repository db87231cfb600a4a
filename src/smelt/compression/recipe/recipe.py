"""The recipe: methods in order, with data and seed. YAML on disk, an object in Python; unknown keys are errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from smelt.compression import methods as methods  # every method must be registered before a recipe is parsed
from smelt.compression.base import Method
from smelt.compression.quantization.base import Quantization
from smelt.config import json_schema, migrate_text, parse, renamed
from smelt.errors import FormatError, RecipeError
from smelt.measure.gate import parse_margins
from smelt.measure.multiple_choice import NORMALIZATIONS
from smelt.numerics.catalog import format_name, get_format
from smelt.strict_yaml import read_yaml

_MAX_COUNT = 10**9


@dataclass(frozen=True)
class CalibrationSettings:
    """What the methods are calibrated on: `samples` sequences of `seq_len` tokens (labeled rows: at most that many)."""

    source: str = "default"
    samples: int = 128
    seq_len: int = renamed("length", default=256)
    batch_size: int | None = renamed("batch", default=4, aliases={"auto": None})  # auto: as many as fit in memory
    text: str | None = None
    pair: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        _check_counts("data", samples=self.samples, seq_len=self.seq_len, batch_size=self.batch_size)


@dataclass(frozen=True)
class EvaluationSettings:
    """What before and after are compared on. Without a source, a part of the data that calibration does not use."""

    source: str | None = None
    metric: str | None = None
    context: int = 512
    limit: int | None = 16384  # tokens of text, or rows
    batch_size: int = renamed("batch", default=8)
    text: str | None = None
    pair: str | None = None
    label: str | None = None
    normalize: str | None = None  # of multiple choice: none (the default), characters, bytes or tokens
    max_drop: str | None = None  # the margin of the quality gate: 1pt, or 1% for perplexity

    def __post_init__(self) -> None:
        _check_counts("evaluate", context=self.context, limit=self.limit, batch_size=self.batch_size)
        if self.max_drop is not None:
            parse_margins([self.max_drop])
        if self.normalize is not None and self.normalize not in NORMALIZATIONS:
            raise RecipeError(f"evaluate: normalize is {self.normalize!r}; expected {', '.join(NORMALIZATIONS)}.")

    def options(self) -> dict[str, Any]:
        """Return how to evaluate, as keyword arguments of `measure_quality`."""
        names = ("metric", "normalize", "context", "limit", "batch_size")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Guard:
    """`guard: speed`, or `guard: {speed: [int8]}` with formats for the layers that would be slower."""

    formats: tuple[str, ...] = ()  # tried in this order; then layers stay unquantized

    def __post_init__(self) -> None:
        try:
            names = [format_name(get_format(name)) for name in self.formats]
        except FormatError as error:
            raise RecipeError(f"guard of the recipe: {error}") from error
        if len(set(names)) < len(names):
            raise RecipeError(f"guard of the recipe names a format twice: {', '.join(self.formats)}.")

    @classmethod
    def from_config(cls, value: Any) -> Guard:
        """Parse the form used in recipes."""
        if value == "speed":
            return cls()
        names = value["speed"] if isinstance(value, Mapping) and list(value) == ["speed"] else None
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            raise RecipeError(
                "guard of the recipe must be speed, or {speed: [int8]} with formats for layers that would be slower, "
                f"not {value!r:.80}."
            )
        return cls(tuple(names))

    @classmethod
    def config_schema(cls) -> dict[str, Any]:
        formats = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        described = {"type": "object", "properties": {"speed": formats}, "required": ["speed"]}
        return {"anyOf": [{"const": "speed"}, {**described, "additionalProperties": False}]}

    def to_json(self) -> Any:
        return {"speed": list(self.formats)} if self.formats else "speed"


@dataclass(frozen=True)
class Recipe:
    """Steps in order. The same recipe on the same model gives the same bytes."""

    steps: tuple[Method, ...] = field(metadata={"example": "steps: [{method: gptq}]"})
    seed: int = 0
    data: CalibrationSettings = field(default_factory=CalibrationSettings)
    evaluate: EvaluationSettings = field(default_factory=EvaluationSettings)
    memory_limit: str | int | float | None = None  # of activations, such as "2 GB"; the rest is kept on disk
    guard: Guard | None = None  # speed: layers that would become slower get another format, or are not quantized

    def __post_init__(self) -> None:
        if not self.steps:
            raise RecipeError("a recipe needs a list of `steps`, each with the name of a method.")
        if not 0 <= self.seed < 2**32:
            raise RecipeError(f"the seed of a recipe must be an integer from 0 to 2^32 - 1, not {self.seed!r}.")
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
            object.__setattr__(self, "memory_limit", str(self.memory_limit))
        if self.guard is not None and not isinstance(self.guard, Guard):
            object.__setattr__(self, "guard", Guard.from_config(self.guard))
        if self.guard is not None and not any(isinstance(step, Quantization) for step in self.steps):
            raise RecipeError("`guard: speed` decides which layers are quantized, and no step quantizes; remove it.")

    @classmethod
    def parse(cls, content: Any) -> Recipe:
        """Parse the plain data of a recipe file."""
        return parse(cls, content, "the recipe", error=RecipeError)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a YAML file."""
        path = Path(path)
        content = read_yaml(path, "recipe", RecipeError)
        try:
            return cls.parse(content)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from error

    def for_device(self, device: str) -> Recipe:
        """Return the recipe with the defaults that depend on the device filled in."""
        return dataclasses.replace(self, steps=tuple(step.for_device(device) for step in self.steps))

    def to_json(self) -> dict[str, Any]:
        """Return the whole recipe as plain data, defaults spelled out."""
        return {
            "seed": self.seed,
            "data": dataclasses.asdict(self.data),
            "evaluate": dataclasses.asdict(self.evaluate),
            **({"memory_limit": self.memory_limit} if self.memory_limit else {}),
            **({"guard": self.guard.to_json()} if self.guard else {}),
            "steps": [step.to_json() for step in self.steps],
        }

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_json(), sort_keys=False)


def migrate(text: str) -> str:
    """Rewrite the old keys of a recipe in YAML to the current ones; comments and layout stay."""
    try:
        return migrate_text(text, Recipe)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"the recipe is not valid YAML ({' '.join(str(error).split())[:200]}).") from error


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema of recipes, with one alternative per method, for editors."""
    return json_schema(Recipe)


def _check_counts(where: str, **counts: int | None) -> None:
    for key, count in counts.items():
        if count is not None and not 0 < count <= _MAX_COUNT:
            raise RecipeError(f"{key} of `{where}` must be an integer from 1 to 10^9, not {count!r}.")


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: Any) -> int:
    """Parse a size in bytes written as `2 GB`, `512 MiB` or a plain number."""
    words = str(text).strip().lower()
    number = words.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = words[len(number) :].strip()
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise RecipeError(f"a size is written as `2 GB` or `512 MiB`, not {text!r}.") from None
    if size <= 0:
        raise RecipeError(f"a size must be above 0, not {text!r}.")
    return size
