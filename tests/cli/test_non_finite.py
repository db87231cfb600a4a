"""NaN and infinity never end as success, and never stand in a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt.compression.pruning.magnitude import Magnitude
from smelt.files import json_text
from smelt.models.finite import find_non_finite, is_finite
from smelt.models.model import Model
from tests.cli.conftest import Place, Smelt, bert_recipe, llama_recipe

LAYER = "model.layers.1.mlp.down_proj.weight"


def strict_json(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{path} contains {name}")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.fixture
def broken(place: Place, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The language model with one bad weight."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in Path(place / "llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[LAYER][3, 5] = float(request.param)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("broken", ["nan", "inf", "-inf"], indirect=True)
def test_a_source_with_a_bad_weight_is_refused(broken: str, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    recipe = place.recipe("m.yaml", {"steps": [{"method": "magnitude", "budget": {"parameters": 0.8}}]})
    done = smelt_here("compress", broken, "-r", recipe, "-o", str(tmp_path / "out"))
    done.refused(f"{LAYER} of {broken} contains NaN or infinity")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize("broken", ["nan"], indirect=True)
def test_evaluating_a_model_with_a_bad_weight(broken: str, place: Place, smelt_here: Smelt) -> None:
    text = place / "text.txt"
    options = ["--data", text, "--context", "64", "--limit", "500"]
    smelt_here("eval", broken, *options).refused(f"{broken} computes NaN or infinity on")
    smelt_here("eval", place / "llama", "--against", broken, *options).refused(f"{broken} computes NaN or infinity on")


def test_a_step_that_leaves_a_bad_weight_is_named(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Magnitude.apply

    def break_a_weight(self: Magnitude, model: Model, context: Any) -> dict[str, Any]:
        facts = apply(self, model, context)
        model.network.get_parameter(LAYER).data[0, 0] = torch.inf
        return facts

    monkeypatch.setattr(Magnitude, "apply", break_a_weight)
    content = llama_recipe(place, repair="none")
    content["steps"].append({"method": "magnitude", "budget": {"parameters": 0.9}})
    done = smelt_here(
        "compress", place / "llama", "-r", place.recipe("b.yaml", content), "-o", str(tmp_path / "out"), "--no-speed"
    )
    done.refused(f"step 2 (magnitude) left NaN or infinity in {LAYER}")
    assert (tmp_path / "out.partial" / "step-0.json").exists()
    assert not (tmp_path / "out.partial" / "step-1").exists()


def test_files_of_a_run_are_strict_json(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    recipe = place.recipe("strict.yaml", bert_recipe(place, repair="none"))
    result = tmp_path / "result.json"
    done = smelt_here(
        "compress", place / "bert", "-r", recipe, "-o", str(tmp_path / "out"), "--no-speed", "--json", str(result)
    )
    assert done.code == 0, done
    files = [result, *(tmp_path / "out").glob("*.json")]
    assert {"smelt.json", "measurements.json", "result.json"} <= {file.name for file in files}
    for file in files:
        strict_json(file)


def test_values_without_a_json_form_become_null() -> None:
    text = json_text({"a": float("nan"), "b": [1.5, (float("inf"), "é")], "c": {"d": -float("inf"), "e": None}})
    assert json.loads(text) == {"a": None, "b": [1.5, [None, "é"]], "c": {"d": None, "e": None}}
    assert "NaN" not in text and "Infinity" not in text and "é" not in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_wherever_it_is(
    dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smelt.models.finite._CHUNK", 4)
    for position in range(11):
        tensor = torch.linspace(-1, 1, 11).to(dtype)
        assert is_finite(tensor)
        bad = tensor.float().clone()
        bad[position] = value
        tensors = {"fine": tensor, "codes": torch.ones(3, dtype=torch.uint8), "bad": bad.to(dtype), "empty": tensor[:0]}
        assert find_non_finite(tensors.items()) == "bad"
        tensors.pop("bad")
        assert find_non_finite(tensors.items()) is None
