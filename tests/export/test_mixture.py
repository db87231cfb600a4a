"""Mixture-of-experts exports: what transformers can read is written, the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import smelt.compression.quantization  # noqa: F401  (puts the methods on the list)
from smelt.compression.base import METHODS, MethodContext
from smelt.errors import FormatError
from smelt.export.run import export
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from tests.mixtures import PLAIN, batches, ids, loaded

SYMMETRIC = {"group_size": 16, "symmetric": True}


def quantized(name: str, folder: Path, **settings: Any) -> Model:
    model = loaded(name, folder)
    METHODS.build({"method": "rtn", **settings}).apply(model, MethodContext(batches=batches()))
    return model


@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_symmetric_integers_are_read_by_us_and_by_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the real reader is not installed: smeltml[compressed-tensors]")
    model = quantized(name, tmp_path / "source", **SYMMETRIC)
    export(model, "compressed-tensors", tmp_path / "out")
    expected, read = model.network(**ids()).logits, load(tmp_path / "out")
    assert len(quantized_layers(read.network)) == len(quantized_layers(model.network)) == 32
    assert torch.equal(read.network(**ids()).logits, expected)
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(reference(**ids()).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("to", "settings", "message"),
    [
        ("compressed-tensors", {"group_size": 16}, "reads experts only as symmetric integers or FP8"),
        ("compressed-tensors", {"method": "smoothquant"}, "with unquantized inputs"),
        ("compressed-tensors", {"method": "mixed", **SYMMETRIC, "bits": 5.0}, "quantize all layers alike"),
        ("gguf", SYMMETRIC, "networks as GGUF, not mixtral; keep the artifact"),
    ],
)
def test_schemes_without_a_reader_are_refused(to: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = quantized("mixtral", tmp_path / "source", **settings)
    with pytest.raises(FormatError, match=message) as caught:
        export(model, to, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
