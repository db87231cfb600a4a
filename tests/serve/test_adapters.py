"""Several adapters in one batch: each request matches the model with its adapter merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from smelt.compression.base import MethodContext
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import ModelError, RequestError
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from tests.serve.test_engine import GREEDY, SMALL, expected, prompts, run
from tests.tiny import BUILDS

TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def write_adapter(folder: Path, network: Any, seed: int, rank: int = 4, **config: Any) -> Path:
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for target in TARGETS:
            module = network.get_submodule(f"model.layers.{layer}.{target}")
            name = f"base_model.model.model.layers.{layer}.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, module.in_features) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, rank) * 0.3
    folder.mkdir()
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, **config}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(network: Any, folder: Path, scale: float) -> Any:
    from safetensors.torch import load_file

    changed, tensors = copy.deepcopy(network), load_file(folder / "adapter_model.safetensors")
    for name in {name.rpartition(".lora_")[0] for name in tensors}:
        layer = changed.get_submodule(name.removeprefix("base_model.model."))
        layer.weight.data += scale * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    return changed


@pytest.fixture
def served(tmp_path: Path) -> tuple[Any, dict[str, Path]]:
    network = BUILDS["llama"]()
    folders = {f"a{seed}": write_adapter(tmp_path / f"a{seed}", network, seed, rank=seed + 1) for seed in range(3)}
    return network, folders


@pytest.mark.parametrize("compiled", [True, False])
def test_a_mixed_batch_equals_merged_models(served: tuple[Any, dict[str, Path]], compiled: bool) -> None:
    network, folders = served
    engine = Engine(Model(copy.deepcopy(network)), adapters=folders, compiled=compiled, **SMALL)
    text = prompts()[0]
    names: list[str | None] = [None, *folders, None, "a1"]
    for _ in range(2):  # the second time with a warm prefix cache, which must not be shared
        requests = [engine.submit(text, GREEDY, adapter=name)[0] for name in names]
        run(engine)
        for name, request in zip(names, requests, strict=True):
            rank = 1 if name is None else int(name[1:]) + 1
            model = network if name is None else merged(network, folders[name], 8 / rank)
            assert request.output == expected(model, text), name
    assert len({tuple(request.output) for request in requests}) == 4


def test_the_prefix_cache_is_not_shared_across_adapters(served: tuple[Any, dict[str, Path]]) -> None:
    engine = Engine(Model(served[0]), adapters=served[1], **SMALL)
    text = prompts()[0]
    cached = []
    for name in ("a0", "a0", "a1", None, None):
        request = engine.submit(text, GREEDY, adapter=name)[0]
        run(engine)
        cached.append(request.num_cached_tokens > 0)
    assert cached == [False, True, False, False, True]


def test_over_a_quantized_base(served: tuple[Any, dict[str, Path]]) -> None:
    network, folders = served
    model = Model(network)
    RoundToNearest(bits=4, group_size=16).apply(model, MethodContext())
    engine = Engine(model, adapters=folders, **SMALL)
    base = engine.submit(prompts()[0], GREEDY)[0]
    adapted = engine.submit(prompts()[0], GREEDY, adapter="a2")[0]
    run(engine)
    assert base.output != adapted.output


def test_rslora_scale(tmp_path: Path) -> None:
    network = BUILDS["llama"]()
    folder = write_adapter(tmp_path / "a", network, 0, use_rslora=True)
    engine = Engine(Model(copy.deepcopy(network)), adapters={"a": folder}, **SMALL)
    request = engine.submit(prompts()[0], GREEDY, adapter="a")[0]
    run(engine)
    assert request.output == expected(merged(network, folder, 8 / 2), prompts()[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "uses bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": "many"}, "no usable rank"),
    ],
    ids=str,
)
def test_unsupported_adapters_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    network = BUILDS["llama"]()
    folder = write_adapter(tmp_path / "a", network, 0, **change)
    with pytest.raises(ModelError, match=message):
        Engine(Model(network), adapters={"a": folder}, **SMALL)


def test_files_that_do_not_match_the_model(tmp_path: Path) -> None:
    network = BUILDS["llama"]()
    other = write_adapter(tmp_path / "other", BUILDS["qwen2"](), 0)
    file = other / "adapter_model.safetensors"

    def message(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, file)
        with pytest.raises(ModelError) as raised:
            Engine(Model(network), adapters={"a": other}, **SMALL)
        return str(raised.value)

    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    pair = {name.format("A"): torch.zeros(2, 32), name.format("B"): torch.zeros(32, 2)}
    assert "outputs; the model has" in message({**pair, name.format("B"): torch.zeros(31, 2)})
    assert "more than pairs" in message({**pair, "base_model.model.lm_head.weight": torch.zeros(2)})
    assert "more than pairs" in message({name.format("A"): torch.zeros(2, 32)})
    nowhere = {key.replace("q_proj", "x_proj"): tensor for key, tensor in pair.items()}
    assert "not a linear layer" in message(nowhere)
    head = {key.replace("model.layers.0.self_attn.q_proj", "lm_head"): tensor for key, tensor in pair.items()}
    head["base_model.model.lm_head.lora_B.weight"] = torch.zeros(99, 2)
    assert "the LM head" in message(head)
    file.unlink()
    with pytest.raises(ModelError, match="safetensors only"):
        Engine(Model(network), adapters={"a": other}, **SMALL)


def test_an_unknown_name(served: tuple[Any, dict[str, Path]]) -> None:
    engine = Engine(Model(served[0]), adapters=served[1], **SMALL)
    with pytest.raises(RequestError, match="no adapter 'b'; there are a0, a1, a2"):
        engine.submit([5], GREEDY, adapter="b")
