"""The recipe: methods in order, with data and seed. YAML on disk, an object in Python; unknown keys are errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from smelt.compression.base import Method
from smelt.compression.recipe.methods import make
from smelt.errors import RecipeError

Settings = TypeVar("Settings", bound="_Checked")
_LARGEST_RECIPE = 1_000_000
_LARGEST_NUMBER = 10**9


@dataclass(frozen=True)
class _Checked:
    """Settings whose numbers must be positive whole numbers."""

    @classmethod
    def parse(cls: type[Settings], value: Any, where: str) -> Settings:
        if not isinstance(value, Mapping):
            raise RecipeError(f"`{where}` of a recipe is a set of keys, not {value!r}.")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key, given in value.items():
            if key not in fields:
                raise RecipeError(f"`{where}` has no key {key!r}; it has {', '.join(fields)}.")
            wanted = str(fields[key].type)
            if key == "batch" and given == "auto" and "None" in wanted:
                continue
            is_number = isinstance(given, int) and not isinstance(given, bool)
            if given is None and "None" in wanted:
                continue
            if wanted.startswith("int") and not (is_number and 0 < given <= _LARGEST_NUMBER):
                raise RecipeError(f"{key} of `{where}` must be a whole number from 1 to 10^9, not {given!r}.")
            if wanted.startswith("str") and not isinstance(given, str):
                raise RecipeError(f"{key} of `{where}` must be text, not {given!r}.")
        return cls(**{key: None if given == "auto" and key == "batch" else given for key, given in value.items()})


@dataclass(frozen=True)
class CalibrationSettings(_Checked):
    """What the methods see: `samples` sequences of `length` tokens (labelled rows: at most so many)."""

    source: str = "default"
    samples: int = 128
    length: int = 256
    batch: int | None = 4  # sequences at once; auto: as many as fit the memory
    text: str | None = None
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class EvaluationSettings(_Checked):
    """What before and after are compared on. Without a source, a part of the data that calibration does not see."""

    source: str | None = None
    metric: str | None = None
    context: int = 512
    limit: int | None = 16384  # tokens of text, or rows
    batch: int = 8
    text: str | None = None
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Recipe:
    """Steps in order. The same recipe on the same model gives the same bytes."""

    steps: tuple[Method, ...]
    seed: int = 0
    data: CalibrationSettings = field(default_factory=CalibrationSettings)
    evaluate: EvaluationSettings = field(default_factory=EvaluationSettings)
    memory_limit: str | None = None  # of activations, such as "2 GB"; what exceeds it goes to disk

    @classmethod
    def parse(cls, content: Any) -> Recipe:
        """From the plain data of a recipe file."""
        if not isinstance(content, Mapping):
            raise RecipeError("a recipe is a set of keys with a list of steps; see docs/recipes.md.")
        known = [f.name for f in dataclasses.fields(cls)]
        for key in content:
            if key not in known:
                raise RecipeError(f"a recipe has no key {key!r}; it has {', '.join(known)}.")
        steps = content.get("steps")
        if not isinstance(steps, list) or not steps:
            raise RecipeError("a recipe needs a list of `steps`, each with the name of a method.")
        seed = content.get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise RecipeError(f"the seed of a recipe is a whole number from 0 to 2^32 - 1, not {seed!r}.")
        limit = content.get("memory_limit")
        if limit is not None:
            bytes_of(limit)
        return cls(
            steps=tuple(_step(step) for step in steps),
            seed=seed,
            data=CalibrationSettings.parse(content.get("data", {}), "data"),
            evaluate=EvaluationSettings.parse(content.get("evaluate", {}), "evaluate"),
            memory_limit=None if limit is None else str(limit),
        )

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """From a YAML file."""
        path = Path(path)
        try:
            if path.stat().st_size > _LARGEST_RECIPE:
                raise RecipeError(f"{path} is too large to be a recipe.")
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecipeError(f"there is no recipe at {path}.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"the recipe {path} cannot be read ({error}).") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date or number that is none is a ValueError
            place = " ".join(str(error).split())[:200]
            raise RecipeError(f"{path} is not valid YAML ({place}).") from error
        try:
            return cls.parse(content)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The whole recipe as plain data, defaults spelled out."""
        return {
            "seed": self.seed,
            "data": dataclasses.asdict(self.data),
            "evaluate": dataclasses.asdict(self.evaluate),
            **({"memory_limit": self.memory_limit} if self.memory_limit else {}),
            "steps": [step.to_json() for step in self.steps],
        }

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_json(), sort_keys=False)


def _step(content: Any) -> Method:
    if not isinstance(content, Mapping):
        raise RecipeError(f"a step of a recipe is a set of keys with a `method`, not {content!r}.")
    if not isinstance(content.get("method"), str):
        raise RecipeError(f"`method` of a step is the name of a method, not {content.get('method')!r}.")
    return make(content)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(text: Any) -> int:
    """A number of bytes written as `2 GB`, `512 MiB` or a plain number."""
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
