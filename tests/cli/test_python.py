"""The same through the Python API, in under ten lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import smelt
from smelt.compression.recipe.inputs import calibration_batches, calibration_data, split
from smelt.progress import NullProgress
from tests.cli.conftest import Place, llama_recipe


@pytest.mark.usefixtures("quick")
def test_the_same_from_python(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(llama_recipe(place)))

    recipe = smelt.Recipe.load("recipe.yaml")
    smelt.plan(place / "llama", recipe).check()
    result = smelt.compress(place / "llama", recipe, "small", samples=["the cat "])
    model = smelt.load("small")
    print(result.record["quality"], model.generate("the cat "))

    assert result.folder == Path("small") and result.model.source == "small"
    assert model.generate("the cat ") == result.record["samples"][1]["text"]
    assert result.record["steps"][0]["changed"]["parameters_removed"] > 0
    assert sum(p.numel() for p in model.parameters()) == result.record["size"]["parameters"]["after"]


def test_a_recipe_made_in_python(place: Place, quick: None, tmp_path: Path) -> None:
    recipe = smelt.Recipe.parse({"steps": [{"method": "magnitude", "budget": {"parameters": 0.7}}]})
    result = smelt.compress(place / "bert", recipe, tmp_path / "out", speed=False)
    assert (
        result.record["size"]["block_parameters"]["after"] <= 0.7 * result.record["size"]["block_parameters"]["before"]
    )
    assert "quality" not in result.record  # nothing was named to measure a classifier on


class Schedules(NullProgress):
    """Records what was planned."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def schedule(self, seconds: Mapping[str, float]) -> None:
        self.seconds.append(seconds["step 1 of 1: fisher"])


def test_the_planned_time_is_corrected_by_the_length_of_rows(place: Place, quick: None, tmp_path: Path) -> None:
    """Rows have far fewer tokens than the longest that is allowed; the step takes time for those they have."""
    data = {"source": str(place / "rows.jsonl"), "samples": 8, "seq_len": 48, "batch_size": 8}
    step = {"method": "fisher", "budget": {"parameters": 0.7}}
    progress = Schedules()
    recipe = smelt.Recipe.parse({"steps": [step], "data": data})
    smelt.compress(place / "bert", recipe, tmp_path / "out", speed=False, progress=progress)
    model = smelt.load(place / "bert")
    rows, _ = split(recipe, calibration_data(recipe, model))
    (batch,) = calibration_batches(recipe.data, rows, model, recipe.seed)
    planned, corrected = progress.seconds
    tokens = batch["input_ids"].numel()
    assert tokens < 8 * 48 / 2 and corrected == pytest.approx(planned * tokens / (8 * 48))


def test_errors_share_one_base_class(place: Place, tmp_path: Path) -> None:
    from smelt.errors import SmeltError

    with pytest.raises(SmeltError, match="no model at"):
        smelt.load(tmp_path / "nowhere")
    with pytest.raises(SmeltError, match="exists already"):
        smelt.compress(place / "bert", smelt.Recipe.load(place / "bert.yaml"), tmp_path)
    with pytest.raises(SmeltError, match="is not a folder"):
        smelt.compress(place / "bert", smelt.Recipe.load(place / "bert.yaml"), place / "bert.yaml/out")
