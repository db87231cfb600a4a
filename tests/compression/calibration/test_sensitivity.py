"""What a removal costs equals the loss of the network that is really smaller, and nothing is changed afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from smelt.compression.calibration.gradients import batch_loss
from smelt.compression.calibration.hessian import hessian_traces
from smelt.compression.calibration.sensitivity import (
    KINDS,
    Removal,
    Sensitivity,
    estimate_sensitivity,
    measure_sensitivity,
)
from smelt.errors import DataError, ModelError
from smelt.measure.cost import count_parameters
from smelt.models.anatomy import Anatomy
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.attention_reuse import reuse_attention
from smelt.models.expert_surgery import keep_experts
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from tests.mixtures import ids, loaded
from tests.tiny import BUILDS, labeled


def single(name: str, count: int = 3) -> list[dict[str, Tensor]]:
    """Return batches of one labeled sample each."""
    batch = labeled(name)
    return [{key: tensor[row : row + 1] for key, tensor in batch.items()} for row in range(count)]


def mean_loss(network: Any, batches: list[dict[str, Tensor]]) -> float:
    with torch.no_grad():
        return float(np.mean([float(batch_loss(network, batch)) for batch in batches]))


def state(anatomy: Anatomy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in anatomy.network.state_dict().items()}


def of_kind(result: Sensitivity, kind: str) -> list[Removal]:
    return [removal for removal in result.removals if removal.kind == kind]


@pytest.mark.parametrize("name", ["llama", "bert", "opt", "vit"])
def test_heads_channels_and_parts_against_surgery(name: str) -> None:
    anatomy, batches = anatomy_of(BUILDS[name]()), single(name)
    before = state(anatomy)
    result = measure_sensitivity(anatomy, batches, channel_groups=3)
    assert result.loss == pytest.approx(mean_loss(anatomy.network, batches)) and result.samples == 3
    after = anatomy.network.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in anatomy.network.modules())
    for removal in (each for each in result.removals if each.kind in ("heads", "parts")):
        network = copy.deepcopy(anatomy.network)
        part = next(part for part in anatomy_of(network).parts if part.name == removal.name)
        keep = [] if removal.index is None else [unit for unit in range(part.units) if unit != removal.index]
        full = count_parameters(network)
        keep_units(network, part, keep)
        assert removal.increase == pytest.approx(mean_loss(network, batches) - result.loss, abs=2e-5), removal
        assert removal.parameters == full - count_parameters(network)
    groups = of_kind(result, "channels")
    assert len(groups) == 3 * 3 and all(group.increase is not None for group in groups)
    assert sum(group.parameters for group in groups) == sum(
        part.parameters for part in of_kind(result, "parts") if part.name.endswith("ffn_channels")
    )


def test_groups_of_channels_are_in_the_order_of_their_weights() -> None:
    """The first group is the one whose weights were set to almost nothing; removing it changes almost nothing."""
    network: Any = BUILDS["llama"]()
    small = torch.arange(48) % 4 == 1
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight[small] *= 1e-6
        network.model.layers[1].mlp.gate_proj.weight[small] *= 1e-6
        network.model.layers[1].mlp.down_proj.weight[:, small] *= 1e-6
    result = measure_sensitivity(anatomy_of(network), single("llama"), kinds=["channels"], channel_groups=4)
    increases = [abs(each.increase or 0.0) for each in result.removals if each.block == 1]
    assert increases[0] < 1e-6 < min(increases[1:])


def test_a_layer_is_removed_as_from_the_list_of_layers() -> None:
    network: Any = BUILDS["llama"]()
    batches = single("llama")
    result = measure_sensitivity(anatomy_of(network), batches, kinds=["layers"])
    for index, removal in enumerate(result.removals):
        shorter = copy.deepcopy(network)
        del shorter.model.layers[index]
        shorter.config.num_hidden_layers -= 1
        assert removal.increase == pytest.approx(mean_loss(shorter, batches) - result.loss, abs=1e-5)
        assert removal.error is not None and removal.error > 0


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3-moe-dense-first"])
def test_experts_against_surgery(name: str, tmp_path: Path) -> None:
    """With the load-balancing loss switched on, which must neither count nor fail."""
    model = loaded(name, tmp_path)
    model.network.config.output_router_logits = True
    tokens = ids(batch=3)["input_ids"]
    batches = [{"input_ids": row[None], "labels": row[None]} for row in tokens]
    before, logits = state(model.anatomy), model.network(input_ids=tokens).logits
    result = measure_sensitivity(model.anatomy, batches, kinds=["experts"])
    assert model.network.config.output_router_logits is True
    after = model.network.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(model.network(input_ids=tokens).logits, logits)
    assert len(result.removals) == 4 * len(model.anatomy.mixtures)
    assert all(mixture.original_experts == 4 == mixture.num_experts for mixture in model.anatomy.mixtures)
    plain = copy.deepcopy(model.network)
    plain.config.output_router_logits = False
    assert result.loss == pytest.approx(mean_loss(plain, batches), abs=1e-6)
    for removal in result.removals:
        network = copy.deepcopy(plain)
        mixture = next(each for each in anatomy_of(network).mixtures if each.path == removal.name)
        keep_experts(network, mixture, [expert for expert in range(4) if expert != removal.index])
        assert removal.increase == pytest.approx(mean_loss(network, batches) - result.loss, abs=1e-5)


def test_what_cannot_be_removed_says_why(tmp_path: Path) -> None:
    network = BUILDS["resnet"]()
    batches = [{**batch, "labels": torch.tensor([1])} for batch in single("resnet", 2)]
    reasons = [each.why_not for each in measure_sensitivity(anatomy_of(network), batches, kinds=["layers"]).removals]
    assert "its output has another shape than its input" in reasons and None in reasons
    model = Model(BUILDS["llama"]())
    reuse_attention(model.anatomy, {2: 1})
    layers = measure_sensitivity(model.anatomy, single("llama"), kinds=["layers"]).removals
    assert [each.why_not for each in layers] == [None, "another layer uses its attention map", None]
    mixture = loaded("mixtral", tmp_path)
    keep_experts(mixture.network, mixture.anatomy.mixtures[0], [0, 1])
    tokens = ids(batch=2)["input_ids"]
    experts = measure_sensitivity(
        mixture.anatomy, [{"input_ids": row[None], "labels": row[None]} for row in tokens], kinds=["experts"]
    ).removals
    assert [each.why_not for each in experts] == ["a token uses all of them"] * 2 + [None] * 4


def test_unknown_kinds_and_missing_labels_are_refused() -> None:
    anatomy = anatomy_of(BUILDS["llama"]())
    with pytest.raises(DataError, match="there are no 'neurons' to remove; choose from layers, parts"):
        measure_sensitivity(anatomy, single("llama"), kinds=["neurons"])
    with pytest.raises(DataError, match="needs labels"):
        measure_sensitivity(anatomy, [{"input_ids": torch.ones(1, 4, dtype=torch.int64)}])
    assert len(KINDS) == 5


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_estimates_are_sums_of_the_units_of_a_part(name: str) -> None:
    anatomy, batches = anatomy_of(BUILDS[name]()), single(name)
    result = estimate_sensitivity(anatomy, batches, channel_groups=3, probes=4, seed=5)
    assert result.loss == pytest.approx(mean_loss(anatomy.network, batches))
    for part, traces in zip(anatomy.parts, hessian_traces(anatomy, batches, 4, seed=5), strict=True):
        same = [removal for removal in result.removals if removal.name == part.name]
        (whole,) = (removal for removal in same if removal.kind == "parts")
        others = [removal for removal in same if removal.kind != "parts"]
        assert [each.index for each in others] == list(range(part.units if part.kind == "heads" else 3))
        assert whole.increase == pytest.approx(float(traces.sensitivity().mean(0).sum()), abs=1e-9)
        assert sum(each.increase or 0 for each in others) == pytest.approx(whole.increase, abs=1e-9)
        assert sum(each.parameters for each in others) == whole.parameters
        assert whole.error == pytest.approx(float(traces.sensitivity().sum(1).std(ddof=1) / 2), abs=1e-9)
        if part.kind == "heads":
            assert [each.increase for each in others] == pytest.approx(traces.sensitivity().mean(0).tolist())


def test_what_cannot_be_estimated() -> None:
    anatomy, batches = anatomy_of(BUILDS["bert"]()), single("bert")
    with pytest.raises(DataError, match="not of experts; use --measure removal"):
        estimate_sensitivity(anatomy, batches, kinds=["heads", "experts"])
    for wrong in ({"probes": 1}, {"channel_groups": 0}):
        with pytest.raises(DataError, match="at least 1 and 2 are needed"):
            estimate_sensitivity(anatomy, batches, **wrong)
    with pytest.raises(ModelError, match="has none of: heads"):
        estimate_sensitivity(anatomy_of(BUILDS["resnet"]()), single("resnet"), kinds=["heads"], probes=2)
