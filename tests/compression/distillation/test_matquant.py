"""Nested integers: the leading bits of 8-bit weights are weights of their own, in training and when they are packed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.distillation.quantizers.nested import Nested
from smelt.errors import ModelError, RecipeError
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics.catalog import get_format
from smelt.numerics.nested import slice_codes, slice_tensor
from tests.compression.distillation.test_qat import text, train
from tests.tiny import BUILDS


def test_codes_are_rounded_to_their_leading_bits() -> None:
    codes = torch.tensor([0, 31, 32, 95, 96, 128, 160, 200, 255], dtype=torch.uint8)
    assert slice_codes(codes, 8, 2).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert slice_codes(codes, 8, 8) is codes
    every = torch.arange(256, dtype=torch.uint8)
    for bits in range(2, 8):
        values, step = slice_codes(every, 8, bits).int() << (8 - bits), 1 << (8 - bits)
        assert ((values - every.int()).abs() <= step // 2)[: 256 - step].all(), "nearest, but for the largest"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_packed_slice_has_the_values_of_training(bits: int) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    trained = Nested("int8/32@float32", slice_bits=bits).fake_quantize(weight, {})
    packed = slice_tensor(Nested("int8/32@float32").quantize(weight, {}), bits)
    assert packed.format == get_format(f"int{bits}/32@float32") and int(packed.codes.max()) < 2**bits
    assert torch.allclose(packed.dequantize(), trained, rtol=1e-6, atol=0)
    weight.requires_grad_()
    Nested("int8/32@float32", slice_bits=bits).fake_quantize(weight, {}).sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_slices_of_a_trained_model_are_better_than_those_of_a_rounded_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = BUILDS["llama"]()
    optimizer = torch.optim.AdamW(dense.parameters(), 3e-3)
    for _ in range(20):
        for batch in text():
            optimizer.zero_grad()
            dense(**batch).loss.backward()
            optimizer.step()
    weights = {"quantizer": "nested", "weight_format": "int8/row@float32"}
    settings = {"weights": weights, "batch_size": 16, "optimizer": {"lr": 3e-3}}
    losses: dict[tuple[str, int], float] = {}
    for name, epochs in (("rounded", 1e-6), ("trained", 5)):
        lr = {"optimizer": {"lr": 1e-12}} if name == "rounded" else {}
        method = METHODS.build("matquant", **{**settings, **lr, "epochs": epochs})
        model, facts = train(method, copy.deepcopy(dense), text(), tmp_path)
        assert list(facts["validation_loss_by_bits"]) == ["8", "4", "2"] and facts["bits"] == 8
        for bits in (8, 4, 2):
            part = Model(copy.deepcopy(model.network), source="tiny")
            METHODS.build("slice", bits=bits).apply(part, MethodContext())
            assert {layer.scheme.weight.bits for layer in quantized_layers(part.network).values()} == {bits}
            losses[name, bits] = sum(float(part.network(**batch).loss.detach()) for batch in text()) / 4
    assert losses["trained", 2] < 0.9 * losses["rounded", 2]
    assert losses["trained", 4] < losses["rounded", 4] + 0.05 and losses["trained", 8] < losses["rounded", 8] + 0.1


def test_the_weights_of_the_slices_are_the_papers() -> None:
    method = METHODS.build("matquant")
    assert dict(zip(method.slices, method.slice_weights, strict=True)) == {8: 0.1, 4: 0.1, 2: 1.0}


def test_bad_slices_are_refused() -> None:
    with pytest.raises(RecipeError, match="batch_size of matquant must lie"):  # as in every training
        METHODS.build("matquant", batch_size=0)
    with pytest.raises(RecipeError, match="can be sliced to 2 to 8, not 1"):
        METHODS.build("matquant", slices=[8, 1], slice_weights=[1, 1])
    with pytest.raises(RecipeError, match="one number above 0 for each"):
        METHODS.build("matquant", slices=[8, 4], slice_weights=[1])
    with pytest.raises(RecipeError, match="has no nested integers; use symmetric integers"):
        METHODS.build("matquant", weights={"quantizer": "nested", "weight_format": "nf4/64"})
    with pytest.raises(ModelError, match="train one with matquant first"):
        METHODS.build("slice").apply(Model(BUILDS["llama"](), source="tiny"), MethodContext())
