"""Check every step of a recipe, before any work, on the shapes that the steps before it will leave.

The steps change a network on the meta device one after another, as they will change the real one. Where the result of a
step depends on scores, only what is certain counts: a group size must divide every width that may come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from transformers import PreTrainedModel

from smelt.compression.base import Method, UndecidedWidth
from smelt.compression.recipe.recipe import Recipe
from smelt.errors import RecipeError, SmeltError
from smelt.models.anatomy_builder import anatomy_of


def check_steps(network: PreTrainedModel, recipe: Recipe) -> None:
    """Raise if a step cannot work on what the steps before it leave of a network on the meta device, which then has
    the shape that all steps leave."""
    undecided: Mapping[str, UndecidedWidth] = {}
    for position, step in enumerate(recipe.steps):
        try:
            if position and recipe.steps[position - 1].last:
                raise RecipeError(f"no step can follow {recipe.steps[position - 1].name}; make it the last one.")
            _check_undecided(step, undecided)
            step.check(anatomy_of(network))
            undecided = step.reshape(anatomy_of(network), undecided)
        except SmeltError as error:
            if position == 0:
                raise
            raise type(error)(f"step {position + 1} ({step.name}): {error}") from error


def _check_undecided(step: Method, undecided: Mapping[str, UndecidedWidth]) -> None:
    """Raise if the step needs a multiple of inputs that an earlier step does not guarantee."""
    for path, width in undecided.items():
        needed = step.input_multiple
        if width.multiple % needed:
            raise RecipeError(
                f"groups of {needed} may not divide the inputs of {path}, of which {width.method} keeps some multiple "
                f"of {width.multiple}; {_remedy(width, needed)}`allow_partial_group: true` or another group_size in "
                f"{step.name}."
            )


def _remedy(width: UndecidedWidth, needed: int) -> str:
    if width.largest % needed:  # all of them may be kept
        return "use "
    return f"use `{width.setting}: {needed // math.gcd(needed, width.per_unit)}` in {width.method}, or "
