"""ONNX export: onnxruntime matches the network for any batch size and length, pruned and 8-bit layers too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smelt.export.onnx
from smelt.errors import FormatError
from smelt.export import export
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.surgery import keep_units
from tests.character_tokenizer import character_tokenizer
from tests.export.quantized_models import encoder, logits, network, quantized, scheme

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def needed() -> Any:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: smeltml[onnx]")
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: smeltml[onnx]")


def pruned() -> Model:
    """Return an encoder whose blocks have different widths."""
    model = Model(encoder(**SMALL), character_tokenizer(encoder=True))
    heads, filters = (next(p for p in model.anatomy.parts if p.kind == kind) for kind in ("heads", "ffn_channels"))
    keep_units(model.network, heads, [0, 2, 3])
    keep_units(model.network, filters, range(17))
    return model


def run(runtime: Any, folder: Path, inputs: dict[str, torch.Tensor], **settings: str) -> torch.Tensor:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    for name, value in settings.items():
        options.add_session_config_entry(f"session.{name}", value)
    session = runtime.InferenceSession(str(folder / "model.onnx"), options)
    given: dict[str, np.ndarray[Any, Any]] = {name: tensor.numpy() for name, tensor in inputs.items()}
    return torch.from_numpy(session.run(["logits"], given)[0])


def batch(size: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(3, 99, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    token_types = (torch.arange(length) > 2).long().expand(size, -1)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": token_types.contiguous()}


def test_a_pruned_encoder_at_any_batch_size_and_length(tmp_path: Path) -> None:
    runtime = needed()
    model = pruned()
    export(model, "onnx", tmp_path / "out")
    for size, length in ((1, 5), (4, 33)):
        with torch.no_grad():
            expected = model.network(**batch(size, length)).logits
        torch.testing.assert_close(run(runtime, tmp_path / "out", batch(size, length)), expected, atol=1e-4, rtol=0)
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    assert {given.name: given.shape for given in session.get_inputs()} == {
        name: ["batch", "length"] for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "bert"
    assert b".py" not in (tmp_path / "out" / "model.onnx").read_bytes()  # no local paths


def test_eight_bit_layers_keep_their_codes(tmp_path: Path) -> None:
    """Attention weight-only with zero points; feed-forward symmetric, with static input scales."""
    runtime = needed()
    import onnx

    net = encoder(**{**SMALL, "num_hidden_layers": 1})
    fixed = scheme("int8", "int8", static=True)
    model = quantized(net, lambda path: scheme("int8-asym") if "attention" in path else fixed)
    logits(model.network)  # a network that has run keeps prepared kernel weights
    export(model, "onnx", tmp_path / "out")
    graph = onnx.load(str(tmp_path / "out" / "model.onnx")).graph
    types = [tensor.data_type for tensor in graph.initializer if len(tensor.dims) == 2]
    assert types.count(onnx.TensorProto.UINT8) == 4 and types.count(onnx.TensorProto.INT8) == 2
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 2
    inputs = {name: tensor for name, tensor in batch(3, 9).items() if name != "token_type_ids"}
    with torch.no_grad():
        expected = model.network(**inputs).logits
    results = run(runtime, tmp_path / "out", inputs, disable_quant_qdq="1")
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=0)


def test_inputs_with_a_static_zero_point(tmp_path: Path) -> None:
    runtime = needed()
    model = quantized(encoder(**{**SMALL, "num_hidden_layers": 1}), scheme("int8", "int8-asym", static=True))
    export(model, "onnx", tmp_path / "out")
    inputs = {name: tensor for name, tensor in batch(3, 9).items() if name != "token_type_ids"}
    with torch.no_grad():
        expected = model.network(**inputs).logits
    results = run(runtime, tmp_path / "out", inputs, disable_quant_qdq="1")
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (scheme("int4/32"), "int4/32, and ONNX"),
        (scheme("int8/32"), "int8/32, and ONNX"),
        (scheme("fp8-e4m3"), "fp8-e4m3, and ONNX"),
        (scheme("int8", "int8"), "int8 with dynamic scales, and ONNX"),
        (scheme("int8", "int4", static=True), "int4/tensor with static scales, and ONNX"),
        (scheme("int8", hadamard=True), "online rotation"),
        (scheme("int8", clip=0.9), "clipped inputs"),
    ],
)
def test_schemes_without_onnx_operators_are_refused(chosen: QuantizationScheme, words: str, tmp_path: Path) -> None:
    needed()
    with pytest.raises(FormatError, match=words):
        export(quantized(encoder(**SMALL), chosen), "onnx", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_language_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smelt.export.onnx, "PACKAGES", ())
    with pytest.raises(FormatError, match="for encoders"):
        export(Model(network()), "onnx", tmp_path / "out")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smelt.export.onnx, "PACKAGES", ("onnx_of_another_world",))
    with pytest.raises(FormatError, match=r"needs onnx_of_another_world.*smeltml\[onnx\]"):
        export(Model(encoder(**SMALL)), "onnx", tmp_path / "out")
