"""SpinQuant: Cayley descent stays orthogonal and reduces the loss; the trained network is the rotated one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.gradients import batch_loss
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization import spinquant
from smelt.compression.quantization.rotation import Rotations, random_rotation, random_rotations, rotate_network
from smelt.compression.quantization.spinquant import SpinQuant, cayley_step, nearest_orthogonal, rounded
from smelt.errors import DataError, ModelError, RecipeError
from smelt.kernels.hadamard import hadamard_transform
from smelt.kernels.linear import ActivationQuant
from smelt.models.anatomy import Anatomy
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics.catalog import FORMATS, get_format
from tests.tiny import BUILDS, inputs


def network_with_outliers() -> hf.PreTrainedModel:
    """A random network trained on its own predictions, so that quantization shows in the loss."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=99, head_dim=16,
    )  # fmt: skip
    network = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            if "embed" in name:  # two outlier channels for every token, as in large models
                parameter[:, [3, 40]] = 2.0
            if "lm_head" in name:
                parameter.mul_(2)
    return network


@torch.no_grad()
def batches(network: Any, count: int = 2) -> list[dict[str, Tensor]]:
    labeled = []
    for seed in range(count):
        batch = inputs("llama", batch=8, length=24, seed=seed)
        choice = network(**batch).logits.argmax(-1)
        labeled.append({**batch, "labels": torch.cat((torch.zeros_like(choice[:, :1]), choice[:, :-1]), 1)})
    return labeled


