"""The Python API refuses invalid recipes before loading any weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smelt.compression.recipe import run
from smelt.compression.recipe.plan import CompressionPlan
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.run import compress
from smelt.errors import DataError, ResourceError, SmeltError
from tests.tiny import BUILDS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "vit"):
        BUILDS[name]().save_pretrained(root / name)
    return {name: str(root / name) for name in ("llama", "vit")}


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(run, "load", load)


def recipe(method: str = "gptq", **data: Any) -> Recipe:
    return Recipe.parse({"data": data, "steps": [{"method": method, "group_size": -1}]})


def refused(source: str, parsed_recipe: Recipe, words: str, folder: Path, **options: Any) -> None:
    with pytest.raises(SmeltError, match=words) as caught:
        compress(source, parsed_recipe, folder / "out", **options)
    assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_a_calibrated_method_on_an_image_model(method: str, folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{method} needs calibration data, .* no default images"):
        compress(folders["vit"], recipe(method), tmp_path / "out")


def test_a_context_longer_than_the_model_supports(folders: dict[str, str], tmp_path: Path) -> None:
    refused(folders["llama"], recipe(seq_len=10**6, samples=1, batch_size=1), "this model's context is", tmp_path)


def test_data_that_does_not_exist(folders: dict[str, str], tmp_path: Path) -> None:
    refused(folders["llama"], recipe(source=str(tmp_path / "none.jsonl")), "none.jsonl", tmp_path)


def test_nothing_to_resume(folders: dict[str, str], tmp_path: Path) -> None:
    refused(folders["llama"], recipe(), "there is nothing to resume at .*out.partial", tmp_path, resume=True)


def test_too_little_memory(folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def check(plan: CompressionPlan) -> None:
        checked.append(plan.model)
        raise ResourceError("this run needs more memory.")

    monkeypatch.setattr(CompressionPlan, "check", check)
    refused(folders["llama"], recipe(), "needs more memory", tmp_path)
    assert checked == [folders["llama"]]
