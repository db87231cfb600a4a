"""Surgery is exact: removing units equals masking them, for every family, even all units, and in generation."""

from __future__ import annotations

import pytest
import torch

from smelt.compression.calibration.masks import masked, unit_masks
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.surgery import keep_units, restore_shape, scale_units, widen_channels
from tests.tiny import BUILDS, DECODERS, TRANSFORMERS, inputs


def random_masks(network: torch.nn.Module, seed: int = 3, empty: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """Return real-valued masks with zeros; parts in `empty`, as (kind, block), are masked entirely."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for part in anatomy_of(network).parts:
        mask = (torch.rand(part.units, generator=generator) > 0.4) * (0.5 + torch.rand(part.units, generator=generator))
        mask[torch.randint(part.units, (1,), generator=generator)] = 1.0
        if f"{part.kind}{part.block}" in empty:
            mask = torch.zeros(part.units)
        masks.append(mask)
    return masks


def cut(network: torch.nn.Module, masks: list[torch.Tensor]) -> None:
    for part, mask in zip(anatomy_of(network).parts, masks, strict=True):
        scale_units(part, mask)
    for position, mask in enumerate(masks):
        keep_units(network, anatomy_of(network).parts[position], mask.nonzero().flatten().tolist())


@pytest.mark.parametrize("name", BUILDS)
@torch.no_grad()
def test_masks_of_ones_change_no_bit(name: str) -> None:
    network = BUILDS[name]()
    before = network(**inputs(name)).logits
    anatomy = anatomy_of(network)
    with masked(anatomy, unit_masks(anatomy)):
        assert torch.equal(network(**inputs(name)).logits, before)


@pytest.mark.parametrize("name", BUILDS)
@torch.no_grad()
def test_sliced_equals_masked(name: str) -> None:
    network = BUILDS[name]()
    masks = random_masks(network)
    with masked(anatomy_of(network), masks):
        expected = network(**inputs(name)).logits
    before = sum(p.numel() for p in network.parameters())
    cut(network, masks)
    assert sum(p.numel() for p in network.parameters()) < before
    assert (network(**inputs(name)).logits - expected).abs().max() < 1e-5
    assert [part.units for part in anatomy_of(network).parts] == [int((m != 0).sum()) for m in masks]


@pytest.mark.parametrize("name", ["resnet", "resnet-bottleneck"])
@torch.no_grad()
def test_channels_that_are_added_start_as_new_filters(name: str) -> None:
    """What they compute is added; without the columns that read them, the network computes what it did before."""
    torch.manual_seed(0)
    network = BUILDS[name]()
    keep_units(network, anatomy_of(network).parts[0], range(1, anatomy_of(network).parts[0].units))
    expected, before = network(**inputs(name)).logits, [part.units for part in anatomy_of(network).parts]
    for index, units in enumerate(before):
        widen_channels(anatomy_of(network).parts[index], units + 50)
    parts = anatomy_of(network).parts
    assert [part.units for part in parts] == [units + 50 for units in before]
    assert parts[0].original_units == before[0] + 1 and parts[0].kept == tuple(range(1, before[0] + 51))
    assert (network(**inputs(name)).logits - expected).abs().max() > 1e-4
    for part, units in zip(parts, before, strict=True):
        filters = part.input_projections[0].weight[units:, :8]
        assert float(filters.std()) == pytest.approx((2 / (units * filters[0, 0].numel())) ** 0.5, rel=0.2)
        assert part.norm.running_var[units:].eq(1).all() and part.norm.weight[units:].eq(1).all()
        part.output.weight[:, units:] = 0
    assert (network(**inputs(name)).logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("empty", [("heads0",), ("ffn_channels1",), ("heads0", "heads1", "heads2", "ffn_channels0")])
@torch.no_grad()
def test_a_layer_may_lose_everything(name: str, empty: tuple[str, ...]) -> None:
    network = BUILDS[name]()
    masks = random_masks(network, empty=empty)
    with masked(anatomy_of(network), masks):
        expected = network(**inputs(name)).logits
    cut(network, masks)
    assert (network(**inputs(name)).logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("empty", [(), ("heads0",), ("heads1", "ffn_channels1")])
@torch.no_grad()
def test_generation_with_a_cache_equals_generation_without(name: str, empty: tuple[str, ...]) -> None:
    network = BUILDS[name]()
    cut(network, random_masks(network, empty=empty))
    prompt = inputs(name, batch=2, length=5)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = network.generate(**prompt, use_cache=True, **settings)
    assert torch.equal(cached, network.generate(**prompt, use_cache=False, **settings))
    beams = network.generate(**prompt, num_beams=2, **settings)
    assert beams.shape == cached.shape


@pytest.mark.parametrize("name", BUILDS)
@torch.no_grad()
def test_a_second_surgery_keeps_original_indices(name: str) -> None:
    network = BUILDS[name]()
    part = anatomy_of(network).parts[0]
    keep_units(network, part, range(1, part.units))
    part = anatomy_of(network).parts[0]
    keep_units(network, part, range(1, part.units) if part.units > 1 else [0])
    after = anatomy_of(network).parts[0]
    assert after.kept == tuple(range(after.original_units - after.units, after.original_units))
    network(**inputs(name))


@pytest.mark.parametrize("name", BUILDS)
@torch.no_grad()
def test_a_shape_can_be_restored_around_the_same_weights(name: str) -> None:
    network = BUILDS[name]()
    empty = ("heads1",) if name in TRANSFORMERS else ()
    cut(network, random_masks(network, empty=empty))
    fresh = BUILDS[name]()
    restore_shape(anatomy_of(fresh), anatomy_of(network).shape())
    fresh.load_state_dict(network.state_dict())
    assert torch.equal(fresh(**inputs(name)).logits, network(**inputs(name)).logits)
    assert anatomy_of(fresh).shape() == anatomy_of(network).shape()
