"""Fine-tuning trains a pruned network in float32, leaves its shape and dtypes, and quantizes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smelt.compression.distillation
import smelt.compression.pruning
import smelt.compression.quantization  # noqa: F401
from smelt.compression.base import METHODS, MethodContext
from smelt.errors import ModelError, RecipeError
from smelt.models.model import Model
from tests.tiny import BUILDS, labeled

STEP = {
    "method": "finetune", "epochs": 6, "batch_size": 4, "checkpoint_every": 100, "select": "last",
    "optimizer": {"lr": 3e-3},
}  # fmt: skip


def batches(name: str) -> list[dict[str, Tensor]]:
    """Labels that the first token, or the mean of the image, decides."""
    made = [labeled(name, seed) for seed in range(16)]
    for batch in made:
        value = batch["input_ids"][:, 0] > 50 if "input_ids" in batch else batch["pixel_values"].mean((1, 2, 3)) > 0
        batch["labels"] = value.long()
    return made


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_a_pruned_network_is_trained_in_float32(name: str, tmp_path: Path) -> None:
    model, data = Model(BUILDS[name]()), batches(name)
    pruning = {"method": "hap", "budget": {"parameters": 0.6}, "implant": 0.4, "probes": 2}
    METHODS.build(pruning).apply(model, MethodContext(batches=data[:2]))
    model.network.to(torch.bfloat16)
    shape, before = model.anatomy.shape(), {n: t.clone() for n, t in model.network.state_dict().items()}
    seen: set[Any] = set()
    embedding = next(iter(model.network.children()))
    embedding.register_forward_pre_hook(
        lambda module, args: seen.add((module.training, next(module.parameters()).dtype))
    )
    facts = METHODS.build(STEP).apply(model, MethodContext(batches=data, folder=tmp_path))
    after = model.network.state_dict()
    assert seen == {(True, torch.float32), (False, torch.float32)} and not model.network.training
    assert model.anatomy.shape() == shape and before.keys() == after.keys()
    assert all(after[n].dtype == t.dtype for n, t in before.items())
    implants = [n for n in after if n.endswith((".up.weight", ".down.weight", ".implant.weight"))]
    assert implants and all(not torch.equal(after[n], before[n]) for n in implants)
    assert facts["final_loss"] < 0.8 * facts["loss_curve"][0][1]
    assert "bits" not in facts and "layers_quantized" not in facts and facts["bytes_before"] == facts["bytes_after"]


def test_what_it_does_not_do() -> None:
    method = METHODS.build({"method": "finetune"})
    assert (
        method.input_multiple == 1
        and method.targets() == {}
        and method.bytes_change(Model(BUILDS["bert"]()).anatomy) == 0
    )
    for settings in ({"inputs": {"quantizer": "minmax"}}, {"exclude": ["query"]}, {"weights": {"quantizer": "dorefa"}}):
        with pytest.raises(RecipeError, match="finetune quantizes nothing"):
            METHODS.build({"method": "finetune", **settings})
    with pytest.raises(RecipeError, match="needs a teacher"):
        METHODS.build({"method": "finetune", "losses": [{"loss": "logits"}]})
    with pytest.raises(RecipeError, match="epochs of finetune must lie between"):
        METHODS.build({"method": "finetune", "epochs": 0})
    quantized = Model(BUILDS["bert"]())
    METHODS.build({"method": "rtn", "bits": 8, "group_size": -1}).apply(quantized, MethodContext())
    with pytest.raises(ModelError, match="quantized already"):
        method.check(quantized.anatomy)
