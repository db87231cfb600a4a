"""Quantizing mixtures of experts: each expert on its own tokens; experts with too few tokens are reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smelt.compression.quantization  # noqa: F401  (puts the methods on the list)
from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.block_inputs import advance, capture_block_inputs
from smelt.compression.calibration.expert_routing import count_expert_tokens
from smelt.compression.calibration.observers import HessianObserver, observe
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.layers import layer_groups, scale_groups
from smelt.compression.quantization.mixed import estimate_unreached
from smelt.compression.quantization.rotation import random_rotations, rotate_network
from smelt.compression.quantization.rounding import round_to_nearest
from smelt.compression.quantization.scaling import fold_scale, scale_source
from smelt.errors import ModelError
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear, quantized_layers
from tests.compression.quantization.test_base import InterruptedRunError, InterruptingProgress, same
from tests.mixtures import BUILDS, CHOSEN, EXPERTS, HIDDEN, INNER, LAYERS, PLAIN, batches, ids, loaded

LOST = "model.layers.1.mlp.experts.3"
SMALL = {"group_size": 16}


@torch.no_grad()
def logits(model: Model) -> Tensor:
    logits: Tensor = model.network(**ids(seed=9)).logits
    return logits


def relative_distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).detach().norm() / second.detach().norm())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every mixture, and a copy with an expert that no token reaches."""
    folder = tmp_path_factory.mktemp("mixtures")
    for name in BUILDS:
        loaded(name, folder / name)
        loaded(name, folder / f"{name}-starved", starved=True)
    return {file.name: file for file in folder.iterdir()}


SETTINGS: dict[str, dict[str, Any]] = {
    "rtn": {}, "hqq": {}, "gptq": {}, "sequential": {"method": "gptq", "sequential": True},
    "awq": {"search_tokens": 60}, "aqas": {"search_tokens": 60}, "smoothquant": {},
    "mixed": {"bits": 6.0, "search_tokens": 60},
    "quarot": {"input_activations": "int8"}, "omniquant": {"epochs": 1},
    "static": {"method": "gptq", "input_activations": "int8", "static_activations": True},
}  # fmt: skip


TAKEN = [*(("olmoe", method) for method in SETTINGS), ("mixtral", "awq"), ("qwen3-moe", "quarot"), ("qwen3-moe", "awq")]


