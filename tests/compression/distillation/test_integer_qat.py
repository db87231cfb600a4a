"""The training before integer-only: it rounds as the graph does, and ends as that graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.ranges import observe_ranges
from smelt.compression.distillation.integer_qat import RoundedActivation, RoundedWeight, _round_layers, _stop_rounding
from smelt.errors import RecipeError
from smelt.models.model import Model
from smelt.runtime.integer.encoders import convert_encoder, observed_modules
from smelt.runtime.integer.network import IntegerNetwork
from tests.runtime.integer.test_encoders import padded_batch
from tests.tiny import BUILDS


def test_rounding_is_that_of_the_graph_and_gradients_pass() -> None:
    network = BUILDS["bert"]()
    batch = padded_batch()
    ranges = observe_ranges(network, observed_modules(network), [batch])
    graph = convert_encoder(network, ranges)
    plain = network(**batch).logits.detach()
    layers = _round_layers(network, graph)
    assert len(layers) == 3 * 6 + 2
    with_output = [path for path, module in network.named_modules() if path and hasattr(module, "rounded_output")]
    assert len(with_output) == 3 * 3 and all(path.endswith(("query", "key", "value")) for path in with_output)
    rounded = network(**batch).logits
    assert not torch.equal(rounded, plain)
    node = next(node for node in graph.nodes if node.op == "linear")
    module = network.get_submodule(node.layer)
    scale = torch.tensor(graph.scales[node.output])[:, None] / torch.tensor(graph.scales[node.inputs[0]])
    assert torch.allclose(module.weight, node.constants["weight"] * scale, rtol=1e-5, atol=1e-7)
    rounded.sum().backward()
    assert module.parametrizations.weight.original.grad.abs().sum() > 0
    _stop_rounding(network)
    assert torch.equal(network(**batch).logits, plain)
    assert type(module) is nn.Linear


def test_values_beyond_the_frozen_range_are_clamped_with_a_gradient() -> None:
    x = torch.tensor([-300.0, 0.26, 300.0], requires_grad=True)
    y = RoundedActivation(torch.tensor(0.5))(x)
    assert y.tolist() == [-63.5, 0.5, 63.5]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0, 1.0]
    weight = torch.tensor([[1.0, 100.0], [0.0, 0.0]])
    assert torch.allclose(RoundedWeight(torch.tensor([100.0, 1.0]))(weight), weight)


def test_training_ends_as_an_integer_network() -> None:
    model = Model(BUILDS["bert"]())
    batches = [{**padded_batch(seed=seed), "labels": torch.tensor([0, 1] * 3)} for seed in range(8)]
    step = METHODS.build({"method": "integer-qat", "batch_size": 4, "epochs": 2, "optimizer": {"lr": 1e-3}})
    facts = step.apply(model, MethodContext(batches=batches))
    assert isinstance(model.network, IntegerNetwork)
    assert facts["steps"] == 23
    assert facts["logit_difference"] < 0.1
    assert facts["bytes_after"] < facts["bytes_before"] / 2
    untrained = Model(BUILDS["bert"]())
    METHODS.build({"method": "integer-only"}).apply(untrained, MethodContext(batches=batches))
    assert not torch.equal(model.network(**padded_batch()).logits, untrained.network(**padded_batch()).logits)


@pytest.mark.parametrize(
    "settings", [{}, {"teacher": "source", "losses": [{"loss": "logits"}]}], ids=["labels", "teacher"]
)
def test_a_teacher_is_imitated_without_dropout(settings: dict[str, object]) -> None:
    network = BUILDS["bert"]()
    batches = [{**padded_batch(seed=seed), "labels": torch.tensor([0, 1] * 3)} for seed in range(4)]
    step = METHODS.build({"method": "integer-qat", "batch_size": 4, "epochs": 0.5, **settings})
    facts = step.apply(Model(network), MethodContext(batches=batches))
    rates = {module.p for module in network.modules() if isinstance(module, nn.Dropout)}
    assert rates == ({0.0} if settings else {0.1})
    assert not settings or facts["final_loss"] < 1e-3, "rounding alone separates it from its teacher"


def test_the_change_of_bytes_is_three_of_four_per_weight() -> None:
    anatomy = Model(BUILDS["bert"]()).anatomy
    weights = [module.weight.numel() for module in anatomy.network.bert.encoder.modules() if type(module) is nn.Linear]
    assert METHODS.build({"method": "integer-qat"}).bytes_change(anatomy) == -3 * sum(weights)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_other_networks_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"trains encoders of text, not {name} networks; use integer-only"):
        METHODS.build({"method": "integer-qat"}).check(Model(BUILDS[name]()).anatomy)


def test_other_quantizers_are_refused() -> None:
    with pytest.raises(RecipeError, match="remove `weights`, `inputs` and `exclude`"):
        METHODS.build({"method": "integer-qat", "inputs": {"quantizer": "minmax"}})