def orthogonality(matrix: Tensor) -> float:
    return float((matrix.double() @ matrix.double().T - torch.eye(len(matrix), dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("size", [2, 8, 58, 96])
def test_a_step_stays_orthogonal_and_reduces_the_loss(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    turn = random_rotation(size, generator).float()
    target = torch.randn(size, size, generator=generator)
    values = []
    for _ in range(200):
        values.append(float((target * turn).sum()))
        turn = cayley_step(turn, target, 0.05)
        assert orthogonality(turn) < 1e-4
    assert all(later <= earlier + 1e-4 for earlier, later in pairwise(values))
    # the least there is on all orthogonal matrices; with the other determinant all but the smallest can be reached
    least = torch.linalg.svdvals(target).sum() - 2 * torch.linalg.svdvals(target).min()
    assert values[-1] < -0.97 * float(least)


def test_a_step_is_the_cayley_transform() -> None:
    generator = torch.Generator().manual_seed(0)
    turn, gradient = random_rotation(24, generator).float(), 0.1 * torch.randn(24, 24, generator=generator)
    product = gradient.T @ turn
    skew = -(product - product.T) / 2  # what is left of it on a square matrix
    half, eye = 0.01 * skew / 2, torch.eye(24)
    expected = (torch.linalg.inv(eye - half) @ (eye + half) @ turn.T).T
    assert torch.allclose(cayley_step(turn, gradient, 0.01), expected, atol=1e-6)
    assert not torch.allclose(expected, turn, atol=1e-4)


def test_a_zero_gradient_makes_no_step() -> None:
    turn = random_rotation(16, torch.Generator().manual_seed(0)).float()
    assert torch.allclose(cayley_step(turn, torch.zeros(16, 16), 1.5), turn, atol=1e-6)


def test_a_large_gradient_is_limited() -> None:
    turn = random_rotation(32, torch.Generator().manual_seed(0)).float()
    moved = cayley_step(turn, 1e6 * torch.randn(32, 32), 1.5)
    assert orthogonality(moved) < 1e-3


def test_the_nearest_orthogonal_matrix() -> None:
    turn = random_rotation(24, torch.Generator().manual_seed(0))
    assert torch.allclose(nearest_orthogonal(turn.float()), turn, atol=1e-6)
    assert orthogonality(nearest_orthogonal(turn + 1e-3 * torch.randn(24, 24))) < 1e-12


@pytest.mark.parametrize("name", ["int4", "int4-asym/16", "int8", "mxfp4", "nvfp4", "amxfp4", "nf4/20", "dint4"])
@pytest.mark.parametrize("clip", [1.0, 0.7])
def test_fake_quantization_matches_the_format(name: str, clip: float) -> None:
    number_format = get_format(name)
    x = torch.randn(5, 48, requires_grad=True)
    values = rounded(x, number_format, clip)
    assert torch.allclose(values, ActivationQuant(number_format, clip_ratio=clip).fake_quantize(x.detach()), rtol=1e-6)
    # Twice the input is twice the output, so along the input itself the slope is the output (scales of powers of two
    # have no slope, and those in eight bits move by steps).
    weight = torch.randn_like(values)
    (gradient,) = torch.autograd.grad((values * weight).sum(), x)
    slope, output = (gradient * x.detach()).sum(), (values.detach() * weight).sum()
    assert name == "mxfp4" or torch.allclose(slope, output, rtol=0.1 if name in ("nvfp4", "amxfp4") else 1e-4)


def test_the_gradient_of_fake_quantization_by_hand() -> None:
    x = torch.tensor([[0.30, -1.00, 2.00, 0.05]], requires_grad=True)
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    scale = 0.7 * 2.0 / 7  # 0.2: the steps are 2 (1.5 rounded to even), -5, 7 (clipped from 10), 0
    values = rounded(x, FORMATS["int4"], 0.7)
    assert torch.allclose(values.detach(), scale * torch.tensor([[2.0, -5.0, 7.0, 0.0]]), atol=1e-6)
    (gradient,) = torch.autograd.grad((values * weight).sum(), x)
    of_scale = 1.0 * (2 - 1.5) + 10.0 * 0.0 + 100.0 * 7 + 1000.0 * (0 - 0.25)
    assert torch.allclose(gradient, torch.tensor([[1.0, 10.0, of_scale * 0.7 / 7, 1000.0]]), rtol=1e-4)


def test_fake_quantization_keeps_the_dtype() -> None:
    assert rounded(torch.randn(2, 16).bfloat16(), FORMATS["int4"]).dtype == torch.bfloat16


@contextmanager
def quantized_input_hooks(anatomy: Anatomy, method: SpinQuant) -> Iterator[None]:
    """Quantize the inputs of every linear layer of a rotated network, as packed layers do."""
    activation_quant = ActivationQuant(FORMATS[str(method.input_activations)], clip_ratio=method.input_clip_ratio)

    def plain(_: Any, args: tuple[Tensor, ...]) -> Tensor:
        return activation_quant.fake_quantize(args[0])

    def quantize_rotated(_: Any, args: tuple[Tensor, ...]) -> Tensor:
        return hadamard_transform(activation_quant.fake_quantize(hadamard_transform(args[0])), inverse=True)

    hooks = []
    for part in anatomy.parts:
        for module in {id(projection.module): projection.module for projection in part.input_projections}.values():
            hooks.append(module.register_forward_pre_hook(plain))
        hooks.append(part.output.module.register_forward_pre_hook(quantize_rotated if method.rotates(part) else plain))
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    "settings", [{"rotate_heads": True}, {"input_activations": "int4-asym", "input_clip_ratio": 1.0}]
)
@torch.no_grad()
def test_the_trained_network_equals_the_rotated_one(settings: dict[str, Any]) -> None:
    method = SpinQuant(**settings)
    network, rotated = BUILDS["qwen3"](), BUILDS["qwen3"]()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    plain = network(**inputs("qwen3")).logits
    start = random_rotations(anatomy_of(network), seed=4)
    assert start.stream is not None
    turns = {"stream": start.stream.float(), **{str(block): turn.float() for block, turn in start.values.items()}}
    with method.quantized_inputs(anatomy_of(network), turns):
        logits = network(**inputs("qwen3")).logits
    rotate_network(anatomy_of(rotated), start)
    with quantized_input_hooks(anatomy_of(rotated), method):
        expected = rotated(**inputs("qwen3")).logits
    # a value on the edge between two steps may fall on either side
    assert ((logits - expected).abs() < 1e-4).float().mean() > 0.9
    assert (logits - expected).norm() < 0.1 * (logits - plain).norm()
    assert torch.equal(network(**inputs("qwen3")).logits, plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def mean_loss(model: Model, method: SpinQuant, turns: dict[str, Tensor], data: list[dict[str, Tensor]]) -> float:
    with torch.no_grad(), method.quantized_inputs(model.anatomy, turns):
        return sum(float(batch_loss(model.network, batch)) for batch in data) / len(data)


def test_twenty_steps_are_better_than_random_and_stay_orthogonal(tmp_path: Path) -> None:
    model = Model(network_with_outliers())
    data = batches(model.network)
    method = SpinQuant(steps=20, input_activations="int3")
    start = random_rotations(model.anatomy, seed=0)
    assert start.stream is not None
    turns = {"stream": start.stream.float(), **{str(block): turn.float() for block, turn in start.values.items()}}
    random = mean_loss(model, method, turns, data)
    context = MethodContext(seed=0, batches=data, checkpoint=Checkpoint(tmp_path))
    learned = method.rotations(model, context)
    kept = context.checkpoint.load("rotations")
    assert kept is not None and all(orthogonality(turn) < 1e-4 for turn in kept.values())
    assert learned.stream is not None and orthogonality(learned.stream) < 1e-12
    assert mean_loss(model, method, kept, data) < random - 0.1
    assert not torch.allclose(kept["0"], turns["0"], atol=1e-3)  # those of the values moved too
    assert learned.facts["rotations_learned"] and learned.facts["loss_random_rotations"] == pytest.approx(random)
    assert learned.facts["loss_learned_rotations"] == pytest.approx(mean_loss(model, method, kept, data))
    assert_same(method.rotations(model, context), learned)  # a resumed run loads the learned rotations


def test_rotations_that_are_no_better_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(network_with_outliers())
    context = MethodContext(seed=0, batches=batches(model.network))
    uphill = spinquant.cayley_step
    monkeypatch.setattr(spinquant, "cayley_step", lambda turn, gradient, rate: uphill(turn, -gradient, rate))
    result = SpinQuant(steps=10, input_activations="int3").rotations(model, context)
    start = random_rotations(model.anatomy, seed=0)
    assert result.facts["rotations_learned"] is False
    assert result.facts["loss_learned_rotations"] > result.facts["loss_random_rotations"]
    assert (
        result.stream is not None
        and start.stream is not None
        and torch.allclose(result.stream, start.stream, atol=1e-6)
    )


def assert_same(one: Rotations, other: Rotations) -> None:
    assert one.stream is not None and other.stream is not None and torch.equal(one.stream, other.stream)
    assert one.values.keys() == other.values.keys()
    assert all(torch.equal(one.values[block], other.values[block]) for block in one.values)


@pytest.mark.parametrize("rounding", ["gptq", "rtn"])
def test_a_complete_run(rounding: str) -> None:
    results = []
    for _ in range(2):
        model = Model(network_with_outliers())
        data = batches(model.network)
        facts = SpinQuant(steps=2, rounding=rounding).apply(model, MethodContext(seed=1, batches=data))
        results.append(model.network.state_dict())
    assert facts["layers_quantized"] == 14 and facts["layers_rotating_their_inputs"] == 2
    schemes = {layer.scheme.to_json()["inputs"] for layer in quantized_layers(model.network).values()}
    assert schemes == {"int4"}
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_what_cannot_be_learned_is_refused() -> None:
    with pytest.raises(RecipeError, match="use quarot"):
        METHODS.build({"method": "spinquant", "input_activations": None})
    with pytest.raises(RecipeError, match="steps"):
        METHODS.build({"method": "spinquant", "steps": 0})
    with pytest.raises(ModelError, match="has LayerNorm"):
        SpinQuant().apply(Model(BUILDS["gpt2"]()), MethodContext(batches=[inputs("gpt2")]))
    with pytest.raises(ModelError, match="post-norm"):
        SpinQuant().apply(Model(BUILDS["bert"]()), MethodContext(batches=[inputs("bert")]))
    with pytest.raises(DataError, match="calibration data"):
        SpinQuant(rounding="rtn").apply(Model(BUILDS["llama"]()), MethodContext())
    with pytest.raises(DataError, match="labels"):
        SpinQuant(steps=1).apply(Model(BUILDS["llama"]()), MethodContext(batches=[inputs("llama")]))
