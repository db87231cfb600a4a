"""Threshold selection: the compiled kernel matches PyTorch bit for bit, and the reducer uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from smelt.kernels import threshold_select as kernels
from smelt.kernels.cpu import threshold_select as compiled
from smelt.kernels.dispatch import use_backend
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import SAGE, ExDyna, HardThreshold, MiCRO, SIDCo
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings
from tests.train.synthetic import make_gradient, make_layout

there = pytest.mark.skipif(compiled.library() is None, reason="needs a C++ compiler")
METHODS = [MiCRO, ExDyna, HardThreshold, SAGE, SIDCo]


def plain(values: Tensor, threshold: float, start: int, stop: int) -> Tensor:
    return torch.nonzero(values[start:stop].abs() >= threshold).flatten() + start


@there
@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.sampled_from([0.0, 0.1, 1.5, float("inf")]),
    st.none() | st.integers(0, 60),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_compiled_matches_eager_bit_for_bit(
    one: int, other: int, threshold: float, slots: int | None, add: bool, dtype: torch.dtype
) -> None:
    start, stop = sorted((one, other))
    residual, gradient = torch.randn(200), torch.randn(200).to(dtype)
    residual[::17] = 0.1  # as close to a threshold as float32 allows
    gradient[::17] = 0.0
    residual[50], gradient[50], residual[90] = torch.inf, 1.0, torch.nan
    expected = residual + gradient if add else residual.clone()
    result = compiled.add_and_select(residual, gradient if add else None, threshold, start, stop, slots)
    matches = plain(expected, threshold, start, stop).tolist()
    assert result.tolist() == (matches if slots is None else [*matches, *[200] * slots][:slots])
    assert torch.equal(residual.nan_to_num(), expected.nan_to_num())


@there
@pytest.mark.parametrize(("start", "stop"), [(0, 200_001), (70_001, 140_003), (130_000, 130_007)])
@pytest.mark.parametrize("threshold", [2.0, 0.0])
def test_several_threads_select_the_same_in_the_same_order(start: int, stop: int, threshold: float) -> None:
    residual, gradient = torch.randn(200_001), torch.randn(200_001)
    expected = residual + gradient
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        result = compiled.add_and_select(residual, gradient, threshold, start, stop)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(residual, expected)
    assert torch.equal(result, plain(expected, threshold, start, stop))


def trained(compressor: Compressor, settings: CompressionSettings, device: str = "cpu") -> tuple[list[Tensor], Tensor]:
    """Return the results of some steps of one rank, and its residual."""
    reducer = Reducer(compressor, make_layout(), Comm(), settings, device=device)
    results = [reducer.reduce(make_gradient(reducer.layout, number, 0).to(device)).cpu() for number in range(6)]
    reducer.resolve_deferred()
    return results, reducer.residual.cpu()


def counted(monkeypatch: pytest.MonkeyPatch, room: Any) -> list[int]:
    """Count the calls of a kernel without replacing it."""
    calls: list[int] = []
    real = room.add_and_select

    def call(values: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(len(values))
        return real(values, *arguments, **options)

    monkeypatch.setattr(room, "add_and_select", call)
    return calls


@there
@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("slots", [None, 3.0])
def test_the_reducer_uses_the_compiled_kernel(kind: Any, slots: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = kind(density=0.02, exchange_mode="union") if kind is SAGE else kind(density=0.02)
    with use_backend("reference"):
        expected, left = trained(compressor, CompressionSettings(fixed_capacity=slots))
    calls = counted(monkeypatch, compiled)
    results, residual = trained(compressor, CompressionSettings(fixed_capacity=slots))
    assert calls == [make_layout().numel] * 6
    assert all(map(torch.equal, results, expected))
    assert torch.equal(residual, left)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [MiCRO, ExDyna, HardThreshold], ids=lambda kind: kind.name)
def test_the_reducer_uses_the_gpu_kernel(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from smelt.kernels.gpu import threshold_select as triton

    compressor = (
        HardThreshold(density=0.02, threshold=0.01) if kind is HardThreshold else kind(density=0.02, sampled_steps=0)
    )
    calls = counted(monkeypatch, triton)
    results, residual = trained(compressor, CompressionSettings(fixed_capacity=3.0), "cuda")
    assert len(calls) == 6
    expected, left = trained(compressor, CompressionSettings(fixed_capacity=3.0))
    assert all(map(torch.equal, results, expected))
    assert torch.equal(residual, left)


def test_without_a_compiler_the_eager_fallback_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    values = torch.randn(100)
    assert kernels.select_backend(values) == "reference"
    assert torch.equal(kernels.threshold_select(values, 1.0, 3, 90), plain(values, 1.0, 3, 90))
    assert kernels.select_backend(values.double()) == "reference"
