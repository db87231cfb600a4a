"""The compiled inner loop of GPTQ is bit-identical to the Python loop over columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from smelt.compression.quantization import gptq_rounding as feedback
from smelt.compression.quantization.gptq_rounding import _round_columns, gptq
from smelt.kernels.cpu.gptq_rounding import gptq_block, library
from smelt.kernels.dispatch import CPU, use_backend
from smelt.kernels.gptq_rounding import gptq_block_backend, gptq_block_kernel
from smelt.numerics import QuantParams
from smelt.numerics.integer import Integer
from tests.kernels.instruction_sets import NEEDS_COMPILER as compiled

LIBRARY = library()
KINDS = ["symmetric", "zeros", "fractions"]
HERE = torch.device("cpu")
Block = tuple[Tensor, Tensor, Tensor, Tensor | None]  # weight, factor, scale, zero


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def format_of(kind: str, bits: int = 4, group: int = -1) -> Integer:
    zero_type: Any = "float16" if kind == "fractions" else "code"
    return Integer(group, "float32", bits, symmetric=kind == "symmetric", zero_dtype=zero_type)


def block_of(kind: str, rows: int, columns: int, bits: int = 4) -> Block:
    """Return a random block with one scale and one zero point per value."""
    factor = torch.triu(torch.randn(columns, columns) * 0.1)
    factor.diagonal().copy_(torch.rand(columns) + 0.5)
    scale = (torch.rand(rows, columns) + 0.5) * 4 / 2**bits
    zero = torch.rand(rows, columns) * (2**bits - 1)
    zeros = {"symmetric": None, "zeros": zero.round(), "fractions": zero.half().float()}
    return torch.randn(rows, columns), factor, scale, zeros[kind]


def fast(kind: str, block: Block, bits: int = 4) -> tuple[Tensor, Tensor]:
    middle, fraction = float(1 << (bits - 1)), kind == "fractions"
    return gptq_block(*block, (1 << bits) - 1, default_zero=middle, fractional_zero=fraction)


def plain(kind: str, block: Block, bits: int = 4) -> tuple[Tensor, Tensor]:
    weight, factor, scale, zero = block
    grids = (
        QuantParams(scale[:, i, None, None], None if zero is None else zero[:, i, None, None])
        for i in range(weight.shape[1])
    )
    return _round_columns(weight.clone(), factor, grids, format_of(kind, bits))


def check(kind: str, block: Block, bits: int = 4) -> tuple[Tensor, Tensor]:
    before = block[0].clone()
    codes, errors = fast(kind, block, bits)
    assert same_bits(block[0], before)
    wanted_codes, wanted_errors = plain(kind, block, bits)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(errors.isnan(), wanted_errors.isnan())
    assert same_bits(errors.masked_fill(errors.isnan(), 0.0), wanted_errors.masked_fill(errors.isnan(), 0.0))
    return codes, errors


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@compiled
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit(kind: str, bits: int) -> None:
    codes, _ = check(kind, block_of(kind, rows=37, columns=128, bits=bits), bits)
    assert codes.max() == (1 << bits) - 1
    assert len(codes.unique()) == 1 << bits or bits == 8


@compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 64), (17, 1), (15, 20), (16, 3), (33, 300), (128, 128)])
def test_any_shape(two_threads: None, kind: str, rows: int, columns: int) -> None:
    check(kind, block_of(kind, rows, columns))


@compiled
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Five threads are more than there are row tiles."""
    monkeypatch.setattr("smelt.kernels.cpu.gptq_rounding.threads_for", lambda work: threads)
    check("zeros", block_of("zeros", 50, 96))
    check("zeros", block_of("zeros", 3, 96))


