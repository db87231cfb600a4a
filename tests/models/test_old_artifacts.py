"""Artifacts written by version 0.1 still load and compute the same; new ones have a newer format number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smelt.errors import ModelError
from smelt.models.artifact import save_artifact
from smelt.models.load import load, skeleton
from smelt.report.layers import kept_map

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0.1"
NAMES = ("pruned-decoder", "pruned-gptq-decoder", "pruned-moe", "w8a8-encoder")


def content(folder: Path) -> dict[str, object]:
    result: dict[str, object] = json.loads((folder / "smelt.json").read_text())
    return result


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_an_old_artifact_loads_and_computes_the_same(name: str) -> None:
    expected = load_file(FIXTURES / "expected.safetensors")
    model = load(FIXTURES / name)
    actual = model.network(input_ids=expected["input_ids"]).logits
    torch.testing.assert_close(actual, expected[name], atol=1e-4, rtol=1e-4)
    assert model.tokenizer is not None and model.history


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_an_old_artifact_saved_again_has_a_newer_format_and_the_same_logits(name: str, tmp_path: Path) -> None:
    model = load(FIXTURES / name)
    save_artifact(model, tmp_path)
    assert content(FIXTURES / name)["format"] == 1
    assert content(tmp_path)["format"] == 2
    ids = load_file(FIXTURES / "expected.safetensors")["input_ids"]
    reloaded = load(tmp_path)
    assert torch.equal(reloaded.network(input_ids=ids).logits, model.network(input_ids=ids).logits)
    assert reloaded.anatomy.shape() == model.anatomy.shape()


def test_the_shape_of_an_old_artifact_is_read_with_current_names() -> None:
    old = json.dumps(content(FIXTURES / "pruned-decoder")["shape"])
    assert '"filters"' in old and "ffn_channels" not in old
    part_kinds = {part.kind for part in load(FIXTURES / "pruned-decoder").anatomy.parts}
    assert part_kinds == {"heads", "ffn_channels"}
    assert skeleton(FIXTURES / "pruned-decoder").num_parameters() > 0


def test_the_measurements_of_an_old_artifact_are_reported() -> None:
    blocks = json.loads((FIXTURES / "pruned-decoder" / "measurements.json").read_text())["kept"]
    assert "FFN channels" in str(kept_map(blocks))


@pytest.mark.parametrize("written", [0, 3, "1", None])
def test_a_format_of_another_version_is_refused(written: object, tmp_path: Path) -> None:
    for file in (FIXTURES / "pruned-decoder").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    changed = {**content(tmp_path), "format": written}
    (tmp_path / "smelt.json").write_text(json.dumps(changed))
    with pytest.raises(ModelError, match="reads formats 1 to 2"):
        load(tmp_path)
