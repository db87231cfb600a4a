"""Odd values anywhere in smelt.json: one sentence or a loaded model, never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smelt.errors import SmeltError
from smelt.models.artifact import read_kv_cache_format, save_artifact
from smelt.models.load import load, skeleton
from smelt.models.model import Model
from tests.security.limits import limited_memory, refused
from tests.tiny import BUILDS

_MISSING = object()
_ODD = [None, True, -1, 2**70, float("nan"), "x", [], [[]], {}, [{}], "\ud800", "a" * 5000, _MISSING]
_ADDED = {"quantized": {"model.layers.0.mlp.up_proj": {"format": "int8"}}, "kv": {"keys": "int8"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    save_artifact(Model(BUILDS["llama"]()), folder)
    return folder


@pytest.fixture(scope="module")
def content(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "smelt.json").read_text())
    return value


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value, of the first entries only where many are alike."""
    yield path
    keys = list(value) if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else ()
    for key in keys:
        yield from _paths(value[key], (*path, key))


def _changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return {} if value is _MISSING else value
    content = copy.deepcopy(content)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if value is _MISSING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return content


@pytest.mark.parametrize("section", ["shape", "format", "history", "source", "quantized", "kv"])
def test_odd_values_are_one_sentence(section: str, folder: Path, content: dict[str, Any]) -> None:
    """Only the skeleton, which does not read the weights and is as much code on this file as loading."""
    whole = {**content, section: _ADDED[section]} if section in _ADDED else content
    for path in _paths(whole[section], (section,)):
        for value in _ODD:
            (folder / "smelt.json").write_text(json.dumps(_changed(whole, path, value)))
            for action in (skeleton, read_kv_cache_format):
                try:
                    with limited_memory(2**30):
                        action(folder)
                except SmeltError as error:
                    assert "\n" not in str(error) and len(str(error)) < 600, (path, value)


@pytest.mark.parametrize(
    "changes",
    [
        {"units": -1, "of": 48},
        {"units": 10**12, "of": 10**12},
        {"kept": [0] * 2},
        {"kept": [1, 0]},
        {"kept": [0, 10**12]},
        {"kept": [0.0, 1.0]},
        {"part": "model.layers.99.mlp.ffn_channels"},
        {"part": ["model.layers.0.mlp.ffn_channels"]},
    ],
    ids=str,
)
def test_a_shape_that_does_not_fit_is_refused(changes: dict[str, Any], folder: Path, content: dict[str, Any]) -> None:
    shape = [{**content["shape"][0], **changes}, *content["shape"][1:]]
    (folder / "smelt.json").write_text(json.dumps({**content, "shape": shape}))
    assert "smelt.json" in refused(lambda: load(folder))


def test_a_repeated_part_is_refused(folder: Path, content: dict[str, Any]) -> None:
    (folder / "smelt.json").write_text(json.dumps({**content, "shape": content["shape"] * 50}))
    assert "does not name the parts" in refused(lambda: load(folder))
