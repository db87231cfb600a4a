"""Neural implants: equal to their dense form, restored from artifacts, and what they can follow or precede."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import smelt.compression.distillation
import smelt.compression.pruning
import smelt.compression.quantization  # noqa: F401
from smelt.compression.base import METHODS, MethodContext
from smelt.errors import ConversionError, ModelError
from smelt.measure.cost import Workload, block_cost, count_parameters
from smelt.models.anatomy import Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.attention_reuse import unshareable_reason
from smelt.models.implanted_layers import ImplantedConv2d
from smelt.models.implants import implant_channels, implant_low_rank, implants_of, unimplantable_reason
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from smelt.models.token_pruning import check_token_pruning
from smelt.runtime.integer.convolutions import check_convolutions
from smelt.runtime.integer.encoders import check_encoder
from tests.tiny import BUILDS, inputs, labeled

WORKLOAD = Workload(tokens=11, image_size=32)


def implanted(name: str, rank: int = 3) -> PreTrainedModel:
    """Give every part that can have one an implant with random weights."""
    network = BUILDS[name]()
    network.config.image_size = 32
    torch.manual_seed(1)
    for part in anatomy_of(network).parts:
        if part.kind == "channels":
            if part.input_projections[0].kernel_elements > 1:
                implant_channels(network, part, rank)
        else:
            implant = implant_low_rank(network, part, rank)
            for factor in implant.factors:
                nn.init.normal_(factor.weight, std=0.2)
    return network


def first(network: PreTrainedModel, kind: str) -> Part:
    return next(part for part in anatomy_of(network).parts if part.kind == kind)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), ((1, 3), 2)])
@torch.no_grad()
def test_a_split_convolution_equals_the_dense_one_with_masked_taps(kernel: Any, stride: int) -> None:
    torch.manual_seed(0)
    padding = tuple(size // 2 for size in kernel) if isinstance(kernel, tuple) else kernel // 2
    dense = nn.Conv2d(4, 7, kernel, stride, padding, bias=False)
    split = ImplantedConv2d.split(dense, 3)
    height, width = dense.kernel_size
    mask = torch.ones_like(dense.weight)
    mask[4:] = 0
    mask[4:, :, height // 2, width // 2] = 1
    images = torch.randn(2, 4, 9, 8)
    expected = F.conv2d(images, dense.weight * mask, stride=stride, padding=padding)
    assert torch.allclose(split(images), expected, atol=1e-6)
    assert torch.equal(split.weight, dense.weight * mask) and split.out_channels == 7
    assert count_parameters(split) == 4 * 4 * height * width + 3 * 4


@torch.no_grad()
def test_a_low_rank_implant_reads_the_input_of_its_part() -> None:
    network = implanted("bert")
    part, batch = first(network, "ffn_channels"), inputs("bert")
    layer = network.bert.encoder.layer[0]
    seen: dict[str, Any] = {}
    layer.intermediate.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    layer.output.dense.register_forward_hook(lambda module, args, output: seen.update(inside=args[0], y=output))
    network(**batch)
    expected = part.output.module(seen["inside"]) + seen["x"] @ part.implant.down.weight.T @ part.implant.up.weight.T
    assert torch.allclose(seen["y"], expected, atol=1e-6)
    with pytest.raises(ModelError, match="before the layer whose input it reads"):
        layer.output.dense(seen["inside"])


@pytest.mark.parametrize("name", ["bert", "distilbert", "vit", "resnet", "resnet-bottleneck"])
def test_saved_verified_copied_and_counted(name: str, tmp_path: Path) -> None:
    network = implanted(name, rank=1 if name == "vit" else 3)
    model = Model(network, source="tiny")
    save_artifact(model, tmp_path)
    loaded = load_artifact(tmp_path)
    with torch.no_grad():
        expected = network(**inputs(name)).logits
        # To the last bit but one: on some CPUs sums depend on the alignment of weights in memory.
        torch.testing.assert_close(loaded.network(**inputs(name)).logits, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(copy.deepcopy(network)(**inputs(name)).logits, expected, rtol=1e-5, atol=1e-6)
    weights = loaded.network.state_dict()
    assert all(torch.equal(weights[key], tensor) for key, tensor in network.state_dict().items())
    assert implants_of(loaded.anatomy) == implants_of(model.anatomy) != []
    plain = anatomy_of(BUILDS[name]())
    plain.network.config.image_size = 32
    added = count_parameters(network) - count_parameters(plain.network)
    change = block_cost(model.anatomy, "parameters", WORKLOAD) - block_cost(plain, "parameters", WORKLOAD)
    assert change == added != 0
    macs = block_cost(model.anatomy, "macs", WORKLOAD) - block_cost(plain, "macs", WORKLOAD)
    if not name.startswith("resnet"):
        assert macs == 11 * added
    else:
        assert macs < 0


@pytest.mark.parametrize("name", ["bert", "vit"])
@torch.no_grad()
def test_layers_around_an_implant_are_pruned_and_quantized(name: str, tmp_path: Path) -> None:
    network = implanted(name)
    down = first(network, "heads").implant.down.weight.clone()
    METHODS.build({"method": "magnitude", "budget": {"parameters": 0.7}}).apply(Model(network), MethodContext())
    METHODS.build({"method": "rtn", "bits": 8, "group_size": -1}).apply(Model(network), MethodContext())
    part = first(network, "heads")
    assert part.units < 4 and torch.equal(part.implant.down.weight, down)
    logits = network(**inputs(name)).logits
    save_artifact(Model(network), tmp_path)
    assert torch.equal(load_artifact(tmp_path).network(**inputs(name)).logits, logits)
    for each in anatomy_of(network).parts:
        each.implant.up.weight.zero_()
    assert not torch.allclose(network(**inputs(name)).logits, logits, atol=1e-3)


@pytest.mark.parametrize("method", ["smoothquant", "awq"])
def test_scales_are_moved_through_an_implant_too(method: str) -> None:
    """In a pre-norm block the implant reads the norm whose scale is folded into what follows it."""
    network = implanted("vit")
    before = network(**inputs("vit")).logits
    step = {"method": method, "bits": 8, "group_size": -1}
    METHODS.build(step).apply(Model(network), MethodContext(batches=[labeled("vit")]))
    error = (network(**inputs("vit")).logits - before).norm() / before.norm()
    assert float(error) < 0.05


@pytest.mark.parametrize(
    "entries",
    [
        "many", [{"part": "nothing", "rank": 3}], [{"part": "FIRST", "rank": 0}], [{"part": "FIRST", "rank": 33}],
        [{"part": "FIRST", "rank": True}], [{"part": "FIRST", "channels": 3}], [{"part": "FIRST"}],
        [{"part": "FIRST", "rank": 3}, {"part": "FIRST", "rank": 3}],
        [{"part": "FIRST", "rank": 3}, {"part": "nothing", "rank": 3}],
    ],
)  # fmt: skip
def test_damaged_artifacts(entries: Any, tmp_path: Path) -> None:
    network = implanted("bert")
    save_artifact(Model(network), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    name = content["implants"][0]["part"]
    content["implants"] = json.loads(json.dumps(entries).replace("FIRST", name))
    (tmp_path / "smelt.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"smelt\.json (do not fit|gives a part two)|implants in smelt\.json"):
        load_artifact(tmp_path)


def test_damaged_channels_and_an_implant_that_cannot_be(tmp_path: Path) -> None:
    network = implanted("resnet-bottleneck")
    save_artifact(Model(network), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    pointwise = next(part.name for part in anatomy_of(network).parts if part.implant is None)
    for part, channels, words in (
        (content["implants"][0]["part"], 8, "do not fit"), (content["implants"][0]["part"], 0, "do not fit"),
        (pointwise, 1, "cannot have an implant: it is pointwise itself"),
    ):  # fmt: skip
        damaged = {**content, "implants": [{"part": part, "channels": channels}]}
        (tmp_path / "smelt.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelError, match=words):
            load_artifact(tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kernel_size": 5, "padding": 2}, None), ({"kernel_size": (3, 5), "padding": (1, 2)}, None),
        ({"kernel_size": 1}, "pointwise itself"), ({"kernel_size": 2, "padding": 1}, "no center"),
        ({"kernel_size": 5, "padding": 1}, "no center"), ({"kernel_size": 3, "padding": 1, "dilation": 2}, "no center"),
        ({"kernel_size": 3, "padding": 1, "groups": 2}, "no plain convolution"),
        ({"kernel_size": 3, "padding": 1, "bias": True}, "no plain convolution"),
    ],
)  # fmt: skip
def test_which_convolutions_can_have_one(settings: dict[str, Any], reason: str | None) -> None:
    network = BUILDS["resnet"]()
    layer: Any = network.resnet.encoder.stages[0].layers[1].layer[0]
    layer.convolution = nn.Conv2d(16, 16, **{"bias": False, **settings})
    found = unimplantable_reason(anatomy_of(network), anatomy_of(network).parts[1])
    assert found is None if reason is None else reason in str(found)


def test_which_parts_can_have_one() -> None:
    bert = implanted("bert")
    assert unimplantable_reason(anatomy_of(bert), first(bert, "heads")) == "it has one"
    llama, plain = BUILDS["llama"](), BUILDS["bert"]()
    assert "decoders" in str(unimplantable_reason(anatomy_of(llama), first(llama, "heads")))
    keep_units(plain, first(plain, "heads"), [])
    assert unimplantable_reason(anatomy_of(plain), first(plain, "heads")) == "it has no units left"


def test_what_implants_cannot_follow() -> None:
    bert, resnet = implanted("bert"), implanted("resnet")
    with pytest.raises(ModelError, match="keep at least one of its heads"):
        keep_units(bert, first(bert, "heads"), [])
    with pytest.raises(ModelError, match="have a neural implant, so none of them can be removed"):
        keep_units(resnet, first(resnet, "channels"), [0])
    with pytest.raises(ModelError, match="neural implant, and it reads all tokens"):
        check_token_pruning(anatomy_of(bert))
    with pytest.raises(ModelError, match="neural implant, and integer graphs"):
        check_encoder(bert)
    with pytest.raises((ModelError, ConversionError), match="neural implant, and integer graphs"):
        check_convolutions(resnet)
    with pytest.raises(ModelError, match="its convolution cannot be quantized"):
        METHODS.build({"method": "rtn", "bits": 8, "group_size": -1}).apply(Model(resnet), MethodContext())
    with pytest.raises(ModelError, match="its convolution cannot be quantized"):
        METHODS.build({"method": "qat"}).check(anatomy_of(resnet))
    parts = [part for part in anatomy_of(bert).parts if part.kind == "heads"]
    assert unshareable_reason(parts[0], parts[1]) == "it has a neural implant"
