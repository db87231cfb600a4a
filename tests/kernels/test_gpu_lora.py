"""Grouped LoRA kernels against a loop over tokens. On a CUDA device, elsewhere under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.kernels.triton_device import DEVICE, HALF, TOLERANCE, distance  # isort: skip  (before anything imports Triton)

from smelt.kernels.gpu.lora import lora_expand_add, lora_shrink, num_splits
from smelt.kernels.lora import LoraTiles, block_m, lora_add_reference
from smelt.models.lora import Factors, StackedFactors

MIXED, ONE, NONE = "mixed", "one", "none"  # which tokens have which adapter


def random_stack(inputs: int, outputs: list[int], ranks: list[int], dtype: torch.dtype) -> StackedFactors:
    """Return factors of adapters of these ranks; the second, if any, does not change the first layer."""
    layers = [nn.Linear(inputs, rows, device="meta") for rows in outputs]
    stack = StackedFactors(layers, len(ranks), max(ranks), dtype, torch.device(DEVICE))
    for slot, rank in enumerate(ranks):
        factors: list[Factors | None] = [
            Factors(torch.randn(rank, inputs) / inputs**0.5, torch.randn(rows, rank)) for rows in outputs
        ]
        stack.write(slot, [None, *factors[1:]] if slot == 1 else factors)
    return stack


def adapter_indices(which: str, tokens: int, adapters: int) -> np.ndarray:
    if which == MIXED:
        return np.random.default_rng(0).integers(0, adapters + 1, tokens)
    return np.full(tokens, adapters if which == ONE else 0)


def run(
    stack: StackedFactors, x: torch.Tensor, y: torch.Tensor, indices: np.ndarray, padded: int | None = None
) -> torch.Tensor:
    """Add deltas with the kernels, in tiles for a step of `padded` tokens."""
    size = padded or len(x)
    tiles = LoraTiles.split(torch.from_numpy(LoraTiles.pack(indices, size, len(stack.down))).to(DEVICE), size)
    result = y.clone()
    shrunk = lora_shrink(x, stack.down, tiles)
    lora_expand_add(shrunk, stack.up, stack.offsets, stack.out_features, tiles, result)
    return result


@pytest.mark.parametrize("which", [MIXED, ONE, NONE])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "ranks"),
    [
        (1, 64, [64], [16]),
        (5, 96, [40, 24, 24], [4, 16, 7]),
        (33, 300, [70, 70], [64, 8]),
        (16, 1030, [33], [1, 2, 3]),
        (40, 48, [300, 20, 20], [20]),
        (70, 520, [130], [33, 64, 16, 8, 4, 4, 4, 4, 4]),
    ],
)
def test_the_kernels_add_the_deltas(which: str, tokens: int, inputs: int, outputs: list[int], ranks: list[int]) -> None:
    torch.manual_seed(0)
    stack = random_stack(inputs, outputs, ranks, HALF)
    x = torch.randn(tokens, inputs, dtype=HALF, device=DEVICE)
    y = torch.randn(tokens, sum(outputs), dtype=HALF, device=DEVICE)
    indices = adapter_indices(which, tokens, len(ranks))
    expected = y.clone()
    lora_add_reference(expected, x, stack.down, stack.up, stack.offsets, torch.from_numpy(indices))
    actual = run(stack, x, y, indices)
    assert distance(actual, expected) < TOLERANCE[HALF]
    untouched = torch.from_numpy(indices == 0).to(DEVICE)
    assert torch.equal(actual[untouched], y[untouched])
    assert torch.equal(run(stack, x, y, indices), actual)  # bit for bit


def test_large_tiles_of_many_tokens_in_float32() -> None:
    torch.manual_seed(1)
    stack = random_stack(70, [40, 30], [8, 12], torch.float32)
    for tokens, inputs in ((300, 70), (2100, 70)):
        x, y = torch.randn(tokens, inputs, device=DEVICE), torch.randn(tokens, 70, device=DEVICE)
        indices = adapter_indices(MIXED, tokens, 2)
        assert block_m(tokens) == 64
        expected = y.clone()
        lora_add_reference(expected, x, stack.down, stack.up, stack.offsets, torch.from_numpy(indices))
        torch.testing.assert_close(run(stack, x, y, indices), expected, rtol=1e-4, atol=1e-4)


def test_padding_tokens_are_not_read_or_written() -> None:
    torch.manual_seed(2)
    stack = random_stack(64, [48], [16], HALF)
    x, y = torch.randn(8, 64, dtype=HALF, device=DEVICE), torch.randn(8, 48, dtype=HALF, device=DEVICE)
    x[5:] = float("nan")
    actual = run(stack, x, y, np.ones(5, dtype=np.int64), padded=8)
    assert torch.equal(actual[5:], y[5:]) and not actual.isnan().any()
    assert torch.equal(run(stack, x, y, np.empty(0, dtype=np.int64), padded=8), y)  # no token at all


def test_strided_inputs() -> None:
    torch.manual_seed(3)
    stack = random_stack(64, [48], [16], HALF)
    wide, y = torch.randn(6, 192, dtype=HALF, device=DEVICE), torch.zeros(6, 48, dtype=HALF, device=DEVICE)
    indices = np.ones(6, dtype=np.int64)
    assert torch.equal(run(stack, wide[:, :64], y, indices), run(stack, wide[:, :64].contiguous(), y, indices))


@pytest.mark.parametrize("tokens", [1, 7, 16, 100, 256, 257, 1000])
@pytest.mark.parametrize("adapters", [1, 3, 40])
def test_every_token_with_an_adapter_is_in_one_tile(tokens: int, adapters: int) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        indices = rng.integers(0, adapters + 1, rng.integers(0, tokens + 1))
        packed = LoraTiles.pack(indices, tokens, adapters)
        assert len(packed) == len(LoraTiles.pack(indices[:0], tokens, adapters))  # as a captured graph needs
        tiles = LoraTiles.split(torch.from_numpy(packed), tokens)
        placed = {
            int(row): int(adapter) for adapter, rows in zip(tiles.adapters, tiles.rows, strict=True) for row in rows
        }
        placed.pop(-1, None)
        assert placed == {row: int(index) for row, index in enumerate(indices) if index}
        assert int((tiles.rows >= 0).sum()) == len(placed)
        assert bool(((tiles.rows >= 0).any(1) == (tiles.adapters > 0)).all())


def test_a_slot_is_replaced_in_place() -> None:
    """A shorter rank leaves nothing of the longer one before it."""
    torch.manual_seed(4)
    stack = random_stack(32, [16, 24], [8, 8], torch.float32)
    down, other = stack.down, stack.up[1].clone()
    views = stack.write(0, [Factors(torch.ones(3, 32), torch.ones(16, 3)), None])
    assert stack.down is down and torch.equal(stack.up[1], other)
    assert stack.down[0].sum() == 3 * 32 and stack.up[0].sum() == 16 * 3
    assert views[1] is None and views[0] is not None and views[0].up.data_ptr() == stack.up[0].data_ptr()


def test_splits_are_powers_of_two() -> None:
    assert [num_splits(tokens, 4096) for tokens in (1, 256, 257, 2048, 2049)] == [8, 8, 4, 4, 1]
    assert num_splits(1, 100) == 1 and num_splits(1, 520) == 4 and num_splits(1, 14336) == 16