@compiled
@pytest.mark.parametrize("shape", [(0, 16), (4, 0)])
def test_empty_blocks(shape: tuple[int, int]) -> None:
    codes, errors = fast("symmetric", block_of("symmetric", *shape))
    assert codes.shape == errors.shape == shape
    assert (codes.dtype, errors.dtype) == (torch.uint8, torch.float32)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_nonfinite_values(kind: str) -> None:
    """NaN gets code 0 and infinities saturate; they affect only their own row."""
    weight, factor, scale, zero = block_of(kind, 20, 48)
    odd = [torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 1e-45, -0.0, 3e9]
    for row, value in enumerate(odd):
        weight[row, 5] = value
    weight[8], scale[9], scale[10, 7], scale[11] = 0.0, 2.0**-126, torch.nan, 3.4e38
    factor[5, 9] = 0.0  # infinity times zero
    codes, errors = check(kind, (weight, factor, scale, zero))
    assert codes[:3, 5].tolist() == [0, 15, 0]
    assert errors[0, 6:].isnan().all()
    assert errors[12:].isfinite().all()


@compiled
def test_ties_round_to_the_even_code() -> None:
    steps = torch.arange(-7.5, 8.0)
    weight, factor, scale = steps[:, None].clone(), torch.ones(1, 1), torch.ones(16, 1)
    codes, _ = check("symmetric", (weight, factor, scale, None))
    assert torch.equal(codes[:, 0].float(), (steps.round() + 8).clamp(0, 15))
    assert (codes[1:-1] % 2 == 0).all()


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_views(kind: str) -> None:
    """Blocks of larger tensors, transposed blocks, and scales broadcast over columns or rows."""
    block = block_of(kind, 40, 64)
    check(kind, seen(block, lambda tensor: tensor.T.contiguous().T))
    check(kind, seen(block, lambda tensor: tensor[16:40, 16:40]))
    check(kind, seen(block, lambda tensor: tensor[:40:2, :40:2]))
    check(kind, seen(block, lambda tensor: tensor.T.contiguous().T[:40:2, :20]))
    weight, factor, *qparams = block
    check(kind, (weight, factor, *seen(qparams, lambda tensor: tensor[:1, :1].expand(40, 64))))


def seen(tensors: Any, view: Callable[[Tensor], Tensor]) -> Any:
    return tuple(None if tensor is None else view(tensor) for tensor in tensors)


def problem(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(512, 16) @ torch.randn(16, columns) + 0.3 * torch.randn(512, columns)
    return torch.randn(rows, columns), x.T @ x / 256


@compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("group", [-1, 0, 16, 48, 200, 256])
def test_gptq_with_and_without_the_kernel(kind: str, act_order: bool, group: int) -> None:
    """Groups shorter than a column block, partial groups, longer groups, per-row and per-tensor scales."""
    weight, hessian = problem(21, 288)
    run: Callable[[], Any] = partial(gptq, weight, hessian, format_of(kind, 3, group), act_order=act_order)
    actual = run()
    with use_backend("reference"):
        expected = run()
    assert torch.equal(actual.codes, expected.codes)
    assert actual.qparams.tensors().keys() == expected.qparams.tensors().keys()
    assert all(
        torch.equal(tensor, expected.qparams.tensors()[name]) for name, tensor in actual.qparams.tensors().items()
    )


@compiled
@pytest.mark.parametrize("act_order", [True, False])
def test_the_compiled_loop_is_used(monkeypatch: pytest.MonkeyPatch, act_order: bool) -> None:
    def never(*rest: Any) -> Any:
        raise AssertionError("the plain loop was taken")

    monkeypatch.setattr(feedback, "_round_columns", never)
    assert gptq_block_backend(HERE) == CPU
    gptq(*problem(8, 64), format_of("zeros", group=16), act_order=act_order)
    with use_backend("reference"), pytest.raises(AssertionError, match="the plain loop was taken"):
        gptq(*problem(8, 64), format_of("zeros", group=16), act_order=act_order)


def test_the_reference_can_be_requested() -> None:
    with use_backend("reference"):
        assert gptq_block_backend(HERE) == "reference"
        assert gptq_block_kernel(HERE) is None


def test_kernels_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_COMPILE", "0")
    monkeypatch.setattr("smelt.kernels.cpu.gptq_rounding.library", library.__wrapped__)
    assert gptq_block_backend(HERE) == "reference"
    assert gptq_block_kernel(HERE) is None