@pytest.mark.parametrize(("name", "method"), TAKEN)
def test_every_method_supports_a_mixture_with_an_unreached_expert(
    name: str, method: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load(folders[f"{name}-starved"])
    before = logits(model)
    settings = {"method": method, **SMALL, "bits": 8, **SETTINGS[method]}
    facts = METHODS.build(settings).apply(model, MethodContext(batches=batches(padded=True)))
    layers = quantized_layers(model.network)
    assert facts["layers_quantized"] == len(layers) == LAYERS * (4 + 3 * EXPERTS)
    assert sum(path.startswith(f"{LOST}.") for path in layers) == 3
    assert not isinstance(model.network.model.layers[0].mlp.gate, QuantizedLinear)
    assert relative_distance(logits(model), before) < 0.1
    if method not in ("rtn", "hqq"):
        assert {"expert": LOST, "tokens": 0, "inputs": HIDDEN} in facts["few_tokens"]
    save_artifact(model, tmp_path)
    reloaded = load(tmp_path)
    assert same(model, reloaded) and torch.equal(logits(model), logits(reloaded))


@pytest.mark.parametrize("name", BUILDS)
def test_all_routing_choices_of_real_tokens_are_counted(name: str, folders: dict[str, Path]) -> None:
    model, data = load(folders[name]), batches(padded=True)
    block_inputs = capture_block_inputs(model.anatomy, data)
    real = sum(int(batch["attention_mask"].sum()) for batch in data)
    for block in model.anatomy.blocks:
        counts = count_expert_tokens(block_inputs, block)
        experts = [part.path for part in block.parts if part.mixture]
        assert list(counts) == experts and sum(counts.values()) == (CHOSEN * real if experts else 0)
        advance(block_inputs, block)


def test_each_batch_is_counted_with_its_own_padding(folders: dict[str, Path]) -> None:
    """The choices of the router, token by token."""
    model, data = load(folders["mixtral"]), batches(3)
    for row, batch in enumerate(data):
        batch["attention_mask"][row, 20 - 6 * row :] = 0
    chosen: list[Tensor] = []
    block_inputs, block = capture_block_inputs(model.anatomy, data), model.anatomy.blocks[0]
    hook = block.module.mlp.gate.register_forward_hook(lambda _, args, output: chosen.append(output[2]))
    counts = count_expert_tokens(block_inputs, block)
    hook.remove()
    expected = [0] * EXPERTS
    for index, batch in zip(chosen, data, strict=True):
        for experts in index[batch["attention_mask"].flatten().bool()].tolist():
            for expert in experts:
                expected[expert] += 1
    assert list(counts.values()) == expected


def test_an_expert_sees_the_real_tokens_routed_to_it(folders: dict[str, Path]) -> None:
    """The Hessian of each expert, with padding, against the router's choices."""
    model, data = load(folders["olmoe"]), batches(padded=True)
    block_inputs, block = capture_block_inputs(model.anatomy, data), model.anatomy.blocks[0]
    observers: dict[nn.Module, HessianObserver] = {
        p.input_projections[0].module: HessianObserver() for p in block.parts if p.mixture
    }
    rows: list[tuple[Tensor, Tensor]] = []
    hook = block.module.mlp.gate.register_forward_hook(lambda _, args, output: rows.append((args[0], output[2])))
    observe(block_inputs, block, observers)
    hook.remove()
    masks = [batch["attention_mask"].flatten().bool() for batch in data]
    for expert, hessian in enumerate(observers.values()):
        x = torch.cat([x[mask & (index == expert).any(-1)] for mask, (x, index) in zip(masks, rows, strict=True)])
        assert hessian.rows == len(x) and hessian.matrix is not None
        torch.testing.assert_close(hessian.matrix, 2 * x.T @ x / len(x), atol=1e-4, rtol=1e-4)


def test_gptq_rounds_each_expert_against_its_own_hessian(folders: dict[str, Path]) -> None:
    model, plain, data = load(folders["olmoe"]), load(folders["olmoe"]), batches(padded=True)
    method: Any = METHODS.build({"method": "gptq", **SMALL})
    method.apply(model, MethodContext(batches=data))
    block_inputs, block = capture_block_inputs(plain.anatomy, data), plain.anatomy.blocks[0]
    for group in (group for group in layer_groups(block) if group.part.mixture):
        hessian = HessianObserver()
        observe(block_inputs, block, {group.layers[0].module: hessian})
        for layer, matrix in zip(group.layers, method.round(group, hessian, method.weight_format), strict=True):
            assert torch.equal(model.network.get_submodule(layer.path).weight, matrix.dequantize())


def test_too_few_tokens_means_fewer_than_input_channels(folders: dict[str, Path]) -> None:
    """Which experts are reported, and that the layer's facts include the count."""
    model, data = load(folders["qwen3-moe"]), batches(2)
    counts = {}
    block_inputs = capture_block_inputs(model.anatomy, data)
    counts |= count_expert_tokens(block_inputs, model.anatomy.blocks[0])
    assert min(counts.values()) < HIDDEN <= max(counts.values())
    facts = METHODS.build({"method": "gptq", **SMALL}).apply(model, MethodContext(batches=data))
    named = {row["expert"]: row["tokens"] for row in facts["few_tokens"] if "layers.0" in row["expert"]}
    assert named == {path: count for path, count in counts.items() if count < HIDDEN}
    assert facts["layers"]["model.layers.0.mlp.experts.2.up_proj"]["tokens"] == counts["model.layers.0.mlp.experts.2"]
    assert "tokens" not in facts["layers"]["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize("name", PLAIN)
def test_gptq_beats_round_to_nearest(name: str, folders: dict[str, Path]) -> None:
    """Return the output error of the experts' layers on routed tokens of text not used for calibration."""
    errors = {}
    for method in ("rtn", "gptq"):
        model, true = load(folders[name]), load(folders[name])
        METHODS.build({"method": method, "bits": 3, **SMALL}).apply(model, MethodContext(batches=batches(16)))
        block_inputs = capture_block_inputs(true.anatomy, [ids(seed) for seed in range(50, 54)])
        errors[method] = [float(e) for block in true.anatomy.blocks for e in _layer_errors(block_inputs, block, model)]
    wins = [g < r for g, r in zip(errors["gptq"], errors["rtn"], strict=True)]
    assert sum(wins) >= 0.75 * len(wins)  # inputs of random networks are nearly white, so there is little to gain
    assert sum(errors["gptq"]) < 0.85 * sum(errors["rtn"])


@torch.no_grad()
def _layer_errors(block_inputs: Any, block: Any, model: Model) -> Iterator[Tensor]:
    inputs: dict[nn.Module, list[Tensor]] = {}
    projections = [p for part in block.parts if part.mixture for p in (*part.input_projections, part.output)]
    observe(block_inputs, block, {p.module: inputs.setdefault(p.module, []).append for p in projections})
    for projection in projections:
        x = torch.cat(inputs[projection.module])
        true, result = x @ projection.module.weight.T, x @ model.network.get_submodule(projection.path).weight.T
        yield (result - true).square().sum() / true.square().sum()
    advance(block_inputs, block)


def test_an_unreached_expert_is_rounded_to_nearest(folders: dict[str, Path]) -> None:
    model = load(folders["mixtral-starved"])
    weight = model.network.get_submodule(f"{LOST}.w1").weight.detach().clone()
    method: Any = METHODS.build({"method": "gptq", **SMALL})
    method.apply(model, MethodContext(batches=batches()))
    result = model.network.get_submodule(f"{LOST}.w1")
    assert torch.equal(result.weight, round_to_nearest(weight, method.weight_format).dequantize())


def test_an_unreached_dense_layer_is_still_an_error(folders: dict[str, Path]) -> None:
    model = load(folders["mixtral"])
    attention = model.network.model.layers[0].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="was never reached by the calibration data"):
        METHODS.build({"method": "gptq", **SMALL}).apply(model, MethodContext(batches=batches()))


def test_an_unreached_expert_borrows_a_static_scale(folders: dict[str, Path]) -> None:
    model = load(folders["olmoe-starved"])
    METHODS.build({"method": "rtn", **SMALL, "input_activations": "int8", "static_activations": True}).apply(
        model, MethodContext(batches=batches())
    )
    scales = [float(expert.down_proj.input_scale) for expert in model.network.model.layers[1].mlp.experts]
    assert scales[3] == max(scales[:3]) > 0


def test_mixed_precision_gives_bits_to_unreached_experts(folders: dict[str, Path]) -> None:
    """An expert without tokens has no measured error; its bits follow its neighbors' errors."""
    block = load(folders["mixtral-starved"]).anatomy.blocks[1]
    method: Any = METHODS.build({"method": "mixed", **SMALL, "bits": 5.0, "search_tokens": 60})
    model = load(folders["mixtral-starved"])
    errors = method.sensitivity(model, MethodContext(batches=batches()))
    assert all(error > 0 for row in errors.values() for error in row)
    assert estimate_unreached(scale_groups(block)[:2], errors) == {}
    others = [errors[f"model.layers.1.mlp.experts.{i}.w2"] for i in range(3)]
    assert errors[f"{LOST}.w2"] == pytest.approx([sum(column) / 3 for column in zip(*others, strict=True)])


@pytest.mark.parametrize(
    "settings", [{"method": "gptq"}, {"method": "awq", "search_tokens": 60}], ids=lambda s: s["method"]
)
def test_a_resumed_run_is_bit_identical(settings: dict[str, Any], folders: dict[str, Path], tmp_path: Path) -> None:
    method, data = METHODS.build({**settings, **SMALL}), batches(padded=True)
    uninterrupted, killed, resumed = (load(folders["qwen3-moe-starved"]) for _ in range(3))
    facts = method.apply(uninterrupted, MethodContext(batches=data))
    with pytest.raises(InterruptedRunError):
        method.apply(
            killed, MethodContext(batches=data, checkpoint=Checkpoint(tmp_path), progress=InterruptingProgress(1))
        )
    repeated = method.apply(resumed, MethodContext(batches=data, checkpoint=Checkpoint(tmp_path)))
    assert same(uninterrupted, resumed) and repeated["few_tokens"] == facts["few_tokens"]


@pytest.mark.parametrize("name", BUILDS)
def test_rotations_include_the_router(name: str, folders: dict[str, Path]) -> None:
    model = load(folders[name])
    before = logits(model)
    rotate_network(model.anatomy, random_rotations(model.anatomy, seed=3))
    assert relative_distance(logits(model), before) < 1e-5
    assert (
        relative_distance(
            model.network.model.layers[1].mlp.gate.weight, load(folders[name]).network.model.layers[1].mlp.gate.weight
        )
        > 0.5
    )


@pytest.mark.parametrize("name", BUILDS)
def test_scales_include_the_router(name: str, folders: dict[str, Path]) -> None:
    model = load(folders[name])
    before, generator, folded = logits(model), torch.Generator().manual_seed(0), 0
    for block in model.anatomy.blocks:
        for group in scale_groups(block):
            source = scale_source(block, group)
            if source is not None:
                fold_scale(group, source, source.foldable(torch.rand(group.columns, generator=generator) * 2 + 0.5))
                folded += 1
    experts = sum(part.mixture is not None for part in model.anatomy.parts)
    clipped = sum(part.clipped for part in model.anatomy.parts)
    dense = name == "qwen3-moe-dense-first"
    assert folded == 3 * LAYERS - clipped + experts + dense  # two norms and values per block; each down projection
    assert relative_distance(logits(model), before) < 1e-5


def test_spinquant_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="which a mixture's router must not be: use quarot"):
        METHODS.build({"method": "spinquant", **SMALL}).apply(
            load(folders["mixtral"]), MethodContext(batches=batches())
        )


def test_a_group_size_that_does_not_divide_names_the_expert(folders: dict[str, Path]) -> None:
    with pytest.raises(Exception, match=rf"experts\.0\.down_proj has {INNER} inputs, which groups of 32"):
        METHODS.build({"method": "rtn", "group_size": 32}).apply(load(folders["olmoe"]), MethodContext())
