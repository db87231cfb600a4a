"""QLoRA: adapters learn on a packed base that does not change, and are stored beside it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.distillation.qlora import AdaptedLayer
from smelt.errors import ModelError, RecipeError
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.verify import verify
from tests.compression.distillation.test_qat import text, train
from tests.tiny import BUILDS

SETTINGS = {"batch_size": 8, "rank": 4, "epochs": 3, "optimizer": {"lr": 1e-2},
            "weights": {"quantizer": "minmax", "weight_format": "nf4/16"}}  # fmt: skip


def packed(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model(BUILDS["llama"](), source="tiny")
    for parameter in model.network.parameters():  # not the frequencies of RoPE, which transformers keeps in float32
        parameter.data = parameter.data.to(dtype)
    METHODS.build("rtn", bits=4, group_size=16).apply(model, MethodContext())
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_learn_and_the_packed_weights_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    model = packed(dtype)
    before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    loss = sum(float(model.network(**batch).loss.detach()) for batch in text()) / 4
    facts = METHODS.build("qlora", **SETTINGS).apply(model, MethodContext(batches=text(), folder=tmp_path, seed=1))
    after = model.network.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )
    added = set(after) - set(before)
    assert len(added) == 42 and all(name.endswith(("down", "up")) and after[name].dtype == dtype for name in added)
    assert sum(float(model.network(**batch).loss.detach()) for batch in text()) / 4 < 0.9 * loss
    assert facts["bits"] == 4 and facts["conversion_error"] < 1e-3
    (tmp_path / "saved").mkdir()
    save_artifact(model, tmp_path / "saved")
    verify(model, tmp_path / "saved")
    assert all(layer.scheme.rank == 4 for layer in quantized_layers(load_artifact(tmp_path / "saved").network).values())


def test_an_unquantized_model_is_packed_first(tmp_path: Path) -> None:
    model, facts = train(METHODS.build("qlora", **SETTINGS), BUILDS["llama"](), text(), tmp_path)
    assert facts["layers_quantized"] == len(quantized_layers(model.network)) == 21
    assert facts["loss_curve"][0][1] > facts["loss_curve"][-1][1]


def test_the_bytes_of_adapters_on_a_packed_model_are_theirs_alone() -> None:
    model = packed()
    sizes = [(layer.in_features, layer.out_features) for layer in quantized_layers(model.network).values()]
    assert METHODS.build("qlora", **SETTINGS).bytes_change(model.anatomy) == sum(4 * 4 * sum(size) for size in sizes)
    assert METHODS.build("qlora").optimizer.lr == 2e-4, "the paper's for 7 billion parameters"


def test_gradients_are_those_of_the_dequantized_layer() -> None:
    layer = next(iter(quantized_layers(packed().network).values()))
    adapted = AdaptedLayer(copy.deepcopy(layer), "layer", 4, torch.Generator().manual_seed(0))
    adapted.adapter.up.data.normal_()
    x = torch.randn(3, layer.in_features, requires_grad=True)
    adapted(x).square().sum().backward()
    expected = x.detach().clone().requires_grad_()
    weight = layer.weight + adapted.adapter.scaled_up.detach() @ adapted.adapter.down.detach()
    (expected @ weight.T).square().sum().backward()
    assert torch.allclose(x.grad, expected.grad, atol=1e-4, rtol=1e-4)


def test_what_qlora_cannot_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="remove `inputs`"):
        METHODS.build("qlora", inputs={"quantizer": "lsq"})
    model = packed()
    METHODS.build("qlora", **SETTINGS).check(model.anatomy)
    METHODS.build("qlora", **{**SETTINGS, "rank": 1}).check(model.anatomy)
    with pytest.raises(RecipeError, match="rank of qlora must lie"):
        METHODS.build("qlora", rank=0)
    teacher = BUILDS["llama"]()
    teacher.resize_token_embeddings(5)
    teacher.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ModelError, match="has a vocabulary of 5 tokens"):
        taught = {**SETTINGS, "teacher": str(tmp_path / "teacher"), "losses": [{"loss": "logits"}]}
        METHODS.build("qlora", **taught).check(model.anatomy)
    layer = next(iter(quantized_layers(model.network).values()))
    layer.add_low_rank_factors(torch.zeros(2, layer.in_features), torch.zeros(layer.out_features, 2))
    with pytest.raises(ModelError, match="low-rank adapters already"):
        METHODS.build("qlora", **SETTINGS).check(model.anatomy)


def test_a_cast_leaves_packed_tensors_as_the_format_says() -> None:
    network = packed().network
    dtypes = {name: tensor.dtype for name, tensor in network.state_dict().items() if "codes" in name or "scale" in name}
    for dtype in (torch.bfloat16, torch.float32):
        cast = network.to(dtype).state_dict()
        assert dtypes and all(cast[name].dtype == before for name, before in dtypes.items())
