"""Hutchinson's traces against the exact Hessian, their spread against its formula, and what they leave unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.hessian import UnitTraces, hessian_traces, projections_of
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization import rtn  # noqa: F401  (puts the method on the list)
from smelt.errors import DataError, ModelError
from smelt.models.anatomy import Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from tests.tiny import BUILDS, build_network, inputs, labeled

PROBES = 120


def tiny_resnet() -> PreTrainedModel:
    config = hf.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=3)
    return build_network(hf.ResNetForImageClassification, config)


def tiny_bert() -> PreTrainedModel:
    config = hf.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6, vocab_size=99, num_labels=2
    )
    return build_network(hf.BertForSequenceClassification, config)


def tiny_gpt2() -> PreTrainedModel:
    """Fused q, k, v in a transposed weight."""
    config = hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_inner=6, vocab_size=99, n_positions=16)
    return build_network(hf.GPT2LMHeadModel, config)


def two_batches(name: str) -> list[dict[str, Tensor]]:
    labels = torch.tensor([0, 1, 1])
    batches = [inputs(name, seed=seed) for seed in (1, 2)]
    if name == "resnet":
        batches = [{"pixel_values": batch["pixel_values"][..., :16, :16].contiguous()} for batch in batches]
    return [{**batch, "labels": batch["input_ids"] if name == "gpt2" else labels} for batch in batches]


def exact_hessian(network: PreTrainedModel, modules: list[Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the Hessian of the loss by the weights of modules, flattened one after the other."""
    sizes = [module.weight.numel() for module in modules]
    names = {id(parameter): name for name, parameter in network.named_parameters()}

    def loss(flat: Tensor) -> Tensor:
        pieces = [piece.view_as(module.weight) for piece, module in zip(flat.split(sizes), modules, strict=True)]
        values = {names[id(module.weight)]: piece for module, piece in zip(modules, pieces, strict=True)}
        result: Tensor = torch.func.functional_call(network, values, kwargs=batch).loss
        return result

    flat = torch.cat([module.weight.detach().flatten() for module in modules])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hessian: Tensor = torch.autograd.functional.hessian(loss, flat)
    return hessian.double()


def block_indices(part: Part, unit: int, starts: dict[int, int]) -> list[Tensor]:
    """Return the positions in the flat vector of the weights of a unit, for each projection."""
    blocks = []
    for projection, rows in zip(projections_of(part), (*part.rows_per_unit, None), strict=True):
        module = projection.module
        positions = torch.arange(module.weight.numel()).view(module.weight.shape)
        positions = (positions.T if projection.transposed else positions)[projection.slice] + starts[id(module)]
        if rows is None:
            blocks.append(positions[:, unit * part.columns_per_unit : (unit + 1) * part.columns_per_unit].flatten())
        else:
            blocks.append(positions[unit * rows : (unit + 1) * rows].flatten())
    return blocks


@pytest.mark.parametrize(("name", "build"), [("resnet", tiny_resnet), ("bert", tiny_bert), ("gpt2", tiny_gpt2)])
def test_traces_are_those_of_the_exact_hessian(name: str, build: Callable[[], PreTrainedModel]) -> None:
    """The spread, too: Var(v_c . (Hv)_c) = sum over i in c of (sum over j != i of H_ij^2, twice if j is in c), where
    H is that of weights divided by the root mean square of their layer."""
    network = build()
    anatomy, batches = anatomy_of(network), two_batches(name)
    modules = list({id(p.module): p.module for part in anatomy.parts for p in projections_of(part)}.values())
    sizes = [module.weight.numel() for module in modules]
    starts = {id(module): sum(sizes[:index]) for index, module in enumerate(modules)}
    single = [exact_hessian(network, modules, batch) for batch in batches]
    exact = torch.stack(single).mean(0)
    scale = torch.cat([m.weight.detach().double().square().mean().sqrt().expand(m.weight.numel()) for m in modules])
    relative = [hessian * scale * scale[:, None] for hessian in single]
    errors, ratios = [], []
    for part, traces in zip(anatomy.parts, hessian_traces(anatomy, batches, PROBES, seed=0), strict=True):
        assert traces.estimates.shape == (PROBES, len(part.input_projections) + 1, part.units)
        for unit in range(part.units):
            for block, indices in enumerate(block_indices(part, unit, starts)):
                variance = sum(_variance(hessian, indices) for hessian in relative) / len(batches) ** 2
                variance /= float(scale[indices[0]]) ** 4
                error = traces.mean[block, unit] - float(exact.diagonal()[indices].sum())
                errors.append(error / np.sqrt(variance / PROBES + 1e-24))
                ratios.append(traces.estimates[:, block, unit].std() / np.sqrt(variance + 1e-24))
                weights = torch.cat([module.weight.detach().flatten() for module in modules])[indices].double()
                assert traces.squared_norms[block, unit] == pytest.approx(float(weights.square().sum()))
                assert traces.sizes[block] == len(indices)
    assert 0.1 < np.abs(errors).max() < 5
    assert np.mean(ratios) == pytest.approx(1, abs=0.12)


