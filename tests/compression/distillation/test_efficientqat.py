"""EfficientQAT: the block phase lowers a block's error, the end-to-end phase changes scales and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smelt.compression.base import METHODS, Batch, MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.distillation.efficientqat import EfficientQat, StepSizeLayer, TrainedWeight
from smelt.compression.recipe.recipe import Recipe
from smelt.errors import ModelError, RecipeError
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics.catalog import get_format
from smelt.numerics.integer import Integer
from tests.compression.distillation.test_qat import Interrupted, images
from tests.tiny import BUILDS
from tests.trained import character_batches, character_model

GRID = {"weights": {"quantizer": "minmax", "weight_format": "int2-asym/16@float16"}}
SETTINGS = {**GRID, "block_epochs": 4, "block_lr": 2e-3, "block_qparams_lr": 2e-3, "batch_size": 8, "epochs": 2,
            "optimizer": {"lr": 2e-3}, "checkpoint_every": 2}  # fmt: skip


def train(folder: Path | None, batches: list[Batch], progress: Any = None, **more: Any) -> tuple[Model, dict[str, Any]]:
    model = character_model("tiny")
    checkpoint = Checkpoint(None if folder is None else folder / "work")
    extra = {} if progress is None else {"progress": progress}
    context = MethodContext(batches=batches, folder=folder, seed=1, checkpoint=checkpoint, **extra)
    return model, METHODS.build("efficientqat", **{**SETTINGS, **more}).apply(model, context)


class InterruptedIn(Interrupted):
    """Raises after so many steps of one phase."""

    def __init__(self, phase: str, steps: int) -> None:
        super().__init__(steps)
        self.phase = phase

    def track(self, items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
        return super().track(items, description, total) if description == self.phase else iter(items)


def packed(model: Model, name: str) -> dict[str, Tensor]:
    return {path: getattr(layer, name) for path, layer in quantized_layers(model.network).items()}


@torch.no_grad()
def block_error(model: Model, batches: list[Batch]) -> float:
    """Return the mean squared error of the output of the first block."""

    def hidden(network: Any, batch: Batch) -> Tensor:
        return network(batch["input_ids"], output_hidden_states=True).hidden_states[1]

    dense = character_model().network
    errors = [(hidden(model.network, batch) - hidden(dense, batch)).square().mean() for batch in batches]
    return float(torch.stack(errors).mean())


def test_the_block_phase_lowers_the_error_of_a_block(tmp_path: Path) -> None:
    batches, unseen = character_batches(), character_batches(seed=9)
    models = []
    for epochs in (0, 4):
        method = METHODS.build("efficientqat", **{**SETTINGS, "block_epochs": epochs})
        assert isinstance(method, EfficientQat)
        models.append(character_model())
        method.block_method.apply(models[-1], MethodContext(batches=batches))
    rounded, trained = (block_error(model, unseen) for model in models)
    assert trained < 0.6 * rounded
    assert any(
        not torch.equal(one, packed(models[1], "codes")[path]) for path, one in packed(models[0], "codes").items()
    )


def test_the_end_to_end_phase_changes_scales_only(tmp_path: Path) -> None:
    batches = character_batches()
    short, _ = train(tmp_path / "a", batches, epochs=1e-3, optimizer={"lr": 1e-8})
    model, facts = train(tmp_path / "b", batches)
    for name in ("codes", "zero"):
        assert all(torch.equal(tensor, packed(short, name)[path]) for path, tensor in packed(model, name).items()), name
    assert all(not torch.equal(tensor, packed(short, "scale")[path]) for path, tensor in packed(model, "scale").items())
    embedding = "model.embed_tokens.weight"
    assert torch.equal(model.network.state_dict()[embedding], character_model().network.state_dict()[embedding])
    with torch.no_grad():
        losses = [sum(float(each.network(**b).loss) for b in character_batches(seed=9)) for each in (short, model)]
    assert losses[1] < losses[0] and facts["conversion_error"] < 1e-5
    assert facts["bits_per_weight"] == pytest.approx(2 + 24 / 16) and facts["layers_quantized"] == 21


def test_the_trained_quantizer_packs_what_it_computes() -> None:
    torch.manual_seed(0)
    for name in ("int2-asym/16@float16", "int3/16@float16"):
        number_format = get_format(name)
        assert isinstance(number_format, Integer)
        quantizer = TrainedWeight(torch.randn(5, 32), number_format)
        with torch.no_grad():
            for parameter in quantizer.parameters():
                parameter.add_(0.3 * torch.rand_like(parameter))
            quantizer.scale.mul_(0.5)  # zero points have a gradient where values are clipped
        assert torch.equal(quantizer().detach(), quantizer.result().dequantize())
        quantizer().square().sum().backward()
        assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in quantizer.parameters())


def test_an_interrupted_run_resumes_to_the_bit(tmp_path: Path) -> None:
    batches = character_batches(samples=16, batch=4)
    whole, _ = train(tmp_path / "whole", batches)
    for phase, steps in (("block 1", 5), ("efficientqat", 3)):  # there are 3 blocks and 4 steps end to end
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut", batches, InterruptedIn(phase, steps))
    resumed, _ = train(tmp_path / "cut", batches)
    states = [each.network.state_dict() for each in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_what_cannot_work_is_refused() -> None:
    for more, words in (
        ({"weights": {"quantizer": "twn"}}, "plain integers"),
        ({"weights": {"quantizer": "minmax", "weight_format": "nf4"}}, "plain integers"),
        ({**GRID, "inputs": {"quantizer": "lsq"}}, "remove `inputs`"),
        ({**GRID, "exclude": ["mlp"]}, "remove `exclude`"),
        ({**GRID, "block_lr": 2.0}, "block_lr of efficientqat must lie"),
    ):
        with pytest.raises(RecipeError, match=words):
            METHODS.build("efficientqat", **more)
    with pytest.raises(ModelError, match="is a convolution"):
        method = METHODS.build("efficientqat", weights={"quantizer": "minmax", "weight_format": "int2-asym/row"})
        method.apply(Model(BUILDS["resnet"]()), MethodContext(batches=images()))
    recipe = Recipe.parse({"steps": [{"method": "efficientqat", **SETTINGS}]})
    assert Recipe.parse(recipe.to_json()) == recipe


def test_only_step_sizes_train() -> None:
    model = character_model()
    method = METHODS.build("efficientqat", **{**SETTINGS, "block_epochs": 0})
    assert isinstance(method, EfficientQat)
    layers, _ = method.prepare_layers(model, MethodContext(batches=character_batches()))
    assert all(isinstance(layer, StepSizeLayer) for layer in layers)
    trained = [name for name, parameter in model.network.named_parameters() if parameter.requires_grad]
    assert len(trained) == len(layers) and all(name.endswith("weight_learned.scale") for name in trained)
