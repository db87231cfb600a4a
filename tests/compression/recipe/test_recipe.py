"""Recipes mean the same in YAML and in Python, and refuse unknown keys."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import pytest

from smelt.compression.budget import Budget
from smelt.compression.methods import METHODS
from smelt.compression.pruning.fisher import Fisher
from smelt.compression.recipe.recipe import (
    CalibrationSettings,
    EvaluationSettings,
    Recipe,
    migrate,
    parse_bytes,
    recipe_schema,
)
from smelt.compression.token_pruning.base import TokenPruning
from smelt.errors import RecipeError

WRITTEN = """
seed: 3
data: {source: a.jsonl, samples: 9, seq_len: 17, batch_size: 2, text: body, label: class}
evaluate: {source: b.jsonl, metric: f1, context: 65, limit: null, batch_size: 5}
memory_limit: 2 GB
steps:
  - {method: fisher, budget: {macs: 0.6}, repair: tune, rearranged: false}
  - {method: random, budget: {parameters: 1}}
"""


def test_yaml_is_parsed_into_the_expected_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(WRITTEN)
    recipe = Recipe.load(tmp_path / "recipe.yaml")
    assert recipe.seed == 3 and recipe.memory_limit == "2 GB"
    assert recipe.data == CalibrationSettings("a.jsonl", 9, 17, 2, text="body", label="class")
    assert recipe.evaluate == EvaluationSettings("b.jsonl", "f1", 65, None, 5)
    assert recipe.steps[0] == Fisher(budget=Budget("macs", 0.6), repair="tune", rearranged=False)
    assert recipe.steps[1].name == "random"


def test_a_recipe_in_python_is_the_same_object() -> None:
    assert Recipe(steps=(Fisher(Budget("macs", 0.5)),)) == Recipe.parse(
        {"steps": [{"method": "fisher", "budget": {"macs": 0.5}}]}
    )


def test_a_recipe_round_trips_through_yaml(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(WRITTEN)
    recipe = Recipe.load(tmp_path / "recipe.yaml")
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert Recipe.load(tmp_path / "again.yaml") == recipe


@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_its_defaults_round_trips(name: str) -> None:
    has_budget = "budget" in {field.name for field in dataclasses.fields(METHODS[name])}
    budget = {"macs": 0.5} if issubclass(METHODS[name], TokenPruning) else {"parameters": 0.5}
    recipe = Recipe.parse({"steps": [{"method": name, **({"budget": budget} if has_budget else {})}]})
    assert Recipe.parse(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("text", "size"),
    [("2 GB", 2 * 10**9), ("512MiB", 512 * 2**20), (" 1.5 kb ", 1500), (1000, 1000), ("7 b", 7), ("1e3", 1000)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2 lightyears", "-1 GB", "0", "nan", "inf", "1e999", "2 GB 3", [1], True])
def test_invalid_sizes(text: object) -> None:
    with pytest.raises(RecipeError):
        parse_bytes(text)


def test_a_file_too_large_to_be_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("a: " + "x" * 1_000_001)
    with pytest.raises(RecipeError, match="too large"):
        Recipe.load(tmp_path / "recipe.yaml")


def test_a_folder_is_not_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.load(tmp_path)


def test_code_in_yaml_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"steps: !!python/object/apply:pathlib.Path.touch [{tmp_path}/touched]")
    with pytest.raises(RecipeError, match="not valid YAML"):
        Recipe.load(tmp_path / "recipe.yaml")
    assert not (tmp_path / "touched").exists()


OLD = """# a recipe of version 0.1
seed: 3
data: {source: a.jsonl, samples: 9, length: 17, batch: auto}  # batch: not a key here
evaluate:
  batch: 5    # rows
steps:
  - method: fisher
    finish: tune   # repair
    "cap": 0.5
    budget: {macs: 0.6}
  - {method: gptq, group: 64, inputs: int8, bits: 4}
  - method: rotate
    stream: true
"""
NEW = """# a recipe of version 0.1
seed: 3
data: {source: a.jsonl, samples: 9, seq_len: 17, batch_size: auto}  # batch: not a key here
evaluate:
  batch_size: 5    # rows
steps:
  - method: fisher
    repair: tune   # repair
    max_sparsity: 0.5
    budget: {macs: 0.6}
  - {method: gptq, group_size: 64, input_activations: int8, bits: 4}
  - method: rotate
    residual: true
"""


def test_old_keys_are_rewritten_in_place() -> None:
    assert migrate(OLD) == NEW
    assert migrate(NEW) == NEW
    assert migrate("") == ""
    assert migrate("steps: [{method: none, group: 3}, 7]\nother: 1") == "steps: [{method: none, group: 3}, 7]\nother: 1"
    with pytest.raises(RecipeError, match="not valid YAML"):
        migrate("steps: [")


def test_an_old_recipe_is_read_with_one_line_per_old_key(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    (tmp_path / "new.yaml").write_text(NEW)
    with pytest.warns(FutureWarning) as warned:
        old = Recipe.load(tmp_path / "old.yaml")
    assert len(warned) == 8 and all("\n" not in str(warning.message) for warning in warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Recipe.load(tmp_path / "new.yaml") == old


def test_the_schema_has_an_alternative_for_every_method() -> None:
    schema = recipe_schema()
    json.dumps(schema)
    steps = schema["properties"]["steps"]["items"]["oneOf"]
    assert [step["properties"]["method"]["const"] for step in steps] == sorted(METHODS)
    gptq = next(step for step in steps if step["properties"]["method"]["const"] == "gptq")
    assert gptq["properties"]["bits"] == {"type": "integer", "default": 4}
    assert gptq["properties"]["group"]["deprecated"] and not gptq["additionalProperties"]
    assert schema["properties"]["data"]["properties"]["seq_len"]["default"] == 256
