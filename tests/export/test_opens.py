"""What `opens_in` says holds: transformers opens a model with uniform widths, of every family, with equal logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smelt.compression.base import MethodContext
from smelt.compression.budget import Budget
from smelt.compression.pruning.magnitude import Magnitude
from smelt.errors import RecipeError
from smelt.export.opens import opens_in
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.surgery import keep_units
from smelt.models.verify import probe
from tests.tiny import BUILDS

CONVOLUTIONS = {name for name in BUILDS if name.startswith("resnet")}


@pytest.mark.parametrize("name", sorted(BUILDS.keys() - CONVOLUTIONS))
def test_transformers_opens_uniform_widths_of_every_family(name: str, tmp_path: Path) -> None:
    BUILDS[name]().save_pretrained(tmp_path / "source")
    model = load(tmp_path / "source")
    method = Magnitude(budget=Budget("parameters", 0.85), widths="uniform", ffn_multiple=4)
    method.apply(model, MethodContext())
    programs = [opener.program for opener in opens_in(model)]
    out = tmp_path / "out"
    out.mkdir()
    save_artifact(model, out)
    (out / "smelt.json").unlink()  # transformers must not need it
    assert ("transformers" in programs) == (name != "all-attention")  # which transformers knows after `import smelt`
    network, info = type(model.network).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    inputs = probe(model)
    with torch.no_grad():
        torch.testing.assert_close(network(**inputs)[0], model.network(**inputs)[0])


def test_free_widths_open_in_smelt_only(tmp_path: Path) -> None:
    BUILDS["llama"]().save_pretrained(tmp_path / "source")
    model = load(tmp_path / "source")
    assert [str(opener) for opener in opens_in(model)][-1] == "llama.cpp (smelt export --to gguf)"
    keep_units(model.network, model.anatomy.parts[1], list(range(40)))  # of one layer alone
    assert [str(opener) for opener in opens_in(model)] == ["Smelt"]


def test_convolutions_have_no_uniform_widths(tmp_path: Path) -> None:
    BUILDS[min(CONVOLUTIONS)]().save_pretrained(tmp_path / "source")
    with pytest.raises(RecipeError, match="would change nothing"):
        Magnitude(budget=Budget("parameters", 0.8), widths="uniform").apply(load(tmp_path / "source"), MethodContext())
