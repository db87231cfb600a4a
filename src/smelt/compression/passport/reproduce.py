"""Repeat the run that a passport describes, and compare the result byte for byte."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from smelt.compression.passport.check import (
    FileChanges,
    changed_files,
    environment_differences,
    recorded_threads,
)
from smelt.compression.passport.document import NOT_REPRODUCIBLE, PASSPORT, Passport
from smelt.compression.passport.origin import describe_data
from smelt.compression.recipe.inputs import evaluation_data, needs_data, split, usable_data
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.run import compress
from smelt.errors import DataError, ModelError, RecipeError
from smelt.fingerprint import hash_files, hash_folder
from smelt.models.artifact import write_json
from smelt.models.json_file import read_object
from smelt.models.load import skeleton, source_files
from smelt.models.model import Model
from smelt.progress import Progress, RunProgress


@dataclass(frozen=True)
class Inputs:
    """Where the inputs of the run are now, if not where the passport says."""

    source: str | None = None
    data: str | None = None
    evaluation: str | None = None


@dataclass(frozen=True)
class Reproduction:
    """How a repeated run differs from the passport, and what may be the reason."""

    changes: FileChanges
    files: int
    reasons: tuple[str, ...]


def reproduce(
    passport: Passport, inputs: Inputs, *, progress: RunProgress, say: Callable[[str], None], work_folder: Path | None
) -> Reproduction:
    """Repeat the run in a temporary folder with the recorded choices, after checking that its inputs are the same."""
    recorded = Recipe.parse(passport.recipe)
    recipe = _with_inputs(recorded, inputs)
    source = inputs.source or _text(passport.source, "name")
    device = _text(passport.run, "device")
    _check_source(source, passport, progress)
    _check_data(source, recipe, passport)
    with _same_threads(recorded_threads(passport)), tempfile.TemporaryDirectory(dir=work_folder) as temporary:
        out = Path(temporary) / "reproduced"
        compress(
            source, recipe, out,
            device=device, offload=passport.run.get("offload") is True, speed=False, choices=passport.choices,
            progress=progress, say=say,
        )  # fmt: skip
        _restore_names(out, passport, recorded)
        actual = {
            name: hashed for name, hashed in hash_folder(out).items() if name not in (*NOT_REPRODUCIBLE, PASSPORT)
        }
    changes = changed_files(passport.reproducible, actual)
    reasons = [] if changes.none else environment_differences(passport)
    return Reproduction(changes, len(passport.reproducible), tuple(reasons))


def _with_inputs(recipe: Recipe, inputs: Inputs) -> Recipe:
    if inputs.data is not None:
        recipe = replace(recipe, data=replace(recipe.data, source=inputs.data))
    if inputs.evaluation is not None:
        if recipe.evaluate.source is None:
            raise RecipeError("the recipe names no evaluation data; it was held out from the calibration data.")
        recipe = replace(recipe, evaluate=replace(recipe.evaluate, source=inputs.evaluation))
    return recipe


def _check_source(source: str, passport: Passport, progress: Progress) -> None:
    recorded = passport.source.get("files")
    if not isinstance(recorded, dict):
        raise ModelError("the passport is damaged: it does not list the files of the source model.")
    changes = changed_files(recorded, hash_files(source_files(source), cache=True, progress=progress))
    if not changes.none:
        raise ModelError(
            f"{source} is not the model that the artifact was made from ({changes.describe()}); "
            "give the original one with --source."
        )


def _check_data(source: str, recipe: Recipe, passport: Passport) -> None:
    model = Model(skeleton(source))
    data, held_out = split(recipe, usable_data(recipe, model)) if needs_data(recipe) else (None, None)
    evaluation = evaluation_data(recipe, held_out, model)
    here = {"calibration": describe_data(data), "evaluation": describe_data(evaluation)}
    for part, option in (("calibration", "--data"), ("evaluation", "--eval-data")):
        recorded, actual = passport.data.get(part), here[part]
        if isinstance(recorded, dict) and actual is not None and recorded.get("sha256") != actual["sha256"]:
            raise DataError(
                f"the {part} data ({actual['name']}) is not that of the run; give the original with {option}."
            )


def _restore_names(folder: Path, passport: Passport, recipe: Recipe) -> None:
    """Write the recorded names of model and data into `smelt.json`: only their content must be the same."""
    content = read_object(folder / "smelt.json")
    content["source"] = passport.source["name"]
    content["recipe"] = recipe.to_json()
    evaluation = passport.data.get("evaluation")
    if isinstance(content.get("quality"), dict) and isinstance(evaluation, dict):
        content["quality"]["data"] = evaluation.get("name")
    write_json(folder / "smelt.json", content)


@contextmanager
def _same_threads(threads: int) -> Iterator[None]:
    """Compute with this many threads: the order of sums depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _text(section: dict[str, Any], name: str) -> str:
    value = section.get(name)
    if not isinstance(value, str):
        raise ModelError(f"the passport is damaged: it does not say the {name}.")
    return value