def _variance(hessian: Tensor, indices: Tensor) -> float:
    squares = hessian[indices].square()
    inside = squares[:, indices].sum() - hessian.diagonal()[indices].square().sum()
    return float(2 * inside + squares.sum() - squares[:, indices].sum())


def test_moving_scale_between_layers_changes_no_sensitivity() -> None:
    """A batch norm of positive slope and a ReLU let a factor pass: one layer times 9, the next divided by it."""
    plain, scaled = tiny_resnet(), tiny_resnet()
    part = anatomy_of(scaled).parts[0]
    with torch.no_grad():
        for norm in (anatomy_of(plain).parts[0].norm, part.norm):
            norm.weight.abs_()
        part.norm.weight.mul_(9)
        part.norm.bias.mul_(9)
        part.output.weight.div_(9)
    one, two = (hessian_traces(anatomy_of(network), two_batches("resnet"), 5, seed=0)[0] for network in (plain, scaled))
    assert two.squared_norms[1] == pytest.approx(one.squared_norms[1] / 81)  # what magnitude ranks by
    assert two.sensitivity() == pytest.approx(one.sensitivity(), rel=1e-3, abs=1e-6)  # with the same probes, exactly


def test_sensitivity_follows_the_formula() -> None:
    traces = UnitTraces(np.array([[[1.0, -2.0], [3.0, 4.0]]]), np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([4.0, 5.0]))
    assert traces.sensitivity()[0] == pytest.approx([1 * 2 / 8 + 3 * 1 / 10, -2 * 1 / 8 + 4 * 3 / 10])
    assert traces.rows().sensitivity()[0] == pytest.approx([1 * 2 / 8, -2 * 1 / 8])


def test_finished_batches_are_not_rerun(tmp_path: Path) -> None:
    anatomy, batches = anatomy_of(tiny_resnet()), two_batches("resnet")
    whole = hessian_traces(anatomy, batches, 3, seed=0)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(DataError, match="not a finite number"):
        hessian_traces(anatomy, [batches[0], {**batches[1], "pixel_values": torch.full((3, 3, 16, 16), torch.nan)}],
                       3, seed=0, checkpoint=checkpoint)  # fmt: skip
    broken = [{**batches[0], "pixel_values": torch.full((3, 3, 16, 16), torch.nan)}, batches[1]]
    resumed = hessian_traces(anatomy, broken, 3, seed=0, checkpoint=checkpoint)
    assert all(np.array_equal(a.estimates, b.estimates) for a, b in zip(whole, resumed, strict=True))
    other = hessian_traces(anatomy, batches, 3, seed=1)
    assert not np.array_equal(other[0].estimates, whole[0].estimates)


def test_the_network_is_as_before() -> None:
    network = tiny_resnet().to(torch.bfloat16).train()
    network.resnet.embedder.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    trainable = [parameter.requires_grad for parameter in network.parameters()]
    batches = [{**batch, "pixel_values": batch["pixel_values"]} for batch in two_batches("resnet")]
    hessian_traces(anatomy_of(network), batches, 1, seed=0)
    after = network.state_dict()
    assert all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items()
    )
    assert network.training and [parameter.requires_grad for parameter in network.parameters()] == trainable
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_part_without_units_has_no_traces() -> None:
    network = tiny_bert()
    keep_units(network, anatomy_of(network).parts[0], [])
    heads, channels = hessian_traces(anatomy_of(network), two_batches("bert"), 2, seed=0)
    assert heads.sensitivity().shape == (2, 0) and channels.sensitivity().shape == (2, 6)


def test_bad_input() -> None:
    anatomy = anatomy_of(tiny_bert())
    with pytest.raises(DataError, match="there is none"):
        hessian_traces(anatomy, [], 1, seed=0)
    with pytest.raises(DataError, match="needs labels"):
        hessian_traces(anatomy, [inputs("bert")], 1, seed=0)
    quantized = Model(BUILDS["bert"]())
    METHODS.build({"method": "rtn", "bits": 4, "group_size": 16}).apply(quantized, MethodContext())
    with pytest.raises(ModelError, match="no Hessian"):
        hessian_traces(quantized.anatomy, [labeled("bert")], 1, seed=0)
