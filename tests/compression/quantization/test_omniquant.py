"""OmniQuant: initialization, gradients, stored weights equal trained ones, and accuracy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from smelt.compression.base import MethodContext
from smelt.compression.calibration.block_inputs import capture_block_inputs
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.layers import layer_groups
from smelt.compression.quantization.learned import FakeQuantized, masked_mse
from smelt.compression.quantization.omniquant import Clipped, OmniQuant
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import DataError, RecipeError
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.format import PER_TENSOR
from smelt.numerics.integer import Integer
from tests.tiny import BUILDS, TRANSFORMERS, inputs
from tests.trained import character_batches, character_model, divergence

FORMATS = [
    Integer(16, "float16", 3, False),
    Integer(-1, "float16", 4, True),
    Integer(PER_TENSOR, "float16", 4, False),
    Integer(20, "float16", 2, False),  # the last group is shorter
    Integer(16, "float32", 4, True, full_range=True),
]


def weights(rows: int = 24, columns: int = 48) -> torch.Tensor:
    matrix = torch.randn(rows, columns) / 8
    matrix[0], matrix[1] = 0, matrix[1].abs()  # a row of zeros, and one without negative values
    return matrix


def states(model: Model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


@pytest.mark.parametrize("number_format", FORMATS, ids=str)
def test_before_training_it_is_round_to_nearest_at_0982(number_format: Integer) -> None:
    matrix = weights()
    start = torch.sigmoid(torch.tensor(4.0))
    grouped = number_format.split_groups(matrix)
    grid = number_format.compute_qparams(grouped, clip_ratio=start)
    expected = number_format.dequantize_groups(number_format.quantize_groups(grouped, grid), grid).flatten(-2)[:, :48]
    assert abs(float(start) - 0.982) < 1e-4
    assert torch.equal(Clipped(matrix, number_format)(), expected)


def test_zero_epochs_equal_the_initialization() -> None:
    model = Model(BUILDS["llama"]())
    original = model.network.model.layers[1].mlp.down_proj.weight.clone()
    OmniQuant(bits=3, group_size=16, epochs=0).apply(model, MethodContext(batches=[inputs("llama")]))
    assert torch.equal(model.network.model.layers[1].mlp.down_proj.weight, Clipped(original, FORMATS[0])())


@pytest.mark.parametrize("number_format", FORMATS, ids=str)
def test_the_packed_layer_is_the_trained_weight_bit_for_bit(number_format: Integer) -> None:
    quantizer = Clipped(weights(), number_format)
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.3)
    before = quantizer().detach()
    for _ in range(5):
        optimizer.zero_grad()
        (quantizer() * torch.randn(24, 48)).sum().backward()
        optimizer.step()
    trained = quantizer().detach()
    layer = QuantizedLinear.from_quantized(
        quantizer.result(), QuantizationScheme(number_format), bias=None, dtype=torch.float32
    )
    assert not torch.equal(trained, before)
    assert torch.equal(layer.weight, trained)


def test_a_clipped_weight_has_the_gradient_of_its_gate() -> None:
    """At the upper end W' = sigmoid(g) max; the gate of the lower end gets no gradient."""
    quantizer = Clipped(torch.tensor([[-0.5, -0.2, 0.3, 1.0]]), Integer(-1, "float32", 8, False))  # zero is 85
    quantizer()[0, 3].backward()
    gate = torch.sigmoid(torch.tensor(4.0))
    assert quantizer.high_gate.grad is not None and quantizer.low_gate.grad is not None
    assert torch.allclose(quantizer.high_gate.grad.flatten(), gate * (1 - gate), rtol=1e-3)
    assert float(quantizer.low_gate.grad.abs()) < 1e-5


@pytest.mark.parametrize("rounded", [None, "int8"])
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_the_trained_block_equals_the_packed_block(family: str, rounded: str | None) -> None:
    """The block with fake-quantized weights matches the same block with packed layers."""
    model, batch = Model(BUILDS[family]()), inputs(family)
    method = OmniQuant(bits=3, group_size=16, epochs=0, input_activations=rounded)
    block_inputs = capture_block_inputs(model.anatomy, [batch])
    block = model.anatomy.blocks[0]
    quantizers = {
        layer: Clipped(layer.weight, method.integer) for group in layer_groups(block) for layer in group.layers
    }
    with torch.no_grad():
        trained = block_inputs.run(FakeQuantized(block, quantizers, method.input_format), 0, 0)
        untouched = block_inputs.run(block.module, 0, 0)
        method.apply(model, MethodContext(batches=[batch]))
        packed = block_inputs.run(block.module, 0, 0)
    mask = torch.ones(trained.shape[:2], dtype=torch.bool) if block_inputs.masks[0] is None else block_inputs.masks[0]
    assert torch.allclose(trained[mask], packed[mask], atol=1e-5)
    assert not torch.allclose(untouched[mask], packed[mask], atol=1e-3)
    assert not any(module._forward_pre_hooks for module in model.network.modules())


def test_padding_is_ignored() -> None:
    output, target = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    expected = (output[mask] - target[mask]).square().mean()
    output[0, 2] = 1e6
    assert torch.allclose(masked_mse(output, target, mask), expected)


@pytest.fixture(scope="module")
def two_bit_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """The trained language model at two bits, and the checkpoint its run left."""
    model, folder = character_model(), tmp_path_factory.mktemp("omniquant")
    OmniQuant(bits=2, group_size=16, epochs=5, lr=0.05).apply(
        model, MethodContext(batches=character_batches(), checkpoint=Checkpoint(folder))
    )
    return model, folder


def test_it_beats_round_to_nearest(two_bit_model: tuple[Model, Path]) -> None:
    nearest = character_model()
    RoundToNearest(bits=2, group_size=16).apply(nearest, MethodContext())
    assert divergence(two_bit_model[0]).kl < 0.75 * divergence(nearest).kl


def test_a_resumed_run_is_bit_identical(two_bit_model: tuple[Model, Path], tmp_path: Path) -> None:
    """Also determinism: the last block is trained a second time."""
    shutil.copytree(two_bit_model[1], tmp_path / "half")
    for left in (tmp_path / "half").glob("block-2.*"):
        left.unlink()
    model = character_model()
    OmniQuant(bits=2, group_size=16, epochs=5, lr=0.05).apply(
        model, MethodContext(batches=character_batches(), checkpoint=Checkpoint(tmp_path / "half"))
    )
    expected, result = states(two_bit_model[0]), states(model)
    assert expected.keys() == result.keys()
    assert all(torch.equal(expected[name], result[name]) for name in expected)


def test_a_bfloat16_network_is_trained_in_float32_and_keeps_its_dtype() -> None:
    model = Model(BUILDS["llama"]().bfloat16())
    OmniQuant(bits=4, group_size=16, epochs=2).apply(model, MethodContext(batches=[inputs("llama")]))
    assert len(quantized_layers(model.network)) == 21
    assert model.network(**inputs("llama")).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["nf4", "dint4", "int4-float-zero", "mxfp4"])
def test_only_plain_integers_are_learned(name: str) -> None:
    with pytest.raises(RecipeError, match="plain integers"):
        OmniQuant(format=name)


def test_a_nan_raises_one_sentence() -> None:
    model = Model(BUILDS["llama"]())
    with torch.no_grad():
        model.network.model.embed_tokens.weight[5] = torch.nan
    batch = {"input_ids": torch.full((1, 8), 5), "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    with pytest.raises(DataError, match="not a finite number"):
        OmniQuant(bits=4, group_size=16, epochs=1).apply(model, MethodContext(batches=[batch]))
