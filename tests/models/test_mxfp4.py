"""GPT-OSS folders as they are published, with experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from smelt.errors import ModelError
from smelt.models.load import load, skeleton
from smelt.models.quantized import quantized_layers
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.architectures import ARCHITECTURES

EXPERTS = "model.layers.0.mlp.experts"


def publish(folder: Path) -> Any:
    """Write a tiny folder with random MXFP4 experts; return transformers' network with the same weights."""
    network: Any = ARCHITECTURES["gpt_oss"].save(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            path = f"model.layers.{layer}.mlp.experts.{name}"
            experts, columns, rows = tensors.pop(path).shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
            tensors[f"{path}_blocks"], tensors[f"{path}_scales"] = blocks, scales
            dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, columns, rows]
            network.get_parameter(path).data = dense
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return network


def test_logits_equal_those_of_the_dequantized_network(tmp_path: Path) -> None:
    network, model = publish(tmp_path), load(tmp_path)
    layers = quantized_layers(model.network)
    assert len(layers) == 2 * 4 * 3  # layers, experts, projections
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = network(input_ids=ids).logits
        assert torch.allclose(model.network(input_ids=ids).logits, expected, atol=1e-4)


def test_the_engine_serves_them_compiled(tmp_path: Path) -> None:
    network = publish(tmp_path)
    engine, prompt = Engine(load(tmp_path), max_model_len=64), list(range(5, 30))
    assert engine.runner.backend == "compiled-cpu"
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    with torch.no_grad():
        expected = network(input_ids=torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
    assert answer.tokens == expected.argmax(-1).tolist()


def test_the_skeleton_knows_the_packed_size(tmp_path: Path) -> None:
    publish(tmp_path)
    layer = quantized_layers(skeleton(tmp_path))[f"{EXPERTS}.0.gate_proj"]
    assert layer.packed.tensors["codes"].shape == (96, 32) and layer.packed.device.type == "meta"


def _cut(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][:, 1:].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_scales"), "lack .*down_proj_scales"),
        (
            lambda tensors: _cut(tensors, f"{EXPERTS}.gate_up_proj_blocks"),
            r"blocks is U8 \[4, 191, 2, 16\]",
        ),
        (lambda tensors: tensors.pop("model.norm.weight"), "lack model.norm.weight"),
    ],
)
def test_damaged_weights(change: Any, message: str, tmp_path: Path) -> None:
    publish(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_mxfp4_without_experts_is_refused(tmp_path: Path) -> None:
    ARCHITECTURES["llama"].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ModelError, match="has no experts"):
        load(tmp_path)
