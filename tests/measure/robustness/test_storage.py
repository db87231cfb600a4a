"""Stored bits of networks: everything that is saved, once, and where each bit of an element is."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from smelt.measure.robustness.bit_flips import flip, flipped_bits, sample_flips
from smelt.measure.robustness.storage import StoredTensor, select, stored_tensors
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.catalog import get_format
from tests.tiny import BUILDS

FORMATS = ("int8", "int4", "int4-asym/8", "int3", "fp8-e4m3", "mxfp4", "nvfp4", "nf4/16@float16", "int8/tensor")


def quantized_linear(number_format: str, rows: int = 6, columns: int = 20) -> QuantizedLinear:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    chosen = get_format(number_format)
    return QuantizedLinear.from_quantized(
        chosen.quantize(weight), QuantizationScheme(chosen), bias=torch.zeros(rows), dtype=torch.float32
    )


def contents(network: nn.Module) -> dict[str, bytes]:
    return {name: _bytes(tensor) for name, tensor in network.state_dict().items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bits_that_differ(before: dict[str, bytes], after: dict[str, bytes]) -> int:
    pairs = zip(b"".join(before.values()), b"".join(after.values()), strict=True)
    return sum((first ^ second).bit_count() for first, second in pairs)


@pytest.mark.parametrize("family", ["bert", "llama-tied", "resnet"])
def test_everything_saved_is_listed_once(family: str) -> None:
    network = BUILDS[family]()
    tied = {id(tensor): tensor for tensor in network.state_dict(keep_vars=True).values()}
    saved = sum(8 * tensor.numel() * tensor.element_size() for tensor in tied.values() if tensor.is_floating_point())
    assert sum(entry.num_bits for entry in stored_tensors(network)) == saved


@pytest.mark.parametrize("number_format", FORMATS)
def test_a_quantized_layer_has_codes_qparams_and_a_bias(number_format: str) -> None:
    layer = quantized_linear(number_format)
    tensors = stored_tensors(layer)
    assert sum(entry.num_bits for entry in tensors) == 8 * sum(map(len, contents(layer).values()))
    assert [entry.attribute for entry in select(tensors, parts=["codes"])] == ["codes"]
    assert [entry.attribute for entry in select(tensors, parts=["floats"])] == ["bias"]
    assert "scale" in {entry.attribute for entry in select(tensors, parts=["qparams"])}


def test_layers_are_selected_by_path() -> None:
    network = nn.Sequential(nn.Linear(2, 3), quantized_linear("int4"))
    tensors = stored_tensors(network)
    assert {entry.layer for entry in select(tensors, layers=["1"])} == {"1"}
    assert select(tensors, layers=[]) == [] and select(tensors) == tensors


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("ber", [0.0, 0.01, 0.4, 0.7, 1.0])
def test_exactly_the_sampled_bits_flip_and_come_back(number_format: str, ber: float) -> None:
    layer = quantized_linear(number_format)
    before, objects = contents(layer), {name: id(tensor) for name, tensor in layer.state_dict(keep_vars=True).items()}
    tensors = stored_tensors(layer)
    positions = sample_flips(tensors, ber, np.random.default_rng(3))
    total = sum(entry.num_bits for entry in tensors)
    assert len(set(positions.tolist())) == len(positions) and all(0 <= each < total for each in positions)
    assert (len(positions) == 0) == (ber == 0) and (len(positions) == total) == (ber == 1)
    with flipped_bits(tensors, positions):
        assert bits_that_differ(before, contents(layer)) == len(positions)
    assert contents(layer) == before
    assert {name: id(tensor) for name, tensor in layer.state_dict(keep_vars=True).items()} == objects


def test_bits_come_back_after_an_error() -> None:
    network = BUILDS["bert"]()
    before, tensors = contents(network), stored_tensors(network)
    with pytest.raises(RuntimeError), flipped_bits(tensors, sample_flips(tensors, 1e-2, np.random.default_rng(0))):
        raise RuntimeError
    assert contents(network) == before


def test_the_number_of_flips_is_binomial() -> None:
    tensors = stored_tensors(BUILDS["bert"]())
    bits, ber = sum(entry.num_bits for entry in tensors), 1e-3
    counts = [len(sample_flips(tensors, ber, np.random.default_rng(seed))) for seed in range(200)]
    standard_error = (bits * ber * (1 - ber) / len(counts)) ** 0.5
    assert abs(np.mean(counts) - bits * ber) < 4 * standard_error
    assert 0.75 < np.var(counts) / (bits * ber) < 1.25


def test_every_bit_is_equally_likely() -> None:
    layer = quantized_linear("int4", rows=4, columns=8)
    tensors = select(stored_tensors(layer), parts=["codes", "qparams"])
    bits = sum(entry.num_bits for entry in tensors)
    hits = np.zeros(bits)
    for seed in range(400):
        hits[sample_flips(tensors, 0.1, np.random.default_rng(seed))] += 1
    assert abs(hits - 40).max() < 5 * 6  # a binomial of 400 trials has a standard deviation of 6


def test_outputs_use_the_flipped_bits_and_then_the_original_ones() -> None:
    """A kernel prepares data from the codes once: it must notice the flips and their end."""
    layer = quantized_linear("int4", rows=16, columns=32).eval()
    x = torch.randn(3, 32)
    clean = layer(x)
    tensors = select(stored_tensors(layer), parts=["codes"])
    positions = tensors[0].bit_positions(np.array([5]), 3)
    with flipped_bits(tensors, positions):
        changed = layer(x)
        expected = x @ layer.weight.T
    assert torch.allclose(changed, expected, atol=1e-4) and not torch.allclose(changed, clean, atol=1e-4)
    assert torch.equal(layer(x), clean)


def test_tied_weights_flip_together() -> None:
    network = BUILDS["llama-tied"]()
    head, table = network.get_output_embeddings(), network.get_input_embeddings()
    with flipped_bits(stored_tensors(network), np.array([30])):
        assert head.weight.data_ptr() == table.weight.data_ptr()


@pytest.mark.parametrize("columns", [20, 7])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_a_bit_of_a_code_changes_it_by_its_power_of_two(bits: int, columns: int) -> None:
    layer = quantized_linear(f"int{bits}", columns=columns)
    (codes,) = select(stored_tensors(layer), parts=["codes"])
    before = layer.packed.unpack().codes.long()
    for bit in range(bits):
        element = 2 * columns + 5
        with flipped_bits([codes], codes.bit_positions(np.array([element]), bit)):
            change = layer.packed.unpack().codes.long() - before
        assert change.abs().flatten()[element] == 2**bit and change.abs().sum() == 2**bit


@pytest.mark.parametrize(("bits", "mean_steps"), [(8, 31.875), (4, 3.75)])
def test_mean_change_of_an_integer_weight(bits: int, mean_steps: float) -> None:
    """(2^b - 1) / b steps, over all bits; the most significant bit moves a weight by half of the range."""
    layer = quantized_linear(f"int{bits}")
    (codes,) = select(stored_tensors(layer), parts=["codes"])
    before, changes = layer.weight, []
    scale = layer.packed.unpack().qparams.scale[0].item()
    for bit in range(bits):
        with flipped_bits([codes], codes.bit_positions(np.array([3]), bit)):
            changes.append((layer.weight - before)[0, 3].abs().item() / scale)
    assert np.mean(changes) == pytest.approx(mean_steps, rel=1e-5)
    assert changes[-1] == pytest.approx(2 ** (bits - 1), rel=1e-5)


def test_the_top_exponent_bit_of_floats() -> None:
    half = torch.tensor([0.5])
    assert flip(half.bfloat16(), np.array([14])).item() == pytest.approx(1.70e38, rel=0.01)
    assert flip(half.half(), np.array([14])).item() == 0.5 * 2**16
    assert flip(half, np.array([30])).item() == pytest.approx(1.70e38, rel=0.01)
    assert flip(half, np.array([31])).item() == -0.5


def test_one_bit_in_sixteen_of_bfloat16_is_fatal() -> None:
    weights = (torch.rand(64) * 1.9 + 0.05).bfloat16()
    flipped = torch.stack([flip(weights, 16 * np.arange(64) + bit) for bit in range(16)]).float()
    fatal = ~(flipped.abs() <= 1e30)
    assert fatal.float().mean().item() == pytest.approx(1 / 16) and fatal[14].all()


def test_only_one_bit_of_every_element_can_be_chosen() -> None:
    layer = quantized_linear("int3", columns=7)
    original = copy.deepcopy(layer)
    tensors = stored_tensors(layer)
    codes = select(tensors, parts=["codes"])
    positions = sample_flips(codes, 1.0, np.random.default_rng(0), bit=2)
    with flipped_bits(codes, positions):
        assert torch.equal(layer.packed.unpack().codes, original.packed.unpack().codes ^ 4)
    with pytest.raises(ValueError, match="no bit 3"):
        codes[0].bit_positions(np.array([0]), 3)


def test_a_float_bit_over_several_tensors() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    before = copy.deepcopy(network)
    tensors = stored_tensors(network)
    with flipped_bits(tensors, sample_flips(tensors, 1.0, np.random.default_rng(0), bit=31)):
        for parameter, original in zip(network.parameters(), before.parameters(), strict=True):
            assert torch.equal(parameter, -original)


def test_positions_are_numbered_through_all_tensors() -> None:
    first, second = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)
    tensors: list[StoredTensor] = stored_tensors(nn.Sequential(first, second))
    before = second.weight.detach().clone()
    with flipped_bits(tensors, np.array([32 * 6 + 31])):
        assert second.weight[0, 0] == -before[0, 0]
        assert torch.equal(second.weight.flatten()[1:], before.flatten()[1:])
