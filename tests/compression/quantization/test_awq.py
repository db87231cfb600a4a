"""AWQ: no scale is RTN, the search is never worse, errors are of the enclosing module, clipping only helps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.block_inputs import capture_block_inputs
from smelt.compression.quantization.awq import Awq
from smelt.compression.quantization.base import BlockWork
from smelt.compression.quantization.layers import layer_groups
from smelt.compression.quantization.scale_search import CLIP_RATIOS, Candidate, clip_, clipped_projections
from smelt.compression.quantization.search_eval import LayerOutputError, ModuleOutputError, first_batches
from smelt.errors import RecipeError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics import Format, get_format
from tests.tiny import BUILDS, inputs


def batches(name: str) -> list[dict[str, Tensor]]:
    return [inputs(name, seed=seed) for seed in range(3)]


def apply_awq(name: str, **settings: Any) -> tuple[Model, dict[str, Any]]:
    model = Model(BUILDS[name]())
    facts = METHODS.build({"method": "awq", "group_size": 16, **settings}).apply(
        model, MethodContext(batches=batches(name))
    )
    return model, facts


def first_block_work(name: str, method: Awq) -> BlockWork:
    network = BUILDS[name]()
    anatomy = anatomy_of(network)
    block = anatomy.blocks[0]
    schemes = {layer.path: method.scheme for group in layer_groups(block) for layer in group.layers}
    return BlockWork(block, capture_block_inputs(anatomy, batches(name)), MethodContext(), network, schemes, {})


def test_no_scale_and_no_clip_is_round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_none(self: Awq, group: Any, mean: Tensor, amax: Tensor) -> Iterator[Candidate]:
        yield next(candidates(self, group, mean, amax))

    candidates = Awq.candidates
    monkeypatch.setattr(Awq, "candidates", only_none)
    model, _ = apply_awq("llama", clip=False, bits=3)
    plain = Model(BUILDS["llama"]())
    METHODS.build({"method": "rtn", "group_size": 16, "bits": 3}).apply(plain, MethodContext())
    one, two = model.network.state_dict(), plain.network.state_dict()
    assert all(torch.equal(one[key], two[key]) for key in two)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "vit", "bert"])
def test_the_search_is_never_worse_than_round_to_nearest(name: str) -> None:
    _, facts = apply_awq(name, bits=3, search_tokens=40)
    notes = [fact["scaling"] for fact in facts["layers"].values() if fact["scaling"]["into"]]
    assert notes and all(note["error"] <= note["error_unscaled"] for note in notes)
    assert any(note["exponent"] > 0 for note in notes)


@torch.no_grad()
def test_the_error_is_of_the_enclosing_module() -> None:
    """Error of attention for q, k, v, of the FFN for up and gate, else of the layer: by plain forwards."""
    method = Awq(group_size=16, bits=3)
    work = first_block_work("llama", method)
    assert work.block_inputs is not None
    for group in layer_groups(work.block):
        error_type = ModuleOutputError if group.is_input_group else LayerOutputError
        around = error_type(work.block_inputs, work.block, group, 10_000)
        weights = [method.weight_format.fake_quantize(layer.weight) for layer in group.layers]
        other: Any = copy.deepcopy(work.network)
        for layer, weight in zip(group.layers, weights, strict=True):
            other.get_submodule(layer.path).weight.copy_(weight)
        expected = []
        for network in (work.network, other):
            seen: list[Tensor] = []
            module = network.get_submodule(group.part.output.path)
            hook = module.register_forward_hook(lambda _, args, output, seen=seen: seen.append(output))
            for batch in batches("llama"):
                network(**batch)
            hook.remove()
            expected.append(torch.stack(seen))
        assert around.error(weights) == pytest.approx(float((expected[0] - expected[1]).square().mean()), rel=1e-3)


@torch.no_grad()
def test_padding_is_ignored() -> None:
    work = first_block_work("bert", Awq(group_size=16))
    assert work.block_inputs is not None
    group = layer_groups(work.block)[1]
    around = LayerOutputError(work.block_inputs, work.block, group, 10_000)
    real = sum(int(batch["attention_mask"].sum()) for batch in batches("bert"))
    assert sum(len(true) for true in around.reference) == real == 3 * (3 * 11 - 3)


def test_the_search_leaves_the_network_unchanged() -> None:
    method = Awq(group_size=16, bits=2)
    work = first_block_work("llama", method)
    before = {key: tensor.clone() for key, tensor in work.network.state_dict().items()}
    assert work.block_inputs is not None
    for group in layer_groups(work.block):
        error_type = ModuleOutputError if group.is_input_group else LayerOutputError
        around = error_type(work.block_inputs, work.block, group, 10_000)
        method.trial_error(group, around, torch.rand(group.columns) + 0.5)
    assert all(torch.equal(tensor, before[key]) for key, tensor in work.network.state_dict().items())
    for module in work.network.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)


@torch.no_grad()
def test_scaling_preserves_the_function() -> None:
    for name in ("llama", "opt", "gpt2"):
        method = Awq(group_size=16, bits=3)
        work = first_block_work(name, method)
        before = work.network(**inputs(name)).logits
        notes = method.scale(work)
        assert any(note["exponent"] > 0 for note in notes.values() if note["into"])
        assert torch.allclose(work.network(**inputs(name)).logits, before, atol=1e-5)


def test_the_search_uses_a_subset_of_batches() -> None:
    block_inputs = capture_block_inputs(anatomy_of(BUILDS["llama"]()), batches("llama"))  # 33 positions each
    assert [first_batches(block_inputs, tokens) for tokens in (1, 65, 66, 1000)] == [[0], [0], [0, 1], [0, 1, 2]]


def exhaustive_clip(weight: Tensor, x: Tensor, number_format: Format, size: int) -> Tensor:
    """Per group and per row."""
    best = weight.clone()
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], size):
            part, inputs_here = weight[row, start : start + size], x[:, start : start + size]
            errors = []
            for shrink in CLIP_RATIOS:
                limit = part.abs().max() * shrink
                rounded = number_format.fake_quantize(part.clamp(-limit, limit)[None])[0]
                errors.append(float((inputs_here @ (rounded - part)).square().sum()))
            limit = part.abs().max() * CLIP_RATIOS[min(range(len(errors)), key=errors.__getitem__)]
            best[row, start : start + size] = part.clamp(-limit, limit)
    return best


@pytest.mark.parametrize("name", ["int3-asym/16", "int3/16", "int2-asym/40"])
def test_the_clip_ratio_is_the_best_candidate(name: str) -> None:
    number_format = get_format(name)
    weight, x = torch.distributions.StudentT(3.0).sample((70, 40)), torch.randn(50, 40)
    result = weight.clone()
    clip_(result, x, number_format)
    assert torch.allclose(result, exhaustive_clip(weight, x, number_format, number_format.group_size))
    assert not torch.equal(result, weight)


def test_queries_and_keys_are_never_clipped() -> None:
    for name, rows in (("llama", 16), ("gpt2", 32)):
        groups = layer_groups(anatomy_of(BUILDS[name]()).blocks[0])
        (values,) = clipped_projections(groups[0])
        assert values.first_row == (64 if name == "gpt2" else 0) and values.out_features == rows
        assert all(len(clipped_projections(group)) == len(group.layers) for group in groups[1:])


def test_clipping_changes_no_query_or_key_rows() -> None:
    for name, untouched in (("gpt2", 64), ("llama", None)):
        clipped, plain = (apply_awq(name, bits=2, clip=clip, search_tokens=40)[0].network for clip in (True, False))
        one, two = quantized_layers(clipped), quantized_layers(plain)
        path = next(iter(one))  # c_attn or q_proj of the first block
        same = torch.equal(one[path].codes[:untouched], two[path].codes[:untouched])
        assert same
        if name == "gpt2":
            assert not torch.equal(one[path].codes[64:], two[path].codes[64:])


@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
def test_it_beats_round_to_nearest_with_outlier_channels(rounding: str) -> None:
    def model_with_outliers() -> Model:
        model = Model(BUILDS["opt"]())
        with torch.no_grad():
            for block in model.network.model.decoder.layers:
                for norm in (block.self_attn_layer_norm, block.final_layer_norm):
                    norm.weight[[3, 17]] *= 30
        return model

    def error(settings: dict[str, Any]) -> float:
        model = model_with_outliers()
        METHODS.build({"bits": 4, "group_size": -1, **settings}).apply(model, MethodContext(batches=batches("opt")))
        with torch.no_grad():
            true = model_with_outliers().network(**inputs("opt")).logits
            return float((model.network(**inputs("opt")).logits - true).square().mean())

    assert error({"method": "awq", "rounding": rounding}) < 0.5 * error({"method": "rtn"})


@pytest.mark.parametrize("settings", [{"rounding": "magic"}, {"search_tokens": 0}, {"clip": 1}, {"bits": 9}])
def test_invalid_settings_raise_one_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        METHODS.build({"method": "awq", **settings})
    assert "\n" not in str(caught.value)
