"""The KV cache format from the command line: set once in a recipe, then used by every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smelt
from smelt.models.load import load
from tests.cli.conftest import Place, Smelt, llama_recipe

STEPS = [
    {"method": "rtn", "bits": 8, "group_size": -1},
    {"method": "kv-cache", "format": "int2", "rotate_keys": False, "rotate_values": False},
]


def evaluated(smelt_here: Smelt, place: Place, small: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    written = str(tmp_path / "eval.json")
    arguments = ["--data", place / "text.txt", "--context", "64", "--limit", "1500", "--json", written, *more]
    done = smelt_here("eval", str(small), *arguments)
    assert done.code == 0, done
    content: dict[str, Any] = json.loads(Path(written).read_text())
    return {**content, "out": done.out}


def test_it_is_set_once(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = tmp_path / "small"
    recipe = place.recipe("kv.yaml", {**llama_recipe(place), "steps": STEPS})
    done = smelt_here("compress", place / "llama", "-r", recipe, "-o", str(small), "--prompt", "the cat")
    assert done.code == 0, done
    kept = json.loads((small / "smelt.json").read_text())
    assert kept["kv"] == {
        "format": "int2", "values": None, "clip": 1.0, "rotate_keys": False, "rotate_values": False,
    }  # fmt: skip
    measured = json.loads((small / "measurements.json").read_text())
    assert measured["samples"][1]["text"] == load(small).generate("the cat")

    result = evaluated(smelt_here, place, small, tmp_path)
    assert result["kv"] == "int2" and "KV cache in int2" in result["out"]
    assert (
        result["quality"]["value"]
        == evaluated(smelt_here, place, small, tmp_path, "--kv-cache-dtype", "int2")["quality"]["value"]
    )
    assert (
        result["quality"]["value"]
        > evaluated(smelt_here, place, small, tmp_path, "--kv-cache-dtype", "none")["quality"]["value"]
    )

    done = smelt_here("inspect", str(small), "--json", str(tmp_path / "inspect.json"))
    assert "KV cache in int2" in done.out
    assert json.loads((tmp_path / "inspect.json").read_text())["kv"]["format"] == "int2"
    assert "keys and values" not in smelt_here("inspect", place / "llama").out

    for model, said in ((str(small), 1), (place / "llama", 0)):
        caplog.clear()
        smelt.Engine(model, max_model_len=32, kv_cache_bytes=10**6)
        messages = [record.message for record in caplog.records if "KV cache" in record.message]
        assert len(messages) == said and all(
            "in int2, which has no paged kernel; the model's own" in each for each in messages
        )


@pytest.mark.usefixtures("quick")
def test_invalid_settings_are_refused_before_any_work(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ["--method", "kv-cache", "-o", str(tmp_path / "out")]
    smelt_here("compress", place / "llama", *arguments, "--set", "format=int9").refused(
        "there is no number format 'int9'"
    )
    smelt_here("compress", place / "bert", *arguments).refused("for models that generate text")
    assert list(tmp_path.iterdir()) == []
