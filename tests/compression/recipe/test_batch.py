"""The automatic calibration batch size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smelt.compression.recipe import batch
from smelt.compression.recipe.batch import fit_batch_size, resolve_batch_size
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.run import compress
from smelt.errors import RecipeError
from smelt.models.anatomy_builder import anatomy_of
from tests.tiny import BUILDS

CPU = torch.device("cpu")


def test_it_follows_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = anatomy_of(BUILDS["llama"]())
    results = []
    for memory in (0, 2**20, 2**24, 2**26, 2**40):
        monkeypatch.setattr(batch, "total_memory", lambda device, memory=memory: memory)
        results.append(fit_batch_size(anatomy, 128, gradients=False, device=CPU))
    assert results[0] == 1 and results[-1] == batch.MAX_BATCH_SIZE
    assert results == sorted(results) and len(set(results)) > 2
    monkeypatch.setattr(batch, "total_memory", lambda device: 2**26)
    assert fit_batch_size(anatomy, 128, gradients=True, device=CPU) < fit_batch_size(
        anatomy, 128, gradients=False, device=CPU
    )


def test_only_if_the_recipe_asks_for_it() -> None:
    anatomy = anatomy_of(BUILDS["llama"]())
    steps = [{"method": "rtn", "group_size": -1}]
    open_one = resolve_batch_size(Recipe.parse({"data": {"batch_size": "auto"}, "steps": steps}), anatomy, CPU)
    assert open_one.data.batch_size == batch.MAX_BATCH_SIZE
    assert (
        resolve_batch_size(Recipe.parse({"data": {"batch_size": 3}, "steps": steps}), anatomy, CPU).data.batch_size == 3
    )
    with pytest.raises(RecipeError, match="batch"):
        Recipe.parse({"data": {"batch_size": "all"}, "steps": steps})


def test_unsupported_offloading(tmp_path: Path) -> None:
    recipe = Recipe.parse({"steps": [{"method": "random", "budget": {"macs": 0.5}}]})
    with pytest.raises(RecipeError, match="whole model on one device"):
        compress("nowhere", recipe, tmp_path / "out", offload=True)
