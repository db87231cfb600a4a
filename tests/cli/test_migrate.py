"""`smelt migrate` and `smelt schema`, on recipes of the previous version."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest

from smelt.compression.recipe.recipe import Recipe
from smelt.strict_yaml import load_yaml
from tests.cli.conftest import Smelt

OLD = sorted((Path(__file__).parents[1] / "fixtures" / "v0.1").glob("*.yaml"))


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_an_old_recipe_is_rewritten_and_means_the_same(path: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    old = "# my recipe\n" + path.read_text()
    (tmp_path / "recipe.yaml").write_text(old)
    with pytest.warns(FutureWarning, match="is now called"):
        expected = Recipe.parse(load_yaml(old))
    done = smelt_here("migrate", str(tmp_path / "recipe.yaml"), "--check")
    assert done.code == 3 and (tmp_path / "recipe.yaml").read_text() == old
    done = smelt_here("migrate", str(tmp_path / "recipe.yaml"))
    new = (tmp_path / "recipe.yaml").read_text()
    assert done.code == 0 and new.startswith("# my recipe\n") and new != old
    assert Recipe.parse(load_yaml(new)) == expected
    done = smelt_here("migrate", str(tmp_path / "recipe.yaml"), "--check")
    assert done.code == 0 and "+ " not in done.out


def test_another_file_can_be_written(smelt_here: Smelt, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("steps: [{method: rtn, bits: 4, group: 64}]\n")
    done = smelt_here("migrate", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "new.yaml"))
    assert done.code == 0 and "group_size: 64" in (tmp_path / "new.yaml").read_text()
    assert "group: 64" in (tmp_path / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps: [{method: rtn, grup_size: 4}]", "did you mean 'group_size'"),
        ("steps: [{method: rtn", "not valid YAML"),
        ("steps: [{method: rtn}]\nsteps: []", "appears twice"),
    ],
)
def test_invalid_recipes_raise_one_sentence(text: str, sentence: str, smelt_here: Smelt, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    smelt_here("migrate", str(tmp_path / "recipe.yaml")).refused(sentence)
    assert (tmp_path / "recipe.yaml").read_text() == text


@pytest.mark.parametrize("kind", ["recipe", "train"])
def test_schema_describes_what_the_examples_use(kind: str, smelt_here: Smelt) -> None:
    schema = jsonschema_rs.validator_for(json.loads(smelt_here("schema", kind).out))
    folder = Path(__file__).parents[2] / "examples" / ("train" if kind == "train" else "")
    for path in sorted(folder.glob("*.yaml")):
        schema.validate(load_yaml(path.read_text()))
    assert not schema.is_valid({"stepps": []})
    smelt_here("schema", "other").refused("there is no schema")
