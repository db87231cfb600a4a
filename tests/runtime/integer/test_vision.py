"""Vision transformers converted to integer graphs: close to the float network, no image depends on another, errors."""

from __future__ import annotations

from functools import cache
from typing import Literal

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from smelt.compression.base import MethodContext
from smelt.compression.calibration.ranges import observe_ranges
from smelt.compression.quantization.integer_only import IntegerOnly
from smelt.errors import ConversionError
from smelt.models.model import Model
from smelt.runtime.integer.builder import GraphBuilder
from smelt.runtime.integer.debug import NONLINEAR, float_interpreter, layer_sqnr
from smelt.runtime.integer.encoders import NewBuilder
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.network import IntegerNetwork
from smelt.runtime.integer.run import Interpreter
from smelt.runtime.integer.shift_builder import ShiftBuilder
from smelt.runtime.integer.table_builder import TableBuilder
from smelt.runtime.integer.vision import PIXELS, check_vision, convert_vision, observed_vision_modules
from tests.tiny import build_network

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "num_labels": 5,
    "image_size": [16, 24], "patch_size": 4,
}  # fmt: skip
BUILDERS = [GraphBuilder, ShiftBuilder, TableBuilder]


def vit(**options: object) -> hf.PreTrainedModel:
    return build_network(hf.ViTForImageClassification, hf.ViTConfig(**SIZES | options))


def deit() -> hf.PreTrainedModel:
    network = build_network(hf.DeiTForImageClassification, hf.DeiTConfig(**SIZES))
    embeddings = network.deit.embeddings
    generator = torch.Generator().manual_seed(0)
    for parameter in (embeddings.cls_token, embeddings.distillation_token, embeddings.position_embeddings):
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return network


def pixels(rows: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(rows, 3, 16, 24, generator=torch.Generator().manual_seed(seed))


def converted(network: hf.PreTrainedModel, new_builder: NewBuilder = GraphBuilder) -> IntegerGraph:
    batches = [{PIXELS: pixels(seed=seed)} for seed in range(4)]
    ranges = observe_ranges(network, observed_vision_modules(network), batches)
    return convert_vision(network, ranges, new_builder)


@cache
def vit_graph(new_builder: NewBuilder = GraphBuilder) -> IntegerGraph:
    return converted(vit(), new_builder)


def run(graph: IntegerGraph, values: Tensor) -> dict[str, Tensor]:
    outputs = Interpreter(graph, check_ranges=True).run({PIXELS: graph.quantize(PIXELS, values)})
    return {name: graph.dequantize(name, tensor) for name, tensor in outputs.items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("build", [vit, deit])
@pytest.mark.parametrize("new_builder", BUILDERS)
def test_integer_network_is_close_to_the_float_network(build: type, new_builder: NewBuilder) -> None:
    """Class tokens and positions in another row, or a residual that is not added, would be far away."""
    network = build()
    outputs = run(converted(network, new_builder), pixels(seed=9))
    with torch.no_grad():
        expected = network(pixel_values=pixels(seed=9))
        hidden = network.base_model(pixel_values=pixels(seed=9)).last_hidden_state
    assert relative_error(outputs["last_hidden_state"], hidden) < 0.05
    assert relative_error(outputs["logits"], expected.logits) < 0.1


@pytest.mark.parametrize("new_builder", BUILDERS)
def test_no_image_depends_on_the_others_of_its_batch(new_builder: NewBuilder) -> None:
    graph, values = vit_graph(new_builder), pixels()
    together = run(graph, values)["logits"]
    for row in range(len(values)):
        assert torch.equal(run(graph, values[row : row + 1])["logits"][0], together[row])


@pytest.mark.parametrize("new_builder", BUILDERS)
def test_kernels_give_the_bits_of_the_reference(new_builder: NewBuilder) -> None:
    """Operators by shifts have no kernels: they run by the reference between kernels."""
    graph = vit_graph(new_builder)
    output = IntegerNetwork(graph, vit())(pixel_values=pixels(seed=9))
    for name, expected in run(graph, pixels(seed=9)).items():
        assert torch.equal(output[name], expected)


def test_operators_by_shifts_replace_all_others() -> None:
    operators = {node.op for node in vit_graph(ShiftBuilder).nodes}
    assert {"gelu_shift", "softmax_shift", "layer_norm_shift"} < operators
    assert not {"gelu", "softmax", "layer_norm"} & operators


def test_network_without_a_head_gives_hidden_states() -> None:
    network = vit().base_model
    integer = IntegerNetwork(converted(network), network)
    output = integer(pixel_values=pixels())
    assert output.logits is None
    assert output.last_hidden_state.shape == (6, 25, 32)


@pytest.mark.parametrize("new_builder", [GraphBuilder, ShiftBuilder])
def test_sqnr_per_layer_and_nonlinearities_in_float(new_builder: NewBuilder) -> None:
    network, graph = vit(), vit_graph(new_builder)
    rows = {row.layer: row.decibels for row in layer_sqnr(network, graph, [{PIXELS: pixels(seed=9)}])}
    assert {"vit.embeddings.patch_embeddings", "vit.layers.2.layernorm_after", "vit.layernorm"} <= rows.keys()
    assert min(rows.values()) > 15
    inputs = {PIXELS: graph.quantize(PIXELS, pixels(seed=9))}
    exact = Interpreter(graph).run(inputs)["logits"]
    for name in NONLINEAR:
        switched = float_interpreter(graph, [name]).run(inputs)["logits"]
        assert torch.equal(switched, exact) == (name not in ("gelu", "softmax", "layer_norm")), name


@pytest.mark.parametrize("nonlinear", ["i-bert", "nn-lut", "shift"])
def test_method_converts_and_saves_no_float(nonlinear: Literal["i-bert", "nn-lut", "shift"]) -> None:
    model = Model(vit())
    batches = [{PIXELS: pixels(seed=seed)} for seed in range(3)]
    IntegerOnly(nonlinear=nonlinear).apply(model, MethodContext(batches=batches))
    assert isinstance(model.network, IntegerNetwork)
    assert not any(buffer.is_floating_point() for buffer in model.network.buffers())
    assert list(model.network.parameters()) == []


def test_what_has_no_integer_form_is_named() -> None:
    with pytest.raises(ConversionError, match="head of ViTForMaskedImageModeling"):
        check_vision(build_network(hf.ViTForMaskedImageModeling, hf.ViTConfig(**SIZES)))
    with pytest.raises(ConversionError, match=r"vit\.layers\.0\.mlp\.activation_fn: the activation silu"):
        check_vision(vit(hidden_act="silu"))
    network = vit()
    network.vit.layers[1].layernorm_after = nn.GroupNorm(4, 32)
    with pytest.raises(ConversionError, match=r"vit\.layers\.1\.layernorm_after: GroupNorm"):
        check_vision(network)


def test_overflows_are_found_at_conversion() -> None:
    network = vit()
    with torch.no_grad():
        network.vit.layernorm.weight.fill_(1e-12)
        network.vit.layernorm.bias.fill_(1e3)
    with pytest.raises(ConversionError, match=r"vit\.layernorm: .* too large for int32"):
        converted(network)
    network = vit()
    ranges = observe_ranges(network, observed_vision_modules(network), [{PIXELS: pixels()}])
    with torch.no_grad():
        network.vit.embeddings.position_embeddings[0, 3, 3] = 1e6  # beyond the ranges
    with pytest.raises(ConversionError, match=r"vit\.embeddings: the result of add_positions can reach .* int32"):
        convert_vision(network, ranges)
