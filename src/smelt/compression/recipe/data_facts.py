"""Describe the data of a recipe without loading the model, to check it before a run is repeated."""

from __future__ import annotations

from typing import Any

from smelt.compression.passport.origin import describe_data
from smelt.compression.recipe.inputs import evaluation_data, needs_data, split, usable_data
from smelt.compression.recipe.recipe import Recipe
from smelt.models.model import Model


def described_data(recipe: Recipe, skeleton: Model) -> dict[str, Any]:
    """Return name, kind, number of items and content hash of the calibration and evaluation data."""
    data, held_out = split(recipe, usable_data(recipe, skeleton)) if needs_data(recipe) else (None, None)
    evaluation = evaluation_data(recipe, held_out, skeleton)
    return {"calibration": describe_data(data), "evaluation": describe_data(evaluation)}
