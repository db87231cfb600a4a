"""Add, compare and compact in Triton, bit-identical to PyTorch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE, HALF  # isort: skip  (chooses the interpreter)
from smelt.kernels import threshold_select as dispatch
from smelt.kernels.dispatch import use_backend
from smelt.kernels.gpu import threshold_select as kernel

TILES = 256, 4  # small, so that short vectors have many
WORDS = 256  # converted to indices by one program: 32 tiles
GROUP = WORDS * kernel.BITS


def plain(values: Tensor, threshold: float, start: int, stop: int) -> Tensor:
    return torch.nonzero(values[start:stop].abs() >= threshold).flatten() + start


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("elements", "start", "stop"),
    [
        (1, 0, 1),
        (255, 0, 255),
        (1000, 0, 1000),
        (1000, 300, 700),  # starts and ends inside tiles
        (1000, 512, 768),  # a full tile
        (1000, 0, 0),
        (1000, 1000, 1000),
        (2 * GROUP + 77, GROUP - 300, 2 * GROUP + 77),  # several groups
    ],
)
def test_bit_for_bit(elements: int, start: int, stop: int, dtype: torch.dtype) -> None:
    residual, gradient = torch.randn(elements, device=DEVICE), torch.randn(elements, device=DEVICE).to(dtype)
    expected = residual + gradient
    indices = kernel.add_and_select(residual, gradient, 1.5, start, stop, tiles=TILES, words=WORDS)
    assert torch.equal(residual, expected)
    assert torch.equal(indices, plain(expected, 1.5, start, stop))


@pytest.mark.parametrize("slots", [0, 1, 40, 5000])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 2.5, float("inf")])
def test_fixed_capacity_keeps_the_first_matches_and_marks_empty_slots(threshold: float, slots: int) -> None:
    residual, gradient = torch.randn(3001, device=DEVICE), torch.zeros(3001, device=DEVICE)
    residual[7], residual[2900] = torch.inf, 0.1  # exactly at the threshold
    indices = kernel.add_and_select(residual, gradient, threshold, 5, 2999, slots, tiles=TILES, words=WORDS)
    matches = plain(residual, threshold, 5, 2999).tolist()
    assert indices.tolist() == [*matches, *[3001] * slots][:slots]


def test_without_a_gradient_values_are_only_read() -> None:
    values = torch.randn(2000, device=DEVICE)
    values[300:500] = torch.nan
    before = values.clone()
    indices = kernel.add_and_select(values, None, 1.0, 700, 1900, tiles=TILES, words=WORDS)
    assert torch.equal(values.nan_to_num(), before.nan_to_num())
    assert torch.equal(indices, plain(before, 1.0, 700, 1900))


def test_a_tile_with_many_matches_among_tiles_without() -> None:
    values = torch.zeros(40 * 256, device=DEVICE)
    values[5 * 256 : 6 * 256] = 1.0
    values[-1] = 1.0
    indices = kernel.add_and_select(values, None, 1.0, 0, len(values), tiles=TILES, words=WORDS)
    assert indices.tolist() == [*range(5 * 256, 6 * 256), 40 * 256 - 1]


def test_a_view_at_any_offset() -> None:
    room, gradient = torch.randn(1003, device=DEVICE), torch.randn(1003, device=DEVICE)
    expected = room.clone()
    expected[3:1000] += gradient[1:998]
    indices = kernel.add_and_select(room[3:1000], gradient[1:998], 1.0, 0, 997, tiles=TILES, words=WORDS)
    assert torch.equal(room, expected)
    assert torch.equal(indices, plain(expected[3:1000], 1.0, 0, 997))


def test_default_tile_sizes() -> None:
    residual, gradient = torch.randn(9000, device=DEVICE), torch.randn(9000, device=DEVICE)
    expected = residual + gradient
    indices = kernel.add_and_select(residual, gradient, 3.0, 0, 9000, 200)
    matches = plain(expected, 3.0, 0, 9000).tolist()
    assert torch.equal(residual, expected)
    assert indices.tolist() == [*matches, *[9000] * 200][:200]


@pytest.mark.gpu
def test_a_gpu_uses_the_kernel_without_synchronizing() -> None:
    residual, gradient = torch.randn(100_000, device="cuda"), torch.randn(100_000, device="cuda")
    assert dispatch.select_backend(residual) == dispatch.GPU
    with use_backend("reference"):
        assert dispatch.select_backend(residual) == "reference"
        expected = dispatch.add_and_select(residual.clone(), gradient, 3.0, 10, 90_000, 5000)
    dispatch.add_and_select(residual.clone(), gradient, 3.0, 10, 90_000, 5000)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        indices = dispatch.add_and_select(residual, gradient, 3.0, 10, 90_000, 5000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(indices, expected)


@pytest.mark.gpu
def test_more_elements_than_32_bit_byte_offsets_reach() -> None:
    elements = 2**30 + 12345
    values = torch.zeros(elements, device="cuda")
    indices = torch.tensor([0, 2**29 + 1, 2**30 - 1, 2**30, elements - 1], device="cuda")
    values[indices] = 1.0
    result = dispatch.add_and_select(values, torch.zeros_like(values), 0.5, 1, elements, 7)
    assert result.tolist() == [*indices[1:].tolist(), *[elements] * 3]
